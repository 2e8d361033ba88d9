"""What the page says of each bench. A bench that is not listed is rendered like the others, under its own name."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layout:
    """`work`: metrics that are the size of the work. `whole`: the metric of which others with its unit are parts.
    `like`: metrics that are held against the ceiling and the peers of another. `split`: keys of the case with a table a value.
    `is_by_algorithm`: a column an algorithm."""

    title: str
    about: str = ""
    work: tuple[str, ...] = ()
    whole: str | None = None
    like: dict[str, str] = field(default_factory=dict)
    split: tuple[str, ...] = ()
    is_by_algorithm: bool = False


LAYOUTS = {
    "decode": Layout("Decode", "Random weights of a public shape, the whole engine. TPOT excludes prefill.", split=("model",)),
    "prefill": Layout("Prefill", "Time to the first token, and prompt tokens a second.", like={"ttft_p90_ms": "ttft_ms"}),
    "ways": Layout(
        "Ways to reduce",
        "The same prompts by every way to sum over the ranks, in graphs and without. `host_loop` is the naive way: the host\n"
        "waits before and after each sum. A request is its prompt and 128 tokens more; it and `torch syncs` count waits of the\n"
        "host inside torch, `host syncs per token` decode steps that the engine waits for. Equal tokens: those before an answer\n"
        "first differs from the first way's; sums that round otherwise turn near-ties.",
        split=("model",),
    ),
    "throughput": Layout("Throughput", "Many requests of mixed lengths, all there at the start."),
    "drift": Layout(
        "Long run", "Prompts through a full batch; tenths of equal work. Mismatches: ranks chose other tokens at some step.",
        work=("steps_compared",),
    ),
    "speculate": Layout(
        "Speculation",
        "Speedup over plain decode of the same rows. Where there are requests, the batch is kept full: that table shows up to\n"
        "how many rows drafts pay, by output tokens a second with and without, prefill of new rows included.",
    ),
    "coldstart": Layout("Cold start", "From the start of the process to the first token.", whole="first_token_s"),
    "stages": Layout(
        "Stages of a step",
        "Each stage beside its share of the wall time: of one decode step, and of the prefill of the whole batch. The steps are\n"
        "profiled ones; events between their stages end the overlap of kernels, and the overhead ratio is their time over that\n"
        "of plain steps.",
        whole="wall_us",
        split=("phase", "model"),
    ),
    "all_reduce": Layout(
        "All-reduce",
        "Dependent calls in a CUDA graph, the slowest rank, the median of repeats. Bold is the fastest of a row; the share of\n"
        "the ceiling and the ratios to peers are the fastest one's. Ranks that share a GPU have no ceiling of their own and no\n"
        "peer (NCCL refuses them): there the baseline is `one_shot`, the textbook form.",
        split=("world", "ranks_per_gpu", "dtype"),
        is_by_algorithm=True,
    ),
    "put_signal": Layout("Put-with-signal", "One hop between two GPUs; the ceiling is the bare link, one word there."),
    "soak": Layout("Soak", "All-reduces with changing data and sizes, every one checked on the device.", work=("calls",)),
    "product": Layout(
        "Products of a decode step",
        "Each kind alone, weights from HBM, by the fastest way that `engine.bench.gemv` timed; the others are in\n"
        "`kernels/gemv_choice.py`. FP8 is held against the library's product with the same weight in bf16.",
        split=("model",),
    ),
    "prefill_product": Layout("Products of prefill", "Each kind alone, with the quantising or widening that a way needs."),
    "fp8_error": Layout(
        "FP8 weights",
        "Errors in percent of what the model computes in fp32: of a kind's products, and of the logits when it alone is in FP8.\n"
        "Beside them the whole model in bf16.",
    ),
    "decode_attention": Layout("Decode attention", "One layer's share of a step."),
    "cpu": Layout("CPU", "Against transformers in one process; only the ratios hold on another day."),
}  # fmt: skip


def layout_of(bench: str) -> Layout:
    return LAYOUTS.get(bench) or Layout(f"`{bench}`")


def bench_order(bench: str) -> tuple[int, str]:
    known = list(LAYOUTS)
    return (known.index(bench) if bench in LAYOUTS else len(known)), bench
