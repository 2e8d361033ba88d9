"""What the name of a metric tells: its unit, which way is better, and how its numbers are written."""

from __future__ import annotations

from dataclasses import dataclass

# Suffix of the name, unit, and whether more is better (None: neither, a limit at most). Longer suffixes first.
UNITS = (
    ("_tok_s", "tok/s", True), ("_tb_s", "TB/s", True), ("_gb_s", "GB/s", True), ("_tflop_s", "TFLOP/s", True),
    ("_percent", "%", None), ("_ratio", "ratio", True), ("_us", "us", False), ("_ms", "ms", False), ("_s", "s", False),
)  # fmt: skip
# Numbers that are ratios to a peer or to plain decode already: the baseline is within.
RATIOS = ("speedup",)
# What no record need say: the best value that there can be.
LIMITS = {
    "host_syncs_per_token": 0, "torch_syncs_per_token": 0, "host_copies_per_token": 0, "host_syncs_per_request": 0,
    "answers_different": 0, "mismatches": 0, "acceptance": 1,
    "layer_residual_us": 0,  # it is the distance from a ceiling
}  # fmt: skip
UPPER = {"tpot": "TPOT", "ttft": "TTFT", "hbm": "HBM", "gpu": "GPU", "tp": "TP", "pdl": "PDL", "kv": "KV", "p90": "p90"}


@dataclass(frozen=True)
class Metric:
    name: str

    @property
    def _row(self) -> tuple[str, str, bool | None]:
        if self.name in RATIOS:
            return "", "ratio", True
        return next((row for row in UNITS if self.name.endswith(row[0])), ("", "", None))

    @property
    def suffix(self) -> str:
        return self._row[0]

    @property
    def unit(self) -> str:
        return self._row[1]

    @property
    def is_more_better(self) -> bool | None:
        return self._row[2]

    @property
    def is_ratio(self) -> bool:
        return self.unit == "ratio"

    @property
    def heading(self) -> str:
        if self.is_ratio:
            return words(self.name)
        stem = words(self.name.removesuffix(self.suffix)) if self.suffix else words(self.name)
        return f"{stem}, {self.unit}" if self.unit else stem

    def against(self, value: float, other: float) -> float | None:
        """How good `value` is beside a ceiling or a peer: 1 is equal, above is better; None where that says nothing."""
        if self.is_more_better is None or value <= 0 or other <= 0:
            return None
        return value / other if self.is_more_better else other / value


def words(name: str) -> str:
    return " ".join(UPPER.get(word, word) for word in name.split("_"))


def number(value: float) -> str:
    """Four significant digits, never with an exponent, and whole numbers whole."""
    if value == int(value):
        return str(int(value))
    if abs(value) >= 1000:
        return f"{value:.0f}"
    digits = f"{value:.4g}"
    return digits if "e" not in digits else f"{value:.7f}".rstrip("0")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"
