"""The ways of a step's products, chosen by the time of the whole step: with products that are only planned, and times made up."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from engine.bench import step_products
from engine.bench.step_products import refine
from kernels import gemv_choice
from kernels.gemv import Gemv
from kernels.gemv_choice import LIBRARY, WAYS, Pace, measured_pace

SIZES = (640, 1024), (1024, 320)
LARGE = (38016, 8192), (8192, 7392)  # more than a ring holds


def planned(dtype: torch.dtype = torch.bfloat16, sizes: tuple[tuple[int, int], ...] = SIZES, pace: Pace | None = None) -> Gemv:
    """With a wide and a narrow product of one row, as the table or the likeliest way has them."""
    gemv = Gemv({}, 132, pace=pace)
    for out, inner in sizes:
        assert gemv.takes(torch.empty(1, inner, dtype=torch.bfloat16), torch.empty(out, inner, dtype=dtype, device="meta"))
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
    chosen = refine(timer, 1)
    assert [own.way for own in chosen.values()] == ["groups2", "tiles"] and timer.ms() == pytest.approx(4.1)
    assert {product: timer.gemv.way_of(product) for product in timer.gemv.products} == {
        product: own.way for product, own in chosen.items()
    }


def test_the_best_paces_are_found_and_none_is_tried_twice(monkeypatch):
    timer = Timer(planned(sizes=LARGE))
    first, second = timer.gemv.products
    seen = []

    def ms() -> float:
        plans = timer.gemv.plan_of(first), timer.gemv.plan_of(second)
        seen.append(plans)
        return 10.0 - (0.5 if plans[0].in_flight_first < plans[0].in_flight else 0.0)

    monkeypatch.setattr(timer, "ms", ms)
    before = {product: timer.gemv.plan_of(product) for product in (first, second)}
    chosen = refine(timer, 1, ("paces",))
    assert chosen[first].pace.first < chosen[first].pace.later and chosen[second].pace == measured_pace(second)
    assert timer.gemv.plan_of(first).in_flight_first < timer.gemv.plan_of(first).in_flight
    assert timer.gemv.plan_of(second) == before[second]
    num_plans = sum(len({plans[idx] for plans in seen}) for idx in range(2))
    assert len(seen) <= 2 + 2 * (2 + num_plans), "what several paces come to is timed once a round"


def test_a_pace_of_the_table_is_that_of_the_plan(monkeypatch):
    product = planned(sizes=LARGE).products[0]
    monkeypatch.setattr(gemv_choice, "_table", lambda: {"ways": {}, "paces": {product.key: [16, 96]}})
    assert measured_pace(product) == Pace(16, 96)
    paced, usual = (planned(sizes=LARGE, pace=pace).plan_of(product) for pace in (None, Pace()))
    assert paced.in_flight_first < usual.in_flight_first == usual.in_flight < paced.in_flight
    monkeypatch.setattr(gemv_choice, "_table", lambda: {"ways": {}})
    assert measured_pace(product) == Pace()


def test_noise_changes_nothing(monkeypatch):
    timer = Timer(planned())
    kept = {product: timer.gemv.way_of(product) for product in timer.gemv.products}
    times = iter(10.0 + (idx % 3 - 1) * 0.009 for idx in range(10_000))
    monkeypatch.setattr(timer, "ms", lambda: next(times))
    assert {product: own.way for product, own in refine(timer, 1).items()} == kept


def test_an_fp8_matrix_is_not_left_to_a_library(monkeypatch):
    timer = Timer(planned(torch.float8_e4m3fn))
    chosen, choose = [], timer.gemv.choose
    monkeypatch.setattr(timer.gemv, "choose", lambda product, way, pace: chosen.append(way) or choose(product, way, pace))
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
    for key, pace in table["paces"].items():
        assert key in table["ways"] and 0 < pace[0] <= pace[1] <= 200, key


def test_a_product_without_a_pace_asks_for_as_much_at_first_as_later(monkeypatch):
    ways, num_seen = gemv_choice._table()["ways"], 0
    monkeypatch.setattr(gemv_choice, "_table", lambda: {"ways": ways})
    for key in ways:
        dtype, rows, shape = key.split(" ")
        out, inner = map(int, shape.removeprefix("2x").split("x"))
        gemv, elem = Gemv({}, 132), torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn
        weight = torch.empty(out * (1 + shape.startswith("2x")), inner, dtype=elem, device="meta")
        if gemv.takes(torch.empty(int(rows), inner, dtype=torch.bfloat16), weight, shape.startswith("2x")):
            plan = gemv.plan_of(gemv.products[0])
            num_seen += hasattr(plan, "in_flight")
            assert not hasattr(plan, "in_flight") or plan.in_flight_first == plan.in_flight, key
    assert num_seen > 100
