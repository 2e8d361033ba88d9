"""What each rank of a tensor-parallel world holds. Pure arithmetic: no tensors, no files, no communication.

Query heads stay with their KV head. The query heads of one KV head are cut into sub-groups of nearly equal
size; a sub-group with a copy of its KV head is a *unit*, and units are dealt in order, as evenly as possible,
to the ranks. So one rule covers KV heads split over ranks, KV heads replicated on ranks, and head counts that
divide by nothing. What is missing to equal shapes is padding: zero query heads, zero KV heads, zero MLP
columns, masked vocabulary rows. None of it changes the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import ModelConfig
from launch.errors import ModelError


@dataclass(frozen=True)
class ShardPlan:
    """Shapes of every rank's shard, and which part of the full model is rank `rank`'s.

    All `local_*` numbers are the same on every rank. Local query head j attends to local KV head `j //
    q_per_unit`. `q_heads`, `kv_heads`: full index of each local head, None for padding. `mlp_range`,
    `vocab_range`: [begin, end) of the full columns and rows; what they are short of `local_mlp` and
    `local_vocab` is padding, behind the real ones.
    """

    size: int
    rank: int
    full_heads: int
    full_kv_heads: int
    full_mlp: int
    full_vocab: int
    head_dim: int
    q_per_unit: int
    q_heads: tuple[int | None, ...]
    kv_heads: tuple[int | None, ...]
    local_mlp: int
    mlp_range: tuple[int, int]
    local_vocab: int
    vocab_range: tuple[int, int]

    @classmethod
    def make(cls, config: ModelConfig, size: int, rank: int, align: int = 1) -> ShardPlan:
        """The plan of `rank` in a world of `size`. `align`: `local_mlp` is rounded up to a multiple of it.

        *Raises* `ModelError` when a rank would hold nothing but padding: more ranks than query heads.
        """
        if size > config.full_heads:
            raise ModelError(
                f"{size} ranks are too many for this model: it has {config.full_heads} query heads and "
                f"{config.full_kv_heads} KV heads, so a rank would hold nothing but padding; "
                f"the largest degree that works is {config.full_heads}"
            )
        cuts = _best_cuts(config.group, config.full_kv_heads, size)
        q_heads, kv_heads = _deal_units(config.group, config.full_kv_heads, cuts, size, rank)
        local_mlp = _ceil_div(_ceil_div(config.intermediate_size, size), align) * align
        local_vocab = _ceil_div(config.full_vocab, size)
        vocab_begin = min(rank * local_vocab, config.full_vocab)
        return cls(
            size=size,
            rank=rank,
            full_heads=config.full_heads,
            full_kv_heads=config.full_kv_heads,
            full_mlp=config.intermediate_size,
            full_vocab=config.full_vocab,
            head_dim=config.head_dim,
            q_per_unit=_ceil_div(config.group, cuts),
            q_heads=q_heads,
            kv_heads=kv_heads,
            local_mlp=local_mlp,
            mlp_range=_even_share(config.intermediate_size, size, rank),
            local_vocab=local_vocab,
            vocab_range=(vocab_begin, min(vocab_begin + local_vocab, config.full_vocab)),
        )

    @property
    def local_q_heads(self) -> int:
        return len(self.q_heads)

    @property
    def local_kv_heads(self) -> int:
        return len(self.kv_heads)

    @property
    def padded_vocab(self) -> int:
        """Width of the gathered logits. Ranges are packed, so all columns from `full_vocab` on are padding."""
        return self.size * self.local_vocab

    @property
    def num_vocab_rows(self) -> int:
        """Real rows in this rank's vocabulary shard."""
        return self.vocab_range[1] - self.vocab_range[0]

    @property
    def local_sizes(self) -> dict[str, int]:
        """Local extent of each dimension name of `engine/families.py` that is split over the ranks."""
        return {
            "q": self.local_q_heads * self.head_dim,
            "kv": self.local_kv_heads * self.head_dim,
            "mlp": self.local_mlp,
            "vocab": self.local_vocab,
        }

    def pieces(self, dim: str) -> list[tuple[int, int, int]]:
        """How this rank's part of `dim` is put together: `(local start, full start, length)`, in elements.

        Local elements that no piece covers are padding. Neighbouring heads are merged into one piece.
        """
        if dim == "mlp":
            begin, end = self.mlp_range
            return [(0, begin, end - begin)] if end > begin else []
        if dim == "vocab":
            begin, end = self.vocab_range
            return [(0, begin, end - begin)] if end > begin else []
        return _head_pieces({"q": self.q_heads, "kv": self.kv_heads}[dim], self.head_dim)

    @property
    def padding_summary(self) -> str:
        """One clause for the user, empty when nothing is padded: `9 query heads padded to 12, ...`."""
        totals = (
            ("query heads", self.full_heads, self.size * self.local_q_heads),
            ("KV heads", self.full_kv_heads, self.size * self.local_kv_heads),
            ("MLP columns", self.full_mlp, self.size * self.local_mlp),
            ("vocabulary rows", self.full_vocab, self.padded_vocab),
        )
        words = {"KV heads": "replicated or padded"}
        return ", ".join(
            f"{full} {name} {words.get(name, 'padded')} to {total}" for name, full, total in totals if total != full
        )


def _best_cuts(group: int, kv_heads: int, size: int) -> int:
    """Into how many sub-groups to cut the query heads of a KV head, so that a rank's attention weights are fewest.

    q and o cost one matrix side a query head each, k and v one a KV head each: 2 * local_q + 2 * local_kv.
    Every rank must get a unit. Ties go to fewer KV heads, because those also cost cache.
    """

    def cost(cuts: int) -> tuple[int, int]:
        local_kv = _ceil_div(kv_heads * cuts, size)
        return 2 * local_kv * _ceil_div(group, cuts) + 2 * local_kv, local_kv

    return min((cuts for cuts in range(1, group + 1) if kv_heads * cuts >= size), key=cost)


def _deal_units(
    group: int, kv_heads: int, cuts: int, size: int, rank: int
) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Full query heads and full KV heads of a rank's units, padding last within a unit and within the rank."""
    q_per_unit = _ceil_div(group, cuts)
    begin, end = _even_share(kv_heads * cuts, size, rank)
    q_heads: list[int | None] = []
    kv_heads_held: list[int | None] = []
    for unit in range(begin, begin + _ceil_div(kv_heads * cuts, size)):
        kv_head, cut = divmod(unit, cuts)
        first, last = _even_share(group, cuts, cut) if unit < end else (0, 0)
        real = [kv_head * group + head for head in range(first, last)]
        q_heads += real + [None] * (q_per_unit - len(real))
        kv_heads_held.append(kv_head if unit < end else None)
    return tuple(q_heads), tuple(kv_heads_held)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _even_share(total: int, size: int, rank: int) -> tuple[int, int]:
    """[begin, end) of `rank` when `total` things are dealt in order and no two shares differ by more than one."""
    base, extra = divmod(total, size)
    begin = rank * base + min(rank, extra)
    return begin, begin + base + (rank < extra)


def _head_pieces(heads: tuple[int | None, ...], head_dim: int) -> list[tuple[int, int, int]]:
    pieces: list[tuple[int, int, int]] = []
    for local, full in enumerate(heads):
        if full is None:
            continue
        start, source = local * head_dim, full * head_dim
        if pieces and pieces[-1][0] + pieces[-1][2] == start and pieces[-1][1] + pieces[-1][2] == source:
            pieces[-1] = (*pieces[-1][:2], pieces[-1][2] + head_dim)
        else:
            pieces.append((start, source, head_dim))
    return pieces
