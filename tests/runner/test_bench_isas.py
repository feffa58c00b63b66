"""The comparison of instruction sets: who runs when, what a rate counts, and against whom a ratio is."""

from collections import Counter

import numpy as np
import pytest

from millpond.errors import ConfigError
from millpond.kernels.isa import runnable
from millpond.kernels.matmul import COLUMNS as TILE_COLUMNS
from millpond.kernels.matmul import GROUP, linear
from millpond.kernels.pack import unpack
from millpond.runner import bench_isas
from millpond.runner.bench_isas import COLUMNS, DEPTH, WEIGHTS, IsaPlan, layer_rates, measure_isas, plan_of, row_of


def plan(**changes) -> IsaPlan:
    return IsaPlan(**{"weights": ("4-bit",), "rows": (1,), "isas": ("avx2", "portable"), "rounds": 3, **changes})


def test_a_plan_takes_every_instruction_set_of_this_processor():
    assert plan_of(("4-bit",), (1,), 9).isas == tuple(runnable())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": ("2-bit",)}, "weights must be among 4-bit, 8-bit, bfloat16; got '2-bit'"),
        ({"weights": ()}, "nothing to measure"),
        ({"rows": ()}, "nothing to measure"),
        ({"isas": ("avx2",)}, "compared with portable, which is not among avx2"),
    ],
)
def test_a_plan_without_sense_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(**changes)


@pytest.fixture
def seen():
    """The names of runs in the order in which they were run, and how often each time."""
    return []


def run_of(name, seen):
    return lambda count: seen.append((name, count))


class Clock:
    """Seconds that pass with every second look: 1, 2, 3, ..."""

    def __init__(self):
        self.looks = 0

    def __call__(self):
        pairs, odd = divmod(self.looks, 2)
        self.looks += 1
        return sum(range(pairs + 1)) + (pairs + 1) * odd


def test_the_instruction_sets_take_turns_and_the_first_turn_is_not_counted(seen):
    runs = {"avx2": run_of("A", seen), "portable": run_of("P", seen)}
    rates = layer_rates(runs, 4, 2, Clock())
    assert [name for name, _ in seen] == ["A", "P", "A", "P", "A", "P"]
    operations = seen[0][1] * 2 * 4 * DEPTH * COLUMNS
    assert rates == {"avx2": [operations / 3, operations / 5], "portable": [operations / 4, operations / 6]}


def test_a_run_has_as_many_operations_whatever_the_number_of_rows(seen):
    for rows in (1, 16):
        layer_rates({"portable": run_of(rows, seen)}, rows, 1, Clock())
    counts = Counter({rows: count * rows for rows, count in seen})
    assert counts[1] == pytest.approx(counts[16], rel=0.1)


def test_a_ratio_is_that_of_two_runs_of_the_same_round():
    row = row_of("4-bit", 16, "avx2", [2.0, 30.0, 8.0, 4.0, 5.0], [1.0, 10.0, 2.0, 1.0, 1.0])
    assert (row.operations_s, row.ratio, row.ratio_low, row.ratio_high) == (5.0, 4.0, 3.0, 4.0)


def test_what_is_timed_is_the_layer_times_the_rows(monkeypatch):
    seen = {}

    def repeat(count, tiles, sync, layer, rows, inputs, sums, outputs, scratch):
        linear(tiles, sync, 0, layer, rows, inputs, sums, outputs, scratch)
        seen[rows] = outputs.copy()

    monkeypatch.setattr(bench_isas, "repeat_linear", repeat)
    x = np.random.default_rng(1).standard_normal((5, DEPTH), dtype=np.float32)
    for rows in (1, 5):
        (row,) = measure_isas(plan(isas=("portable",), rows=(rows,), rounds=1), Clock(), lambda name: None)
        assert (row.weights, row.rows, row.isa, row.ratio) == ("4-bit", rows, "portable", 1.0)
        exact = x[:rows].astype(np.float64) @ unpack(bench_isas.random_layer(WEIGHTS["4-bit"])).T
        np.testing.assert_allclose(seen[rows], exact, rtol=0, atol=0.02 * np.abs(exact).max())


def test_progress_names_every_measurement_of_the_plan(seen, monkeypatch):
    monkeypatch.setattr(bench_isas, "load_tiles", lambda isa, *rest, **more: isa)
    monkeypatch.setattr(bench_isas, "layer_run", lambda layer, rows, isa, tiles: run_of(isa, seen))
    told, asked = [], plan(weights=tuple(WEIGHTS), rows=(1, 16))
    result = measure_isas(asked, Clock(), told.append)
    assert len(told) == asked.num_measurements
    assert told[:3] == ["compiling avx2 kernels", "compiling portable kernels", "4-bit, rows: 1"]
    assert [(row.weights, row.rows, row.isa) for row in result[:4]] == [
        ("4-bit", 1, "avx2"),
        ("4-bit", 1, "portable"),
        ("4-bit", 16, "avx2"),
        ("4-bit", 16, "portable"),
    ]


def test_the_layer_is_whole_tiles_and_groups():
    assert COLUMNS % TILE_COLUMNS == DEPTH % GROUP == 0
