from __future__ import annotations

from random import Random

import pytest

from millpond.errors import ConfigError
from millpond.lab.cost_model import BUILT_IN, CostModel, fit
from millpond.lab.step_record import StepRecord, StepShape

TRUE = CostModel(3e-3, (1e-4, 4e-4, 2e-4, 1.5e-6, 3e-7), "made up")


def shapes(count, seed=0):
    random = Random(seed)
    found = []
    for _ in range(count):
        requests = random.randint(1, 64)
        extra, read = random.choice((0, random.randint(1, 500))), requests * random.randint(10, 400)
        found.append(
            StepShape(
                requests, requests + extra, random.randint(1, requests), read, read + random.randint(1, 400) * extra
            )
        )
    return found


def steps(cost, noise=0.0, count=200):
    random = Random(1)
    return [StepRecord(shape, cost.seconds(shape) * (1 + noise * random.random())) for shape in shapes(count)]


def test_a_step_costs_its_fixed_part_and_so_much_for_each_unit():
    assert CostModel(1.0, (2.0, 3.0, 5.0, 7.0, 11.0), "").seconds(StepShape(1, 10, 100, 1000, 10000)) == (
        1 + 2 + 30 + 500 + 7000 + 110000
    )


def test_what_made_the_steps_is_found_again():
    found = fit(steps(TRUE), "here")
    assert (found.fixed, *found.each) == pytest.approx((TRUE.fixed, *TRUE.each), rel=1e-6)
    assert (found.source, found.num_steps, found.median_error) == ("here", 200, pytest.approx(0.0, abs=1e-9))


def test_the_fitted_steps_take_as_long_together_as_the_recorded_ones():
    records = steps(TRUE, noise=0.2)
    found = fit(records, "")
    fitted = sum(found.seconds(shape) for shape, _ in records)
    assert fitted == pytest.approx(sum(seconds for _, seconds in records), rel=1e-4)
    assert found.num_disturbed == 0
    assert 0.02 < found.median_error < 0.1


def test_steps_that_something_held_up_are_left_out():
    records = steps(TRUE)
    held_up = [StepRecord(shape, (1 + index % 3) * seconds) for index, (shape, seconds) in enumerate(records)]
    found = fit(held_up, "")
    assert (found.fixed, *found.each) == pytest.approx((TRUE.fixed, *TRUE.each), rel=1e-6)
    assert (found.num_steps, found.num_disturbed) == (200, 133)


def test_no_part_is_below_zero_even_where_that_would_fit_better():
    odd = CostModel(3e-3, (-2e-4, 4e-4, 0.0, 0.0, 0.0), "")
    records = [StepRecord(shape, max(1e-4, odd.seconds(shape))) for shape in shapes(200)]
    found = fit(records, "")
    assert min(found.fixed, *found.each) == 0.0
    assert found.each[1] > 1e-4


def test_parts_that_no_step_tells_apart_share_the_cost():
    records = [StepRecord(StepShape(4, 1, 1, read, read), 4e-3 + read * 2e-6) for read in range(100, 200)]
    found = fit(records, "")
    assert (found.fixed, *found.each) == pytest.approx((1e-3, 0.25e-3, 1e-3, 1e-3, 1e-6, 1e-6))


def test_a_part_that_no_step_has_costs_nothing():
    records = [StepRecord(shape._replace(num_sampled=0), TRUE.seconds(shape)) for shape in shapes(50)]
    assert fit(records, "").each[2] == 0.0


def test_too_few_steps_are_refused():
    with pytest.raises(ConfigError, match=r"a\.jsonl holds 19 steps; a cost model needs at least 20"):
        fit(steps(TRUE, count=19), "a.jsonl")


def test_the_model_that_comes_along_has_no_part_below_zero():
    assert min(BUILT_IN.fixed, *BUILT_IN.each) >= 0.0


def test_json_names_each_part_in_microseconds():
    assert CostModel(1e-3, (1e-6, 2e-6, 3e-6, 4e-6, 5e-6), "x", 30, 4, 0.25).as_json() == {
        "source": "x",
        "microseconds": {
            "fixed": 1000.0,
            "num_requests": 1.0,
            "num_tokens": 2.0,
            "num_sampled": 3.0,
            "read_positions": 4.0,
            "attended_positions": 5.0,
        },
        "num_steps": 30,
        "num_disturbed": 4,
        "median_error": 0.25,
    }
