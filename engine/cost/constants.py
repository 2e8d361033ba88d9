"""The constants of the cost model, each with its unit and where it comes from. An H200's; `engine/cost/gpus.py` has others.

Not here: the times of all-reduces, which are read from the records, and the datasheets.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from engine.bench.roof import READ_TB_S


@dataclass(frozen=True)
class Constant:
    """`is_measured`: False for a guess that waits for its run. `scales_with`: the datasheet figure, `hbm` or `matrix`, that it is
    proportional to on another GPU; empty for a time that is taken to be the same there."""

    value: float
    unit: str
    source: str
    is_measured: bool = True
    scales_with: str = ""


_PRODUCTS = "results/product.jsonl, one row: the line through gate+up of 72B at TP=1 and its qkv at TP=2"
_LIBRARY = "trial on an H200, 2026-11-30: cuBLAS in a graph, line through the 12 products of 72B at TP=2, 4, 8 (within 2.1 us)"
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
    library_us: Constant = Constant(4.3, "us a product", _LIBRARY)
    matrix_tflops: Constant = Constant(
        690.0, "TFLOP/s", "fitted to results/prefill.jsonl: 7B at 512 and 2048 tokens", scales_with="matrix"
    )
    attention_tb_s: Constant = Constant(3.4, "TB/s of keys and values", _ATTENTION, scales_with="hbm")
    attention_us: Constant = Constant(3.4, "us a layer", _ATTENTION)
    prefill_attention_tflops: Constant = Constant(300.0, "TFLOP/s", "guess: torch's, causal half counted", False, "matrix")
    norm_us: Constant = Constant(2.5, "us a call", "fitted to results/decode.jsonl: TPOT of 7B bf16 less products and attention")
    norm_row_us: Constant = Constant(
        0.11, "us a row", "results/all_reduce.jsonl: with residual and norm at two ranks, line through 1 and 32 rows of 72B"
    )
    silu_us: Constant = Constant(1.5, "us a call", "guess: SiLU and product, where they are a kernel of their own", False)
    choose_us: Constant = Constant(7.4, "us a step", _CHOICE)
    choose_row_us: Constant = Constant(0.16, "us a row", _CHOICE)
    step_us: Constant = Constant(8.0, "us a step", "guess: embedding, advance, and the gap between two graph launches", False)
    prefill_hidden_passes: Constant = Constant(
        20.0, "reads or writes of a token's activations a layer", "guess: norms, residuals, rotation as torch operations", False
    )
    prefill_mlp_passes: Constant = Constant(
        6.0, "reads or writes of a token's MLP columns a layer", "guess: SiLU and product as torch operations", False
    )
    eager_layer_us: Constant = Constant(
        200.0, "us a layer and step", "guess: about 35 launches of torch operations by the host, 5 to 6 us each", False
    )

    def scaled(self, hbm: float, matrix: float, gpu: str) -> Constants:
        """The constants of a GPU whose datasheet has `hbm` and `matrix` times the H200's rates. None of them is measured."""
        factors = {"hbm": hbm, "matrix": matrix, "": 1.0}

        def moved(constant: Constant) -> Constant:
            factor = factors[constant.scales_with]
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
