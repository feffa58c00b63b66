from __future__ import annotations

import sys
from dataclasses import replace
from random import Random
from urllib.parse import urlsplit

import pytest

from millpond.errors import EngineError
from millpond.lab import bench_http
from millpond.lab.bench_http import HttpRow, StreamLoad, in_process, measure_http, over_http, serving
from tiny_engine import make_engine
from tiny_server import listening

LOAD = StreamLoad(num_streams=3, prompt_tokens=4, max_tokens=6)


def prompts(engine, load=LOAD):
    return load.prompts(Random(0), engine.limits.vocab_size)


def test_the_engine_alone_is_timed_from_the_first_request_to_the_last_token():
    engine = make_engine()
    ticks = iter((10.0, 13.0))
    assert in_process(engine, LOAD, prompts(engine), lambda: next(ticks)) == 18 / 3.0
    assert not engine.has_unfinished


def test_every_stream_is_read_to_its_last_token_by_a_client_of_its_own():
    engine = make_engine()
    with listening(engine) as running:
        speed, client_cpu = over_http(running.url, LOAD, prompts(engine))
    assert speed > 0
    assert 0 < client_cpu <= 1
    assert [len(each[2].prompt_token_ids) for each in engine.runner.admissions] == [4, 4, 4]


@pytest.mark.parametrize(("load", "says"), [({"max_tokens": 500}, "500"), ({"prompt_tokens": 0}, "prompt")])
def test_a_stream_that_does_not_come_to_its_end_is_an_error_with_what_came_instead(load, says):
    engine, load = make_engine(), replace(LOAD, **load)
    with listening(engine) as running, pytest.raises(EngineError, match=f"400.*{says}"):
        over_http(running.url, load, prompts(engine, load))


def test_a_client_that_finds_no_server_is_an_error():
    with pytest.raises(EngineError, match="refused"):
        over_http("http://127.0.0.1:1", LOAD, [(1, 2)])


def test_both_sides_get_the_same_prompts_in_turns_and_the_first_round_does_not_count(monkeypatch):
    seen = []
    direct, served = iter((1.0, 100.0, 200.0, 100.0)), iter((1.0, 90.0, 240.0, 50.0))

    def alone(engine, load, prompts, clock):
        seen.append(("engine", prompts))
        return next(direct)

    def http(url, load, prompts):
        seen.append(("http", prompts))
        return next(served), 0.25

    monkeypatch.setattr(bench_http, "in_process", alone)
    monkeypatch.setattr(bench_http, "over_http", http)
    names = []
    row = measure_http(make_engine(), "http://x", LOAD, 3, lambda: 0.0, names.append)
    assert row == HttpRow(3, 100.0, 90.0, 0.9, (0.9, 1.2, 0.5), 0.25)
    assert [name for name, _ in seen] == ["http", "engine", "engine", "http", "http", "engine", "engine", "http"]
    rounds = [prompts for _, prompts in seen]
    assert rounds[::2] == rounds[1::2]
    assert len({tuple(each) for each in rounds}) == 4
    assert len(names) == 4


SERVER = """
import sys, time
print("something else", file=sys.stderr)
print("millpond serves x at http://127.0.0.1:80", file=sys.stderr, flush=True)
time.sleep(60)
"""


def test_a_server_is_waited_for_and_stopped_at_the_end():
    with serving([sys.executable, "-c", SERVER]) as url:
        assert urlsplit(url).port == 80


def test_a_server_that_does_not_start_is_an_error_with_its_words():
    with (
        pytest.raises(EngineError, match="no such model"),
        serving([sys.executable, "-c", "raise SystemExit('no such model')"]),
    ):
        pass
