"""What the all-reduces of `comm/cuda` take: each structure as the `.cu` of its name lays it out."""

from __future__ import annotations

import ctypes

from comm.device_watch import WatchParams

MAX_RANKS = 8


class Pointers(ctypes.Array):
    _type_, _length_ = ctypes.c_uint64, MAX_RANKS


class LamportParams(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_uint64), ("out", ctypes.c_uint64), ("inbox", Pointers), ("epochs", ctypes.c_uint64),
        ("watch", WatchParams), ("num_elems", ctypes.c_int64), ("rank", ctypes.c_uint32), ("size", ctypes.c_uint32),
        ("max_ctas", ctypes.c_uint32), ("cta_packets", ctypes.c_uint32), ("is_aligned", ctypes.c_uint32),
    ]  # fmt: skip


class NormParams(ctypes.Structure):
    _fields_ = [
        ("reduce", LamportParams), ("residual", ctypes.c_uint64), ("normed", ctypes.c_uint64), ("weight", ctypes.c_uint64),
        ("eps", ctypes.c_float), ("hidden", ctypes.c_uint32), ("parts", ctypes.c_uint64), ("part_pitch", ctypes.c_int64),
        ("num_parts", ctypes.c_uint32), ("is_next_early", ctypes.c_uint32),
    ]  # fmt: skip


class SentinelParams(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_uint64), ("out", ctypes.c_uint64), ("inbox", Pointers), ("epochs", ctypes.c_uint64),
        ("used", ctypes.c_uint64), ("watch", WatchParams), ("num_elems", ctypes.c_int64), ("rank", ctypes.c_uint32),
        ("size", ctypes.c_uint32), ("max_ctas", ctypes.c_uint32), ("cta_vectors", ctypes.c_uint32),
        ("is_aligned", ctypes.c_uint32),
    ]  # fmt: skip


class OneShotParams(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_uint64), ("out", ctypes.c_uint64), ("parts", Pointers), ("flags", Pointers),
        ("epochs", ctypes.c_uint64), ("watch", WatchParams), ("num_elems", ctypes.c_int64), ("rank", ctypes.c_uint32),
        ("size", ctypes.c_uint32), ("max_ctas", ctypes.c_uint32), ("cta_units", ctypes.c_uint32),
        ("is_aligned", ctypes.c_uint32),
    ]  # fmt: skip


class TwoShotParams(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_uint64), ("out", ctypes.c_uint64), ("parts", Pointers), ("flags", Pointers),
        ("epochs", ctypes.c_uint64), ("watch", WatchParams), ("num_elems", ctypes.c_int64), ("rank", ctypes.c_uint32),
        ("size", ctypes.c_uint32), ("max_ctas", ctypes.c_uint32), ("cta_vectors", ctypes.c_uint32),
        ("is_aligned", ctypes.c_uint32),
    ]  # fmt: skip


class TwoShotNormParams(ctypes.Structure):
    _fields_ = [
        ("x", Pointers), ("normed", Pointers), ("flags", Pointers), ("residual", ctypes.c_uint64), ("weight", ctypes.c_uint64),
        ("epochs", ctypes.c_uint64), ("watch", WatchParams), ("rows", ctypes.c_uint32), ("vectors", ctypes.c_uint32),
        ("rank", ctypes.c_uint32), ("size", ctypes.c_uint32), ("max_ctas", ctypes.c_uint32), ("eps", ctypes.c_float),
    ]  # fmt: skip
