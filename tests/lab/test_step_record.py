from __future__ import annotations

import json
import math

import pytest

from millpond.core.request import SamplingParams
from millpond.core.step import ScheduledRequest, SchedulerOutput
from millpond.errors import ConfigError
from millpond.lab.step_record import StepRecord, StepShape, read_records, recorded, write_records
from tiny_engine import ids, make_engine

RECORD = StepRecord(StepShape(2, 7, 1, 12, 33), 0.25)


def scheduled(first, count, *, samples, num_drafts=0):
    return ScheduledRequest("a", 0, first, (5,) * count, (0,), samples, 0, None, num_drafts)


def test_a_shape_counts_what_is_read_once_and_what_each_token_attends_to():
    chunk, decode = scheduled(2, 3, samples=False), scheduled(9, 1, samples=True)
    # The chunk reads 5 positions, and its tokens meet 3, 4 and 5 of them; the token at position 9 meets 10.
    assert StepShape.of(SchedulerOutput(0, (chunk, decode))) == StepShape(2, 4, 1, 15, 3 + 4 + 5 + 10)


def test_every_guess_is_one_more_position_whose_logits_are_computed():
    assert StepShape.of(SchedulerOutput(0, (scheduled(4, 3, samples=True, num_drafts=2),))).num_sampled == 3


def test_every_step_that_computes_is_recorded_with_its_whole_time():
    engine = make_engine(max_num_batched_tokens=4)
    now = [0.0]
    engine._clock = lambda: now.__setitem__(0, now[0] * 1.5 + 1) or now[0]  # no two steps take the same time
    seconds = []
    runner, observer = engine.runner, engine.observer
    with recorded(engine) as records:
        for prompt in ("abcdef", "abc"):
            engine.add_request(prompt, ids(prompt), SamplingParams(max_tokens=3))
            while engine.has_unfinished:
                start = now[0] * 1.5 + 1
                engine.step()
                seconds.append(now[0] - start)
    shapes = [(4, 0, 4, 10), (2, 1, 6, 11), (1, 1, 7, 7), (1, 1, 8, 8), (3, 1, 3, 6), (1, 1, 4, 4), (1, 1, 5, 5)]
    computing = seconds[:4] + seconds[5:8]  # the fifth and the last step only release
    assert records == [
        StepRecord(StepShape(1, *shape), pytest.approx(each)) for shape, each in zip(shapes, computing, strict=True)
    ]
    assert (engine.runner, engine.observer) == (runner, observer)


def test_what_is_written_is_read_again(tmp_path):
    write_records([RECORD, RECORD], tmp_path / "steps.jsonl")
    assert read_records(tmp_path / "steps.jsonl") == [RECORD, RECORD]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not a JSON object: '{'"),
        ("[1]", "line 2 is not a JSON object"),
        (
            json.dumps({**RECORD.shape._asdict(), "num_tokens": -1, "seconds": 1}),
            "num_tokens must be .*got -1",
        ),
        (json.dumps({**RECORD.shape._asdict(), "num_tokens": True, "seconds": 1}), "num_tokens must be .*got True"),
        (
            json.dumps({**RECORD.shape._asdict(), "seconds": 0}),
            "from 1e-07 to 100000, got 0",
        ),
        (json.dumps({**RECORD.shape._asdict(), "seconds": 1e999}), "got inf"),
        (json.dumps({**RECORD.shape._asdict(), "seconds": math.nan}), "got nan"),
        (json.dumps({**RECORD.shape._asdict(), "seconds": 10**400}), "got a number of 1329 bits"),
        (json.dumps({**RECORD.shape._asdict(), "read_positions": 10**13, "seconds": 1}), "to 1000000000000, got"),
        (json.dumps({**RECORD.shape._asdict(), "seconds": "x" * 999}), "got 'x{59}...$"),
    ],
)
def test_a_line_that_is_no_step_is_refused_by_its_number(tmp_path, line, message):
    path = tmp_path / "steps.jsonl"
    write_records([RECORD], path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_records(path)


def test_a_file_that_is_missing_or_empty_is_refused_with_the_command_that_makes_one(tmp_path):
    path = tmp_path / "steps.jsonl"
    with pytest.raises(ConfigError, match=r"there is no file .*; make one for --cost with: .* --record steps\.jsonl"):
        read_records(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"is empty; .* --record steps\.jsonl"):
        read_records(path)
