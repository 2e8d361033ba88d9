"""The GPUs that the cost model knows, by their datasheets. Only the H200's kernels are measured; the others are projections."""

from __future__ import annotations

from dataclasses import dataclass

from engine.bench.roof import DATASHEET_TB_S
from engine.cost.constants import Constants

H200 = "H200"


@dataclass(frozen=True)
class Gpu:
    """`hbm_tb_s`, `matrix_tflops` (bf16, dense), `matrix_fp8_tflops` (dense; None: no FP8 tensor cores), `memory_gb` (1e9 bytes),
    `link_gb_s` (to its peers, one way): as sold.

    `link_extra_us`: what a hop takes beyond NVLink's. `device`: what the driver calls it, in part.
    """

    name: str
    device: str
    hbm_tb_s: float
    matrix_tflops: float
    matrix_fp8_tflops: float | None
    memory_gb: float
    link_gb_s: float
    source: str
    link_extra_us: float = 0.0

    @property
    def is_measured(self) -> bool:
        return self.name == H200

    def constants(self) -> Constants:
        """The H200's as measured; another GPU's in proportion to the datasheets."""
        if self.is_measured:
            return Constants()
        h200 = GPUS[H200]
        factors = {
            "hbm": self.hbm_tb_s / h200.hbm_tb_s,
            "matrix": self.matrix_tflops / h200.matrix_tflops,
            "matrix_fp8": (self.matrix_fp8_tflops or 0.0) / h200.matrix_fp8_tflops,
        }
        return Constants().scaled(factors, self.name)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(H200, "H200", DATASHEET_TB_S, 989, 1979, 141, 450, "NVIDIA H200 SXM datasheet; NVLink 4"),
        Gpu("H100", "H100", 3.35, 989, 1979, 80, 450, "NVIDIA H100 SXM datasheet; NVLink 4"),
        Gpu("A100", "A100-SXM4-80GB", 2.039, 312, None, 80, 300, "NVIDIA A100 SXM 80 GB datasheet; NVLink 3"),
        Gpu("B200", "B200", 8.0, 2250, 4500, 180, 900, "NVIDIA HGX B200 datasheet; NVLink 5"),
        # A one-shot push of 16 KB over PCIe takes 7.2 us (github.com/haohervchb/sglang-V100/pull/2), where NVLink takes 2.2.
        Gpu("L40S", "L40S", 0.864, 362, 733, 48, 32, "NVIDIA L40S datasheet; PCIe 4 x16", link_extra_us=5.0),
    )
}


def gpu_of(device: str) -> Gpu | None:
    """The GPU of a record's `device`, such as `2 x NVIDIA H200`; None for one that is not in the table."""
    return next((gpu for gpu in GPUS.values() if gpu.device in device), None)
