from __future__ import annotations

import itertools

import pytest

from millpond.core.scheduler import Scheduler
from millpond.errors import ConfigError
from millpond.lab.bench_scheduler import measure_all, measure_scheduler


class Ticks:
    """A clock whose intervals are 1, 2, 3, ... seconds."""

    def __init__(self):
        self.now, self.intervals = 0, itertools.count(1)

    def __call__(self):
        self.now += next(self.intervals)
        return self.now


def test_it_times_decode_steps_of_all_that_run_while_the_others_wait(monkeypatch):
    seen = []
    schedule = Scheduler.schedule

    def watched(self):
        output = schedule(self)
        seen.append((output.num_tokens, len(output.scheduled), len(output.preempted), self.num_waiting))
        return output

    monkeypatch.setattr(Scheduler, "schedule", watched)
    row = measure_scheduler(3, 5, 40, Ticks())
    assert seen == [(3 * 128, 3, 0, 5)] + [(3, 3, 0, 5)] * 41
    # Four readings a step: schedule() takes seconds 2, 6, 10, ..., update() 4, 8, 12, ...
    assert (row.schedule, row.update, row.step) == (80, 82, 162)
    assert row.as_json()["step_microseconds"] == 162e6


def test_every_pair_of_sizes_is_a_row_and_is_named_as_it_starts():
    names = []
    rows = measure_all((1, 2), (3, 4), 1, Ticks(), names.append)
    assert [(row.num_running, row.num_waiting) for row in rows] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert names[-1] == "2 running, 4 waiting"


@pytest.mark.parametrize("sizes", [((), (1,)), ((1,), ())])
def test_no_size_is_refused(sizes):
    with pytest.raises(ConfigError, match="--running and --waiting must each name at least one number"):
        measure_all(*sizes, 1, Ticks(), print)
