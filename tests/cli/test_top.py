from __future__ import annotations

import asyncio
import threading

import pytest

from millpond.cli import top
from millpond.cli.app import INTERRUPTED, run
from tiny_engine import BOUND_SECONDS, GatedRunner, make_engine
from tiny_server import listening

BODY = {"prompt": [5, 6, 7, 8, 9, 10], "max_tokens": 10, "ignore_eos": True}


def shown(capsys, *arguments, environment=None, code=0):
    assert run(["top", *arguments], environment or {}) == code
    return capsys.readouterr()


def picture(**changes):
    """What a server says where one request decodes, one prefills and two wait."""
    row = {
        "id": "cmpl-a-0",
        "state": "running",
        "seconds": 1.25,
        "prompt_tokens": 6,
        "max_tokens": 10,
        "output_tokens": 3,
        "computed_tokens": 8,
        "blocks": 3,
        "preemptions": 0,
        "waiting_for": None,
    }
    waiting = {**row, "state": "waiting", "output_tokens": 0, "computed_tokens": 0, "blocks": 0, "preemptions": 2}
    return {
        "object": "list",
        "model": "tiny",
        "clock": 10.0,
        "steps": 7,
        "generated_tokens": 40,
        "forward_tokens": 100,
        "preemptions": 1,
        "running": 2,
        "waiting": 2,
        "head_waits_for": "needs 3 blocks; 2 of 8 are free",
        "slots": {"total": 3, "free": 1},
        "blocks": {"total": 8, "free": 2, "held_back": 1, "size": 4},
        "last_step": {"tokens": 10, "generated_tokens": 2, "seconds": 0.125},
        "unfinished": 4,
        "data": [
            row,
            {**row, "id": "cmpl-b-0", "computed_tokens": 4, "output_tokens": 0, "prompt_tokens": 100},
            {**waiting, "id": "cmpl-c-0", "waiting_for": "needs 3 blocks; 2 of 8 are free"},
            {**waiting, "id": "[red]cmpl-d-0[/red]", "waiting_for": "behind 1 other"},
        ],
        **changes,
    }


@pytest.fixture
def printed(capsys, monkeypatch):
    """The lines of one frame, 120 characters wide."""
    monkeypatch.setenv("COLUMNS", "120")

    def of(now, before=None):
        from rich.console import Console

        Console().print(top.frame(now, before, "http://a:1"))
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return of


def test_a_frame_shows_the_pool_the_queue_with_its_heads_reason_and_a_row_for_each_request(printed):
    lines = printed(picture())
    assert lines[:5] == [
        "tiny at http://a:1, step 7, 1 preemptions so far",
        "blocks  ######################........ 6 of 8 held, 1 held back from newcomers",
        "slots   2 of 3 taken",
        "queue   2 run, 2 wait; the next one: needs 3 blocks; 2 of 8 are free",
        "tokens  16.0 generated and 80.0 forwarded in a second",
    ]
    rows = [line.split() for line in lines if "cmpl-" in line]
    assert [row[:7] for row in rows] == [
        ["cmpl-a-0", "running", "1.2", "s", "3/10", "3", "0"],
        ["cmpl-b-0", "running", "1.2", "s", "0/10", "3", "0"],
        ["cmpl-c-0", "waiting", "1.2", "s", "0/10", "0", "2"],
        ["[red]cmpl-d-0[/red]", "waiting", "1.2", "s", "0/10", "0", "2"],
    ]
    assert [" ".join(row[7:]) for row in rows] == [
        "decodes",
        "computed 4 of 100 tokens",
        "needs 3 blocks; 2 of 8 are free",
        "behind 1 other",
    ]
    assert not lines[-1].startswith("and")


def test_tokens_in_a_second_are_those_since_the_frame_before_and_none_while_nobody_runs(printed):
    before = picture(clock=8.0, generated_tokens=30, forward_tokens=40)
    assert "tokens  5.0 generated and 30.0 forwarded in a second" in printed(picture(), before)
    assert "tokens  0.0 generated and 0.0 forwarded in a second" in printed(picture(running=0))
    assert "tokens  0.0 generated and 0.0 forwarded in a second" in printed(picture(last_step=None))


def test_what_does_not_fit_is_counted(printed):
    assert printed(picture(unfinished=9))[-1] == "and 5 more"
    lines = printed(picture(unfinished=0, data=[], head_waits_for=None, waiting=0))
    assert lines[3] == "queue   2 run, 0 wait"
    assert len(lines) == 5


def test_once_shows_a_running_server_and_ends(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    engine = make_engine(wrap=GatedRunner, num_blocks=8, max_num_seqs=1)
    with listening(engine) as server:
        first = threading.Thread(target=post, args=(server.url, "a"))
        first.start()
        assert engine.runner.entered.acquire(timeout=BOUND_SECONDS)
        second = threading.Thread(target=post, args=(server.url, "b"))
        second.start()
        while len(engine.timelines.unfinished) < 2:
            assert first.is_alive()
        for _ in range(2):  # in the step that is begun last the second has been looked at
            engine.runner.let_through(1)
            assert engine.runner.entered.acquire(timeout=BOUND_SECONDS)
        while engine.timelines.get(second_id := engine.timelines.unfinished[1].request_id).lack is None:
            assert first.is_alive()
        out = shown(capsys, "--url", server.url, "--once").out
        few = shown(capsys, "--url", f"{server.url}/v1", "--once", "--rows", "1").out
        engine.runner.open_for_good()
        for thread in (first, second):
            thread.join(BOUND_SECONDS)
        idle = shown(capsys, "--url", server.url, "--once").out
    rows = [line.split() for line in out.splitlines() if "cmpl-" in line]
    assert [(row[0].split("-")[1], row[1], row[4]) for row in rows] == [
        ("a", "running", "2/10"),
        ("b", "waiting", "0/10"),
    ]
    assert rows[1][0] == second_id
    assert " ".join(rows[1][7:]) == "needs a slot; 0 of 1 are free"
    assert "slots   1 of 1 taken" in out
    assert "queue   1 run, 1 wait; the next one: needs a slot; 0 of 1 are free" in out
    assert few.splitlines()[-1] == "and 1 more"
    assert "queue   0 run, 0 wait" in idle
    assert "cmpl-" not in idle


def test_in_a_narrow_terminal_ids_and_reasons_are_cut_and_nothing_else(printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    row = {**picture()["data"][2], "id": f"cmpl-{'0123456789abcdef' * 2}-0"}
    lines = printed(picture(data=[row]))
    assert max(map(len, lines)) <= 80
    assert any(
        "cmpl-01234567" in line and " waiting 1.2 s   0/10      0         2 needs 3 bl" in line for line in lines
    )


def post(url, name):
    import httpx

    httpx.post(f"{url}/v1/completions", json=BODY, headers={"X-Request-Id": name}, timeout=BOUND_SECONDS)


def test_without_once_there_is_frame_after_frame_until_ctrl_c(capsys, monkeypatch):
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    with listening(make_engine()) as server:
        monkeypatch.setattr(top.time, "sleep", sleep)
        out = shown(capsys, "--url", server.url, "--interval", "0.5", code=INTERRUPTED).out
        monkeypatch.undo()
    assert slept == [0.5] * 3
    assert out.count("slots   0 of 4 taken") == 3


def test_a_server_with_keys_wants_one_from_the_option_or_the_environment(capsys):
    with listening(make_engine(), api_keys=("first", "second")) as server:
        at = ["--url", server.url, "--once"]
        error = shown(capsys, *at, code=1).err
        assert error.startswith(f"error: the server at {server.url} wants an API key")
        assert "0 of 4 taken" in shown(capsys, *at, "--api-key", "second").out
        assert "0 of 4 taken" in shown(capsys, *at, environment={"OPENAI_API_KEY": "first"}).out


def test_where_no_server_answers_there_is_one_line_that_says_so(capsys):
    with listening(make_engine()) as server:
        gone = server.url
    error = shown(capsys, "--url", gone, "--once", code=1).err
    assert error.startswith(f"error: no server answers at {gone}: ")
    assert len(error.splitlines()) == 1
    assert "is not the URL of a server" in shown(capsys, "--url", "nonsense", "--once", code=1).err


@pytest.mark.parametrize(
    ("status", "body"), [(404, b"{}"), (200, b"[]"), (200, b"<html>"), (200, b'{"object": "list"}')]
)
def test_another_server_is_not_taken_for_one_of_ours(status, body, capsys, monkeypatch):
    async def get(server, limit):
        return status, body

    monkeypatch.setattr(top, "_get", get)
    error = shown(capsys, "--once", code=1).err
    assert f"is no millpond server that lists its requests (status {status})" in error


def test_a_server_that_does_not_answer_in_time_is_given_up(capsys, monkeypatch):
    async def get(server, limit):
        await asyncio.Event().wait()

    monkeypatch.setattr(top, "_get", get)
    monkeypatch.setattr(top, "ANSWER_SECONDS", 0.01)
    assert "has not answered in 0.01 s" in shown(capsys, "--once", code=1).err
