"""The ways of a step's products, chosen by the time of the whole step: with products that are only planned, and times made up."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from engine.bench import step_products
from engine.bench.step_products import refine
from kernels.gemv import Gemv
from kernels.gemv_choice import LIBRARY, WAYS


def planned(dtype: torch.dtype = torch.bfloat16) -> Gemv:
    """With a wide and a narrow product of one row, as the table or the likeliest way has them."""
    gemv = Gemv({}, 132)
    for out, inner in ((640, 1024), (1024, 320)):
        assert gemv.takes(torch.zeros(1, inner, dtype=torch.bfloat16), torch.zeros(out, inner, dtype=dtype))
    return gemv


def test_a_product_is_made_as_it_was_chosen_to_be():
    gemv = planned()
    first, second = gemv.products
    x, weight = torch.zeros(1, 1024, dtype=torch.bfloat16), torch.zeros(640, 1024, dtype=torch.bfloat16)
    before = gemv._plan(x, weight, False, None)
    assert gemv.way_of(first) in WAYS and gemv.choose(first, "groups4") and gemv.way_of(first) == "groups4"
    assert gemv._plan(x, weight, False, None) != before
    assert gemv.choose(first, LIBRARY) and gemv.way_of(first) == LIBRARY and not gemv.takes(x, weight)
    kept = gemv.way_of(second)
    assert kept in WAYS
    many = Gemv({}, 132)
    assert many.takes(torch.zeros(9, 1024, dtype=torch.bfloat16), weight)
    assert not many.choose(many.products[0], "rows"), "that kernel takes one row or two"
    assert many.way_of(many.products[0]) != "rows"


class Timer:
    """A step's time is that of its products, each by its way; one pays only where the other has gone over."""

    def __init__(self, gemv: Gemv):
        self.gemv, self.num_timed = gemv, 0

    def ms(self) -> float:
        self.num_timed += 1
        first, second = (self.gemv.way_of(product) for product in self.gemv.products)
        together = 3.0 if (first, second) == ("groups2", "tiles") else 0.0
        return 10.0 - together - {"groups4": 1.0, "groups2": 0.9}.get(first, 0.0) - {"tiles": 2.0}.get(second, 0.0)


def test_the_best_ways_are_found_though_they_depend_on_each_other():
    timer = Timer(planned())
    ways = refine(timer, 1)
    assert list(ways.values()) == ["groups2", "tiles"] and timer.ms() == pytest.approx(4.1)
    assert {product: timer.gemv.way_of(product) for product in timer.gemv.products} == ways


def test_noise_changes_nothing(monkeypatch):
    timer = Timer(planned())
    kept = {product: timer.gemv.way_of(product) for product in timer.gemv.products}
    times = iter(10.0 + (idx % 3 - 1) * 0.009 for idx in range(10_000))
    monkeypatch.setattr(timer, "ms", lambda: next(times))
    assert refine(timer, 1) == kept


def test_an_fp8_matrix_is_not_left_to_a_library(monkeypatch):
    timer = Timer(planned(torch.float8_e4m3fn))
    chosen, choose = [], timer.gemv.choose
    monkeypatch.setattr(timer.gemv, "choose", lambda product, way: chosen.append(way) or choose(product, way))
    refine(timer, 1)
    assert LIBRARY not in chosen and len(set(chosen)) > 3


def test_it_needs_a_gpu_and_keeps_no_record(tmp_path):
    for options in (["--device", "cpu"], ["--eager"], ["--record", str(tmp_path / "r.jsonl")]):
        result = CliRunner().invoke(step_products.main, options)
        assert result.exit_code == 2 and "no record is kept" in result.output


def test_the_table_names_ways_and_the_steps_that_were_refined():
    from kernels.gemv_choice import TABLE

    table = json.loads(TABLE.read_text())
    assert set(table["ways"].values()) <= {*WAYS, LIBRARY}
    assert "qwen2.5-72b fp8 tp2 1" in table["refined"]
