"""The shard plan as a partition: everything real exactly once, in its place, in equal shapes. Cases 1, 2, 4, 7, 14."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import ModelConfig
from engine.rope import RopeConfig
from engine.shapes import SHAPES, named_config
from engine.shard_plan import ShardPlan
from launch.errors import ModelError


def make_config(kv_heads: int, group: int, mlp: int, vocab: int, head_dim: int = 8) -> ModelConfig:
    return ModelConfig(
        family="llama",
        num_layers=1,
        hidden_size=64,
        intermediate_size=mlp,
        full_heads=kv_heads * group,
        full_kv_heads=kv_heads,
        head_dim=head_dim,
        full_vocab=vocab,
        rms_norm_eps=1e-6,
        rope=RopeConfig("default", 1e4),
        max_positions=64,
        is_tied=False,
        windows=(None,),
    )


def plans_of(config: ModelConfig, size: int, align: int = 1) -> list[ShardPlan]:
    return [ShardPlan.make(config, size, rank, align) for rank in range(size)]


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 12), st.integers(1, 400), st.integers(1, 400), st.integers(1, 8),
    st.sampled_from([1, 16]),
)  # fmt: skip
def test_every_part_of_the_model_is_held_once(kv_heads, group, mlp, vocab, size, align):
    config = make_config(kv_heads, group, mlp, vocab)
    if size > config.full_heads:
        with pytest.raises(ModelError):
            ShardPlan.make(config, size, 0)
        return
    plans = plans_of(config, size, align)
    shapes = {(p.local_q_heads, p.local_kv_heads, p.local_mlp, p.local_vocab, p.q_per_unit) for p in plans}
    assert len(shapes) == 1

    held = [head for plan in plans for head in plan.q_heads if head is not None]
    assert held == list(range(config.full_heads))
    assert {head for plan in plans for head in plan.kv_heads if head is not None} == set(range(kv_heads))
    for plan in plans:
        assert plan.local_q_heads == plan.local_kv_heads * plan.q_per_unit
        assert any(head is not None for head in plan.q_heads)
        for local, head in enumerate(plan.q_heads):
            if head is not None:
                assert plan.kv_heads[local // plan.q_per_unit] == head // config.group

    assert_partition([plan.mlp_range for plan in plans], mlp, plans[0].local_mlp)
    assert_partition([plan.vocab_range for plan in plans], vocab, plans[0].local_vocab)
    assert plans[0].local_mlp % align == 0
    # Packed: the gathered column of a vocabulary id is the id.
    assert all(p.vocab_range[0] == min(p.rank * p.local_vocab, vocab) for p in plans)


def assert_partition(ranges: list[tuple[int, int]], total: int, local: int) -> None:
    assert ranges[0][0] == 0 and ranges[-1][1] == total
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:]))
    assert all(0 <= end - begin <= local for begin, end in ranges)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.sampled_from(["q", "kv", "mlp", "vocab"]))
def test_pieces_cover_the_real_elements(kv_heads, group, size, dim):
    config = make_config(kv_heads, group, 100, 131)
    if size > config.full_heads:
        return
    full = {"q": config.full_heads * 8, "kv": kv_heads * 8, "mlp": 100, "vocab": 131}[dim]
    seen: list[int] = []
    for plan in plans_of(config, size):
        local = [index for start, _, length in plan.pieces(dim) for index in range(start, start + length)]
        assert len(set(local)) == len(local) and all(0 <= index < plan.local_sizes[dim] for index in local)
        seen += [index for _, begin, length in plan.pieces(dim) for index in range(begin, begin + length)]
    assert sorted(set(seen)) == list(range(full))
    if dim != "kv":  # only KV heads are ever replicated
        assert len(seen) == full


# model, size -> local query heads, local KV heads
KNOWN = [
    ("qwen2.5-72b", 8, 8, 1), ("qwen2.5-72b", 4, 16, 2), ("qwen2.5-7b", 8, 4, 1), ("qwen2.5-7b", 4, 7, 1),
    ("qwen2.5-0.5b", 2, 7, 1), ("qwen2.5-0.5b", 4, 4, 1), ("qwen2.5-0.5b", 8, 2, 1), ("qwen2.5-1.5b", 8, 2, 1),
    ("qwen2.5-1.5b", 3, 4, 2), ("qwen2.5-3b", 8, 2, 1), ("qwen2.5-14b", 8, 5, 1),
]  # fmt: skip


@pytest.mark.parametrize("name, size, local_q, local_kv", KNOWN)
def test_known_degrees(name, size, local_q, local_kv):
    plan = ShardPlan.make(named_config(name), size, 0)
    assert (plan.local_q_heads, plan.local_kv_heads) == (local_q, local_kv)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", range(1, 9))
def test_every_public_size_has_a_plan_at_every_degree(name, size):
    """Cases 1, 2 and 4: degrees that big engines refuse."""
    plans = plans_of(named_config(name), size)
    assert sum(head is not None for plan in plans for head in plan.q_heads) == named_config(name).full_heads


def test_summary_names_what_is_padded():
    config = dataclasses.replace(named_config("qwen2.5-7b"), full_heads=9, full_kv_heads=3, full_vocab=1001)
    summary = ShardPlan.make(config, 2, 1).padding_summary
    assert "9 query heads padded to 12" in summary and "1001 vocabulary rows padded to 1002" in summary
    assert ShardPlan.make(named_config("qwen2.5-72b"), 8, 3).padding_summary == ""


def test_refusal_names_heads_degree_and_remedy():
    config = make_config(kv_heads=2, group=3, mlp=100, vocab=131)
    with pytest.raises(ModelError, match=r"7 ranks .* 6 query heads .* largest degree that works is 6"):
        ShardPlan.make(config, 7, 0)


def test_trimmed_vocabulary_pads_at_the_end():
    """Case 14: 151665 rows at 2 and 8 ranks."""
    config = dataclasses.replace(named_config("qwen2.5-0.5b"), full_vocab=151665)
    for size in (2, 8):
        plans = plans_of(config, size)
        assert sum(plan.num_vocab_rows for plan in plans) == 151665 <= plans[0].padded_vocab
        assert all(plan.num_vocab_rows == plan.local_vocab for plan in plans[:-1])
