"""The compiled kernels of `comm/cuda`, one variant an element type."""

from __future__ import annotations

import torch

from comm.device_collectives import SOURCES
from comm.device_params import LamportParams, NormParams, OneShotParams, SentinelParams, TwoShotNormParams, TwoShotParams
from comm.device_signal import MoveParams, RelayParams
from comm.device_vocabulary import ArgmaxParams, DrawParams, GatherParams
from comm.link_echo import EchoParams
from kernels.build import HEADERS, Build
from kernels.elements import ELEMS
from kernels.launch_kernel import Kernel, load

ENTRY_POINTS = {
    "all_reduce_lamport": {"all_reduce_lamport": LamportParams},
    "all_reduce_lamport_norm": {"all_reduce_lamport_norm": NormParams},
    "all_reduce_sentinel": {"all_reduce_sentinel": SentinelParams},
    "all_reduce_one_shot": {"all_reduce_one_shot": OneShotParams},
    "all_reduce_two_shot": {"all_reduce_two_shot": TwoShotParams},
    "all_reduce_two_shot_norm": {"all_reduce_two_shot_norm": TwoShotNormParams},
    "argmax_lamport": {"argmax_lamport": ArgmaxParams, "draw_lamport": DrawParams},
    "gather_lamport": {"gather_lamport": GatherParams},
}
SIGNAL_ENTRY_POINTS = {
    f"{shape}_{verb}": kind
    for shape in ("packet", "signal")
    for verb, kind in (("put", MoveParams), ("take", MoveParams), ("relay", RelayParams))
}


def load_collectives(build: Build, dtypes: tuple[torch.dtype, ...] = tuple(ELEMS)) -> dict[tuple[str, torch.dtype], Kernel]:
    """Kernels by (entry point, dtype), compiled if the cache does not hold them, loaded on the current GPU."""
    kernels: dict[tuple[str, torch.dtype], Kernel] = {}
    for stem, entries in ENTRY_POINTS.items():
        for dtype in dtypes:
            module = load(build.cubin(SOURCES / f"{stem}.cu", [SOURCES, HEADERS], {"ELEM": ELEMS[dtype]}), stem)
            for name, params in entries.items():
                kernels[name, dtype] = module.function(name, (params,))
    return kernels


def load_signal(build: Build) -> dict[str, Kernel]:
    """`<shape>_<verb>` of `comm/device_signal.py`; they move bytes of any type."""
    module = load(build.cubin(SOURCES / "signal_channel.cu", [SOURCES, HEADERS], {"ELEM": 0}), "signal_channel")
    return {name: module.function(name, (kind,)) for name, kind in SIGNAL_ENTRY_POINTS.items()}


def load_link_echo(build: Build) -> Kernel:
    module = load(build.cubin(SOURCES / "link_echo.cu", [SOURCES, HEADERS], {"ELEM": 0}), "link_echo")
    return module.function("link_echo", (EchoParams,))
