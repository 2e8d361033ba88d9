"""Real text on a GPU: eager steps and graphs against what a CPU answered in fp32, with a model that `carry_model.py` brought.

`python -m pytest -q -s tests/gpu/test_smollm2_text.py --carried-model FOLDER`, about 40 s; prints what it counted.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.gpu.graph_engine import answer_on_gpu, open_replica
from tests.near_ties import MOST_TIES, Reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

AMPLIFICATION = 1.0  # of rounding; 0.6 as measured with transformers in bf16 against itself in fp32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def folder(request):
    folder = request.config.getoption("--carried-model", default=None)
    if folder is None:
        pytest.skip("--carried-model names no folder; tests/gpu/carry_model.py makes one")
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder, "cuda", AMPLIFICATION)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpus_text_is_the_cpus_up_to_near_ties(folder, reference, dtype):
    """All rows at once, then the first three one by one."""
    from engine.text import Text
    from tests.cpu.engine_harness import request

    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    prompts, answers, text = expected["prompts"], expected["answers"], Text.load(folder)
    settings = {"dtype": dtype, "max_batch": len(prompts), "max_model_len": 512, "kv_memory_bytes": 1 << 29}
    found: dict[str, list[list[int]]] = {}
    for name, steps in (("eager", "eager"), ("graphs", "cuda")):
        replica = open_replica(folder, steps, **settings)
        requests = [request(ids, row, max_tokens=len(answers[row])) for row, ids in enumerate(prompts)]
        run = answer_on_gpu(replica, requests, text=text)
        alone = [
            answer_on_gpu(replica, [request(ids, max_tokens=len(answers[row]))], text=text).token_ids[0]
            for row, ids in enumerate(prompts[:3])
        ]
        assert (run.stats.num_waits == 0) == (name == "graphs")
        found |= {name: run.token_ids, f"{name} alone": alone}
    print()
    for name, tokens in found.items():
        tally = reference.compare(prompts[: len(tokens)], answers[: len(tokens)], tokens, DTYPES[dtype])
        print(f"{dtype}, {name} against the CPU's fp32: {tally}")
        assert tally.tie_rate < (0.002 if dtype == "float32" else MOST_TIES)
    for one, other in (("graphs", "eager"), ("graphs alone", "eager alone")):
        tally = reference.compare(prompts[: len(found[one])], found[other], found[one], DTYPES[dtype])
        print(f"{dtype}, {one} against {other}: {tally}")
    print(f"graphs: {text.decode(prompts[0])!r} {text.decode(found['graphs'][0])!r}")
