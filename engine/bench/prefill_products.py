"""Matrix products of prefill on one GPU: bf16, and the ways to multiply by an FP8 matrix, with what each does to the result.

`scaled` quantises the activations row by row and multiplies in FP8, its sums in the tensor cores (`fast`) or outside (`exact`);
`widened` writes the matrix out in bf16 first. The quantising and the widening are timed with the product. Errors are root mean
squares, relative to the widened product's in fp32. Activations are normal, so without the outliers of real ones: accuracy on a
model is what `tests/cpu/test_fp8_linear.py` measures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.nn.functional as F

from engine.bench.gemv import kinds_of, us_of
from engine.bench.load import record_option
from engine.bench.records import Record, commit
from engine.bench.roof import DATASHEET_TFLOP_S
from engine.shapes import SHAPES
from kernels.build import Build, default_cache_folder
from kernels.fp8_linear import open_scaled_linear
from kernels.linear import linear
from kernels.quantize import Fp8Weight, dequantize, quantize

WAYS = ("bf16", "scaled_fast", "scaled_exact", "widened")
COPIES_BYTES = 256 << 20  # of matrices that take turns, so that none is found in the 50 MB of L2


@click.command()
@click.option("--models", default="qwen2.5-7b,qwen2.5-72b", show_default=True, help=f"Of {', '.join(SHAPES)}.")
@click.option("--tps", default="1,2", show_default=True)
@click.option("--rows", default="17,32,64,128,512,2048", show_default=True)
@click.option("--repeats", default=7, show_default=True)
@record_option
def main(models: str, tps: str, rows: str, repeats: int, record: Path | None) -> None:
    """Time the products of a layer."""
    commit()
    torch.zeros(1, device="cuda")
    build = Build(default_cache_folder())
    scaled = {"scaled_fast": open_scaled_linear(build, True), "scaled_exact": open_scaled_linear(build, False)}
    for model in models.split(","):
        for tp in map(int, tps.split(",")):
            for kind in kinds_of(model, tp, "fp8"):
                name, out, inner = kind.name, kind.num_rows, kind.inner
                copies = max(1, min(16, COPIES_BYTES // (out * inner)))
                dense = [(torch.randn(out, inner, device="cuda") * 0.02).bfloat16() for _ in range(copies)]
                workspace = torch.empty(out * inner, dtype=torch.bfloat16, device="cuda")
                weights = [quantize(weight, workspace, 1) for weight in dense]
                for count in map(int, rows.split(",")):
                    x = torch.randn(count, inner, device="cuda").bfloat16()
                    right = F.linear(x.float(), dequantize(weights[0], torch.float32))
                    line = f"{model:>12} tp{tp} {name:8}{out:6d} x {inner:5d} {count:5d} rows "
                    for way in WAYS:
                        bodies = _bodies(way, x, dense, weights, scaled)
                        us, error = us_of(bodies, repeats), None
                        if way != "bf16":
                            error = 100 * float((bodies[0]().float() - right).norm() / right.norm())
                        line += f"  {way} {us:8.1f} us" + ("" if error is None else f" {error:.2f} %")
                        if record is not None:
                            case = {"model": model, "tp": tp, "product": name, "out": out, "in": inner,
                                    "rows": count, "way": way}  # fmt: skip
                            metrics = {"product_us": us} | ({} if error is None else {"error_percent": error})
                            rate = DATASHEET_TFLOP_S["fp8" if way.startswith("scaled") else "bf16"]
                            ceiling = {"product_us": 2 * count * out * inner / rate / 1e6}
                            found = Record("prefill_product", case, metrics, ceiling, {}, True)
                            found.append_to(record, torch.cuda.get_device_name(), "engine.bench.prefill_products")
                    print(line, flush=True)


def _bodies(
    way: str, x: torch.Tensor, dense: list[torch.Tensor], weights: list[Fp8Weight], scaled: dict
) -> list[Callable[[], torch.Tensor]]:
    if way == "bf16":
        return [lambda w=w: F.linear(x, w) for w in dense]
    if way == "widened":
        return [lambda w=w: linear(x, w) for w in weights]
    return [lambda w=w: scaled[way].linear(x, w) for w in weights]


if __name__ == "__main__":
    main()
