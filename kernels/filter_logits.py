"""What sampling options leave of the logits, on whole rows: penalties, bias, forbidden ids, top-k, top-p, min-p.

`filter_logits` is the torch twin of `filter_logits.cu`: both can be captured, and both are followed by a draw. The row by row
version, on the host's terms, is `engine/sampler.py`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.build import Build
from kernels.build_variants import variant_of
from kernels.launch_kernel import Kernel, load

SOURCE = Path(__file__).with_suffix(".cu")
MAX_BIASES, MAX_FORBIDDEN = 300, 64  # ids a row
MAX_IDS = 1 << 18  # columns: so many probabilities fit the kernel's sums
CLUSTER, THREADS = 8, 512
_SHARED_BYTES = 8 * (256 * 32 + 2 * 256 + 2 * 256 + 5)  # `RadixMemory`

# Words of a row's rules: integers, then floats as the bits of fp64.
RULE_WORDS = 8
TOP_K, FREE_FROM, SEEN_SLOT, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(RULE_WORDS)


@dataclass(frozen=True)
class FilterOptions:
    """How each row's logits are filtered; all contiguous and on one device, read when the filter runs.

    `rules`: int64 `[rows, RULE_WORDS]`: top-k (0: off), the first position at which forbidden ids are free, the row's slot in
    `seen`, then top-p (1: off), min-p (0: off), repetition (1: off), presence and frequency penalty as the bits of fp64.
    `bias_ids` int64, `biases` fp32 `[rows, MAX_BIASES]`: added to the logits; no id twice, -1 for none. `forbidden_ids` int64
    `[rows, MAX_FORBIDDEN]`, -1 for none. `seen` int32 `[slots, at least num_ids]`: twice the times an id is in the row's output,
    plus 1 if it is in its prompt; rows may share a slot only if they have no penalties.
    """

    rules: torch.Tensor
    bias_ids: torch.Tensor
    biases: torch.Tensor
    forbidden_ids: torch.Tensor
    seen: torch.Tensor

    def number(self, word: int) -> torch.Tensor:
        """fp64 `[rows, 1]`: one of the numbers among the rules."""
        return self.rules[:, word : word + 1].view(torch.float64)


def filter_logits(
    logits: torch.Tensor,
    num_ids: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    options: FilterOptions,
) -> torch.Tensor:
    """Filter columns [0, `num_ids`) of `logits` (fp32 `[rows, at least num_ids]`) in place, and return it. Any device.

    `token_ids`, `positions` int64 `[rows]`: the tokens just computed, which `options.seen` takes in, and where; a negative
    position is a row that is not there, whose logits come to nothing. `temperatures` fp64 `[rows]`, 0 for greedy.

    A greedy row gets penalties, bias and forbidden ids. In another one, what may be drawn keeps its logit less the row's
    highest, and the rest is -inf. *Numbers*: those of `engine.sampler`; ties at a border go to the lower id. A row that holds a
    NaN or whose highest logit is not finite has no finite highest afterwards either.
    """
    rows = logits[:, :num_ids]
    _penalise(rows, token_ids, options)
    present, no_bias = options.bias_ids >= 0, torch.zeros_like(options.biases)
    rows.scatter_add_(1, options.bias_ids.clamp(min=0), torch.where(present, options.biases, no_bias))
    is_short = (positions < options.rules[:, FREE_FROM])[:, None]
    is_short = is_short & (options.forbidden_ids >= 0) & (options.forbidden_ids < num_ids)
    is_forbidden = torch.zeros(len(rows), num_ids + 1, dtype=torch.bool, device=rows.device)
    is_forbidden.scatter_(1, torch.where(is_short, options.forbidden_ids, num_ids), True)  # the last column is nobody's
    rows.masked_fill_(is_forbidden[:, :num_ids], -torch.inf)
    is_drawn = temperatures[:, None] > 0
    rows.copy_(torch.where(is_drawn, _survivors(rows, temperatures[:, None], options), rows))
    return logits


def _penalise(rows: torch.Tensor, token_ids: torch.Tensor, options: FilterOptions) -> None:
    slots, seen = options.rules[:, SEEN_SLOT], options.seen
    seen.view(-1).index_add_(0, slots * seen.shape[1] + token_ids, torch.full_like(token_ids, 2, dtype=seen.dtype))
    words = seen[slots][:, : rows.shape[1]]
    repetition = options.number(REPETITION).float()
    repeated = torch.where(rows < 0, rows * repetition, rows / repetition)
    rows.copy_(torch.where(words > 0, repeated, rows))
    loss = options.number(PRESENCE).float() + options.number(FREQUENCY).float() * (words >> 1).float()
    rows.sub_(torch.where(words > 1, loss, torch.zeros_like(loss)))


def _survivors(rows: torch.Tensor, temperatures: torch.Tensor, options: FilterOptions) -> torch.Tensor:
    """Each cut takes a prefix of the descending order, so what remains is a number of ids from the top."""
    values, ids = torch.sort(rows, dim=1, descending=True, stable=True)
    temperatures = torch.where(temperatures > 0, temperatures, 1.0)
    probabilities = ((values - values[:, :1]).double() / temperatures).exp()
    idx = torch.arange(rows.shape[1], device=rows.device)
    top_k, top_p, min_p = options.rules[:, TOP_K, None], options.number(TOP_P), options.number(MIN_P)
    is_kept = (idx < top_k) | (top_k <= 0)
    probabilities = probabilities * is_kept
    before = probabilities.cumsum(1) - probabilities
    is_likely = (before < top_p * probabilities.sum(1, keepdim=True)) | (top_p >= 1.0)
    is_kept &= idx < _at_least_one(is_likely)
    is_kept &= idx < _at_least_one(is_kept & ((probabilities >= min_p * probabilities[:, :1]) | (min_p <= 0.0)))
    kept = torch.zeros_like(is_kept).scatter_(1, ids, is_kept)
    return torch.where(kept, rows - values[:, :1], -torch.inf)


def _at_least_one(is_kept: torch.Tensor) -> torch.Tensor:
    return is_kept.sum(1, keepdim=True).clamp(min=1)


class FilterParams(ctypes.Structure):
    """Of `filter_logits.cu`."""

    _fields_ = [
        ("logits", ctypes.c_uint64), ("token_ids", ctypes.c_uint64), ("positions", ctypes.c_uint64),
        ("temperatures", ctypes.c_uint64), ("rules", ctypes.c_uint64), ("bias_ids", ctypes.c_uint64),
        ("biases", ctypes.c_uint64), ("forbidden_ids", ctypes.c_uint64), ("seen", ctypes.c_uint64), ("pitch", ctypes.c_int64),
        ("seen_pitch", ctypes.c_int64), ("num_ids", ctypes.c_uint32),
    ]  # fmt: skip


def load_filter_logits(build: Build) -> Kernel:
    """The kernel, compiled if the cache does not hold it, loaded on the current GPU. *Raises* `DoorbellError`."""
    return load(variant_of(SOURCE, {"ELEM": 2}).built_by(build).cubin, SOURCE.stem).function("filter_logits", (FilterParams,))


def launch_filter_logits(
    kernel: Kernel,
    logits: torch.Tensor,
    num_ids: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    options: FilterOptions,
    is_pdl: bool = True,
) -> torch.Tensor:
    """As `filter_logits`, in one launch on torch's current stream. All are contiguous tensors of the GPU.

    *Numbers*: a row that is not there stays as it is, and so does one whose highest logit is not finite, past its penalties.
    Sums for top-p are exact to 2**-46 a probability, so a border may lie elsewhere than the twin's where these are within 1e-8.
    *Cost*: reads the logits about ten times, from cache. *Raises* `TypeError`, `ValueError` for tensors that do not fit.
    """
    count = logits.shape[0]
    shapes = {"bias_ids": (count, MAX_BIASES), "biases": (count, MAX_BIASES), "forbidden_ids": (count, MAX_FORBIDDEN)}
    for name, tensor, dtype, shape in (
        ("logits", logits, torch.float32, tuple(logits.shape)),
        ("token_ids", token_ids, torch.int64, (count,)),
        ("positions", positions, torch.int64, (count,)),
        ("temperatures", temperatures, torch.float64, (count,)),
        ("rules", options.rules, torch.int64, (count, RULE_WORDS)),
        ("bias_ids", options.bias_ids, torch.int64, shapes["bias_ids"]),
        ("biases", options.biases, torch.float32, shapes["biases"]),
        ("forbidden_ids", options.forbidden_ids, torch.int64, shapes["forbidden_ids"]),
        ("seen", options.seen, torch.int32, tuple(options.seen.shape)),
    ):
        if tensor.dtype != dtype or not tensor.is_cuda:
            raise TypeError(f"{name} must be {dtype} on a GPU, not {tensor.dtype} on {tensor.device}")
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {shape}, not {tuple(tensor.shape)}")
    if not 1 <= num_ids <= min(MAX_IDS, logits.shape[1], options.seen.shape[1]):
        room = f"{logits.shape[1]} columns, {options.seen.shape[1]} counters and the most there may be, {MAX_IDS}"
        raise ValueError(f"{num_ids} ids do not fit {room}")
    params = FilterParams(
        logits.data_ptr(), token_ids.data_ptr(), positions.data_ptr(), temperatures.data_ptr(), options.rules.data_ptr(),
        options.bias_ids.data_ptr(), options.biases.data_ptr(), options.forbidden_ids.data_ptr(), options.seen.data_ptr(),
        logits.shape[1], options.seen.shape[1], num_ids,
    )  # fmt: skip
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch(count * CLUSTER, THREADS, (params,), stream, _SHARED_BYTES, CLUSTER, is_pdl)
    return logits
