"""What a run is asked to be: parsed once, frozen, passed down."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MAX_TOKENS = 512
DEFAULT_PAGE_SIZE = 16
MAX_ADAPTIVE_DRAFTS = 8  # of a row and step, where it is not said how many
MAX_NUM_DRAFTS = 16
# Batches with more rows than this decode without guesses, in graphs: there 7B loses by a draft of 0.5B. Measured by
# `make bench-speculate REFILLS=4 BATCH="1 2 4 8 16 32 48 64"`, a batch that is kept full.
DEFAULT_SPECULATIVE_ROWS = 16
# Of a draft model in graphs: whole on all ranks, whole on the first, which hands its drafts to the others, or split over all.
DRAFT_PLACEMENTS = ("all", "first", "split")
DRAFT_WAITS = ("kernel", "stream")  # `comm.device_signal.WAITS`, which is not to be imported for a list of options
DEFAULT_KV_SHARE_CPU = 0.25  # of the memory that is free at start, over all ranks of the machine
DEFAULT_KV_SHARE_GPU = 0.90  # of the GPU's memory, weights included


@dataclass(frozen=True)
class EngineSettings:
    """How to load and run a model.

    `model`: a folder, or with `load_format="dummy"` a named shape such as `qwen2.5-7b`. `dtype`: `auto`, `float32`, `bfloat16`,
    `float16`, or `fp8` for matrices in FP8 beside the activations that `auto` means. `kv_memory_bytes`: KV cache of one rank;
    None chooses from what is free. `max_step_tokens`: the prefill chunk.
    `comm`: `auto` or one of `launch.comm_policy.NAMES`. `all_reduce`: a name of `comm.choice_table.FORCED`: for comparisons, the
    algorithm of all sums of the step over GPUs; `auto` chooses by the size of a message, and goes with any `comm`.
    `is_gpu_sharing`: more ranks than GPUs are dealt to the GPUs in turn, and each takes its part of the memory; for tests, under
    MPS.
    `shard_of`: compute what rank 0 of so many ranks would, alone; the output means nothing.
    `None` in `max_model_len` means the model's own limit. `is_ngram` or `draft_model` (a folder or shape, like `model`) switch
    speculation on, with `num_drafts` guessed tokens a row and step (None: as many as pay); `draft_placement`: of a draft
    model in graphs, one of `DRAFT_PLACEMENTS`; `draft_wait`: how drafts of the first rank are waited for, one of `DRAFT_WAITS`;
    `max_speculative_rows`: in graphs, batches with more rows than this decode without guesses; None for the measured border;
    `draft_kv_memory_bytes`: the draft model's KV cache without graphs, whole on rank 0.
    `is_eager`: plain torch steps on a GPU, no graphs and no bursts; a CPU has none anyway.
    `is_profiled`: steps are timed stage by stage (`engine.profile`). `graph_tokens`: the most new tokens of a step that prefills
    by a graph, where there are any; 0 for none, None for as many as are worth one. `fp8_products`: how more than a few rows are
    multiplied by FP8 matrices on a GPU: `scaled`, by FP8 activations, or `widened`, by the matrix written out in bf16
    (`kernels/fp8_linear.py`).
    """

    model: str
    load_format: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    comm: str = "auto"
    all_reduce: str = "auto"
    is_gpu_sharing: bool = False
    shard_of: int | None = None
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    max_batch: int = 32
    max_step_tokens: int | None = None
    page_size: int = DEFAULT_PAGE_SIZE
    is_prefix_reuse: bool = True
    threads: int | None = None
    dummy_seed: int = 0
    is_ngram: bool = False
    draft_model: str | None = None
    num_drafts: int | None = None
    max_speculative_rows: int | None = None
    draft_kv_memory_bytes: int | None = None
    draft_placement: str = "all"
    draft_wait: str = "kernel"
    is_eager: bool = False
    is_profiled: bool = False
    graph_tokens: int | None = None
    fp8_products: str = "scaled"
