"""What other engines take for the same work: measured on the same machines, and published."""

from __future__ import annotations

from dataclasses import dataclass

from engine.bench.decode import VLLM_TPOT_MS
from engine.bench.load import VLLM, Case
from engine.bench.prefill import VLLM_TTFT_MS

_MEASURED_ON = "H200"
_QUOTED = "vLLM, figure quoted in public without prompt length or settings"
# TPOT in ms, published: by (GPU, model, tp, dtype), batch 1, at any prompt.
PUBLISHED_TPOT_MS = {
    ("H200", "qwen2.5-72b", 4, "bf16"): (1e3 / 68, _QUOTED),
    ("H200", "qwen2.5-72b", 8, "bf16"): (1e3 / 92, _QUOTED),
    ("H100", "qwen2.5-72b", 2, "bf16"): (30.9, "vLLM, github.com/tenstorrent/tt-inference-server/issues/143"),
}


@dataclass(frozen=True)
class Peer:
    """Another engine's times for a case, in ms; None where it has none. `source` names the engine too."""

    source: str
    tpot_ms: float | None
    ttft_ms: float | None


def peer_of(case: Case, gpu: str) -> Peer | None:
    """The peer for `case` on a GPU of that name; None where nobody has a number."""
    key = (case.model, case.tp, case.dtype, case.batch)
    tpot_ms = VLLM_TPOT_MS.get(key, {}).get(case.prompt)
    ttft_ms = VLLM_TTFT_MS.get(key, {}).get(case.prompt)
    if gpu == _MEASURED_ON and (tpot_ms or ttft_ms):
        return Peer(VLLM, tpot_ms, ttft_ms)
    published = PUBLISHED_TPOT_MS.get((gpu, case.model, case.tp, case.dtype)) if case.batch == 1 else None
    return None if published is None else Peer(published[1], published[0], None)
