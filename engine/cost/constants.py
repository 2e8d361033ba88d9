"""The constants of the cost model, each with its unit and where it comes from. An H200's; `engine/cost/gpus.py` has others.

Not here: the times of all-reduces, which are read from the records, and the datasheets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from engine.bench.roof import READ_TB_S


@dataclass(frozen=True)
class Constant:
    """`is_measured`: False for a guess that waits for its run. `scales_with`: the datasheet figure, `hbm`, `matrix` or
    `matrix_fp8`, that it is proportional to on another GPU; empty for a time that is taken to be the same there."""

    value: float
    unit: str
    source: str
    is_measured: bool = True
    scales_with: str = ""


_PRODUCTS = "results/product.jsonl, one row: the line through gate+up of 72B at TP=1 and its qkv at TP=2"
_LIBRARY = "trial on an H200, 2026-11-30: cuBLAS in a graph, line through the 12 products of 72B at TP=2, 4, 8 (within 2.1 us)"
_STAGES = "results/stages.jsonl, prefill of 72B at TP=2"
_CHUNK_ATTENTION = f"{_STAGES}: line through 40.5 us a layer at 512 and 226 at 2048 tokens, bf16, rotation and cache with it"
_LAUNCHES = "results/LOG.md, 2026-11-30: 0.38 ms a layer, of 8 kernels of our own (results/stages.jsonl), 4 products, attention"
_ATTENTION = "results/LOG.md, 2026-11-30: line through 3.68 us at 512 and 23.1 us at 32k tokens, one row of four KV heads"
_CHOICE = "results/LOG.md, 2026-11-30: arg-max of 76032 columns a rank at two ranks, line through 1 and 32 rows"


@dataclass(frozen=True)
class Constants:
    """How fast the kinds of kernels are, as time = `_us` + bytes / `_tb_s` (or operations / `_tflops`)."""

    read_tb_s: Constant = Constant(READ_TB_S, "TB/s", "the fastest read measured on an H200 (bulk copies)", scales_with="hbm")
    copy_tb_s: Constant = Constant(
        4.30, "TB/s", "trial on an H200, 2026-11-30: torch copy, bytes read and written", scales_with="hbm"
    )
    product_bf16_tb_s: Constant = Constant(4.53, "TB/s", f"{_PRODUCTS} (4.49 and 4.09 TB/s)", scales_with="hbm")
    product_bf16_us: Constant = Constant(2.0, "us a product", f"{_PRODUCTS} (4.49 and 4.09 TB/s)")
    product_fp8_tb_s: Constant = Constant(4.39, "TB/s", f"{_PRODUCTS} (4.27 and 3.28 TB/s)", scales_with="hbm")
    product_fp8_us: Constant = Constant(3.2, "us a product", f"{_PRODUCTS} (4.27 and 3.28 TB/s)")
    library_tb_s: Constant = Constant(4.42, "TB/s", _LIBRARY, scales_with="hbm")
    # In a loop of its own a product takes 4.3 us beyond its bytes. Of many rows it has a last wave of tiles as well, which leaves
    # SMs idle: qkv and o of 72B, 512 and 2048 tokens in results/stages.jsonl, lie on lines that begin at 10.1 and 10.6 us.
    library_us: Constant = Constant(
        9.5, "us a product", f"{_STAGES}, and fitted to results/decode.jsonl: 7B bf16, 32 rows, and to results/prefill.jsonl"
    )
    matrix_tflops: Constant = Constant(
        697.0, "TFLOP/s", "fitted to results/prefill.jsonl: 7B at 512 and 2048 tokens, 72B at 512 and 2048", scales_with="matrix"
    )
    # Less the bytes of SiLU and of quantising the rows, and 18 us a product, the stages in FP8 (qkv 156, o 126, MLP 1143 us at
    # 2048 tokens) come to 1340 to 1440 TFLOP/s.
    matrix_fp8_tflops: Constant = Constant(
        1410.0, "TFLOP/s", f"{_STAGES} in FP8, and fitted to results/prefill.jsonl: 72B FP8", scales_with="matrix_fp8"
    )
    scaled_us: Constant = Constant(
        18.0, "us a product of FP8 with FP8", f"{_STAGES} in FP8, and fitted to results/decode.jsonl: 7B FP8, 32 rows"
    )
    attention_tb_s: Constant = Constant(3.4, "TB/s of keys and values", _ATTENTION, scales_with="hbm")
    attention_us: Constant = Constant(3.4, "us a layer", _ATTENTION)
    prefill_attention_tflops: Constant = Constant(174.0, "TFLOP/s, causal half counted", _CHUNK_ATTENTION, scales_with="matrix")
    # What FlashAttention's line gives, less what cuDNN's attention saves: 148 to 82 us at 2048 tokens, 461 to 240 at 4096.
    long_attention_tflops: Constant = Constant(
        300.0, "TFLOP/s, causal half counted", f"{_CHUNK_ATTENTION}; results/LOG.md, 2026-12-01", scales_with="matrix"
    )
    prefill_attention_us: Constant = Constant(28.0, "us a layer and step", _CHUNK_ATTENTION)
    norm_us: Constant = Constant(2.5, "us a call", "fitted to results/decode.jsonl: TPOT of 7B bf16 less products and attention")
    norm_row_us: Constant = Constant(
        0.11, "us a row", "results/all_reduce.jsonl: with residual and norm at two ranks, line through 1 and 32 rows of 72B"
    )
    silu_us: Constant = Constant(1.5, "us a call", "guess: SiLU and product, where they are a kernel of their own", False)
    choose_us: Constant = Constant(7.4, "us a step", _CHOICE)
    choose_row_us: Constant = Constant(0.16, "us a row", _CHOICE)
    step_us: Constant = Constant(8.0, "us a step", "guess: embedding, advance, and the gap between two graph launches", False)
    # The stages of 72B at TP=2 spend 40 to 53 us a sum beyond its record and the norm's pass, at 512 and 2048 tokens, bf16 and
    # FP8: no share of the bytes or of the work between sums, so it is taken for the one rank's wait for the other.
    rank_wait_us: Constant = Constant(
        35.0, "us a sum of many rows", f"{_STAGES}; fitted to results/prefill.jsonl: 72B at 128, 512 and 2048 tokens"
    )
    # More than 0.5B has room for: results/LOG.md has 2.4 ms for 512 tokens replayed, where this makes it 3.2.
    request_us: Constant = Constant(
        800.0, "us a prefill", "fitted to results/prefill.jsonl: 7B at 128 tokens; prompts handed over, first token read back"
    )
    layer_launches: Constant = Constant(13.0, "launches a layer and step", _LAUNCHES)
    launch_us: Constant = Constant(380 / 13, "us a launch", _LAUNCHES)

    def scaled(self, factors: Mapping[str, float], gpu: str) -> Constants:
        """The constants of a GPU whose datasheet has `factors` times the H200's figures, by `scales_with`. None is measured."""

        def moved(constant: Constant) -> Constant:
            factor = factors[constant.scales_with] if constant.scales_with else 1.0
            source = f"{gpu}: {factor:.3g} x the H200's ({constant.source})"
            return replace(constant, value=factor * constant.value, source=source, is_measured=False)

        return replace(self, **{field.name: moved(getattr(self, field.name)) for field in fields(self)})


class Values:
    """The constants as plain numbers, `values.norm_us`, remembering in `used` which were looked at."""

    def __init__(self, constants: Constants):
        self._constants = constants
        self.used: dict[str, Constant] = {}

    def __getattr__(self, name: str) -> float:
        return self.take(name, getattr(self._constants, name))

    def take(self, name: str, constant: Constant) -> float:
        """`constant`'s value, remembered as `name`; for what is not a field of `Constants`."""
        self.used[name] = constant
        return constant.value
