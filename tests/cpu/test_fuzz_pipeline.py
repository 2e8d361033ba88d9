"""Any bytes as a batch file, through the whole of rank 0's path: every line that is not blank ends as one row of strict JSON.

The rows meet the real reader, tokenizer, scheduler, sampler and writer; only the model is scripted, so thousands of files take
seconds.
"""

from __future__ import annotations

import io
import json
import zlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comm.single import SingleCommunicator
from engine.feed import Feed
from engine.job import Job
from engine.leader import Leader
from engine.loop import lead
from engine.output import OutputWriter
from engine.pages import PagePool
from engine.prepare import RowPreparer
from engine.progress import Progress
from engine.replica import Replica
from engine.resume import IndexSet, ResumeState
from engine.rows import read_rows
from engine.run_stats import RunStats
from engine.sampling_params import SamplingParams
from engine.scheduler import Limits, Scheduler
from engine.sinks import RowSink
from engine.text import Text
from tests.cpu.engine_harness import CPU, ScriptedBackend
from tests.cpu.tiny_tokenizer import build_tiny_tokenizer

MAX_LEN = 48

text_values = st.one_of(
    st.text(max_size=30), st.sampled_from(["", "<|im_end|>", "a\u2028b", "\ud800", "é" * 40, "User:", "\x00", "stop"])
)
numbers = st.one_of(st.integers(-3, 60), st.floats(), st.sampled_from([0, 1, 2**63, -(2**70), 1e308, 1e-320, 0.7, True]))
values = st.one_of(st.none(), st.booleans(), numbers, text_values, st.lists(st.one_of(text_values, numbers), max_size=3))
options = st.dictionaries(
    st.sampled_from(
        "max_tokens min_tokens temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed stop "
        "stop_token_ids ignore_eos n logprobs prompt_logprobs logit_bias include_stop_str skip_special_tokens temprature "
        "best_of stream max_completion_tokens top_logprobs".split()
    ),
    st.one_of(values, st.dictionaries(st.sampled_from(["0", "5", "511", "512", "-1", "x"]), numbers, max_size=2)),
    max_size=4,
)
sane = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 9),
        "temperature": st.sampled_from([0, 0.5, 1.0, 1e-6, 50]),
        "top_k": st.integers(-1, 600),
        "top_p": st.sampled_from([0, 0.1, 0.9, 1]),
        "stop": st.sampled_from(["e", ["a", "b"], "<|im_end|>", "the "]),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 2),
        "n": st.integers(1, 3),
        "repetition_penalty": st.sampled_from([1e-6, 0.5, 1.3, 1e6]),
        "logit_bias": st.dictionaries(st.sampled_from(["0", "7", "511"]), st.sampled_from([-100, 5, 100]), max_size=2),
        "min_tokens": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "include_stop_str": st.booleans(),
        "skip_special_tokens": st.booleans(),
    },
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "robot"]), "content": values}), max_size=3
)


def merged(head: dict, more: dict) -> dict:
    return {**more, **head}


bodies = st.one_of(
    st.fixed_dictionaries({"prompt": text_values}),
    st.fixed_dictionaries({"messages": messages}),
    st.fixed_dictionaries({"prompt_token_ids": st.lists(st.integers(-1, 520), max_size=60)}),
    st.fixed_dictionaries({"prompt": values, "id": values}),
)
rows = st.one_of(
    st.builds(merged, bodies, options),
    st.builds(merged, bodies, sane),
    st.builds(lambda body, own: {"custom_id": "c", "body": {**own, **body}}, bodies, sane),
    st.dictionaries(text_values, values, max_size=3),
)


def encode(row: object) -> bytes:
    return json.dumps(row).encode()  # writes NaN and Infinity too, as careless writers do


odd_lines = st.sampled_from([b"", b"  ", b"{", b"\xff", b"null"])
lines = st.one_of(rows.map(encode), rows.map(encode), st.binary(max_size=40), odd_lines)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return Text.load(build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def noise(token_id: int, position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(b"%d %d" % (token_id, position)))
    return torch.randn(512, generator=generator) * 4


def run(data: bytes, text: Text, output) -> Job:
    """What `engine.rank_zero` does with a file, around a scripted model."""
    replica = Replica(
        Scheduler(Limits(4, 16, MAX_LEN), PagePool(6, 16)), ScriptedBackend(noise, 512), SingleCommunicator(), 512, CPU
    )
    eos = frozenset(text.eos_ids())
    preparer = RowPreparer(text, eos, text.vocab_size, MAX_LEN, run_seed=3, is_chat=False)
    writer = OutputWriter(output, mode="overwrite")
    progress = Progress(None, 0, RunStats(), stream=io.StringIO(), is_quiet=True)
    job = Job(preparer, RowSink(writer, "m", False, True), progress, ResumeState(IndexSet()), is_strict=False)
    feed = Feed(job.requests(read_rows(io.BytesIO(data), SamplingParams(max_tokens=8))), depth=8)
    lead(replica, Leader(text, MAX_LEN, text.vocab_size), feed, RunStats(), look_ahead=8)
    writer.close_at_boundary()
    return job


def forbid(name: str) -> None:
    raise AssertionError(f"{name} is not strict JSON")


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(lines, min_size=1, max_size=6))
def test_every_line_ends_as_one_row(text, tmp_path, file_lines):
    # A first line that looks like another encoding is refused as a whole, which `test_rows` covers.
    data = b"\n".join([b'{"prompt": "x"}', *file_lines])
    output = tmp_path / "out.jsonl"
    job = run(data, text, output)
    num_rows = sum(1 for line in data.split(b"\n") if line.removeprefix(b"\xef\xbb\xbf").strip())
    written = [json.loads(line, parse_constant=forbid) for line in output.read_bytes().split(b"\n")[:-1]]
    assert sorted(row["index"] for row in written) == list(range(num_rows))
    assert job.counts.ok + job.counts.failed == num_rows
    for row in written:
        assert (row["status"] == "ok") == ("error" not in row)
        if row["status"] == "ok":
            ids = row["token_ids"] if isinstance(row["text"], list) else [row["token_ids"]]
            assert all(0 <= token_id < text.vocab_size for answer in ids for token_id in answer)
            assert all(len(answer) + row["prompt_tokens"] <= MAX_LEN for answer in ids)
