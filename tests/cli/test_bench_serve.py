from __future__ import annotations

import asyncio
import json
import os
import resource

import pytest

from load_stand_in import StandIn, refusal
from millpond.cli import bench_serve
from millpond.cli.app import run
from tiny_engine import make_engine
from tiny_server import listening
from virtual_loop import run_virtually

SMALL = ["--requests", "6", "--prompt-tokens", "5", "--max-tokens", "4"]


@pytest.fixture
def stand_in(monkeypatch):
    """A server that the command finds at any URL, in virtual time."""
    server = StandIn(first=0.5, gap=0.125)

    class Virtually:
        @staticmethod
        def run(work):
            async def awaited():
                return await work

            return run_virtually(awaited, server)

    monkeypatch.setattr(bench_serve, "asyncio", Virtually)
    return server


def bench(capsys, *flags, environment=None, code=0):
    assert run(["bench", "serve", "--url", "http://stand-in:8000", *SMALL, *flags], environment or {}) == code
    return capsys.readouterr()


def report(capsys, *flags, **settings):
    return json.loads(bench(capsys, "--json", *flags, **settings).out)


def test_json_is_what_was_asked_for_and_what_the_server_did(stand_in, capsys):
    found = report(capsys, "--rate", "4", "--burstiness", "0", "--ttft-slo", "0.5")
    assert (found["model"], found["endpoint"], found["prompts"], found["rate"]) == (
        "m",
        "completions",
        "token ids",
        4.0,
    )
    assert found["ttft_s"]["p99"] == pytest.approx(0.5)
    assert found["itl_s"]["p50"] == pytest.approx(0.125)
    assert found["seconds"] == pytest.approx(5 * 0.25 + 0.875)
    assert found["goodput"]["share"] == 1.0
    assert [len(each["prompt"]) for each in stand_in.bodies[1:]] == [5] * 6


def test_the_table_fits_a_terminal_and_says_who_counted_and_what_failed(stand_in, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stand_in.script[3] = refusal("429 Too Many Requests", "later", Retry_After="7")
    captured = bench(capsys, "--rate", "4", "--burstiness", "0", "--ttft-slo", "0.4")
    table = captured.out.split("5 of 6 requests")[0]
    assert max(map(len, table.splitlines())) <= 80
    rows = [line.split() for line in table.splitlines()]
    assert ["mean", "median", "p90", "p99"] in rows
    assert ["TTFT", *["500.0", "ms"] * 4] in rows
    assert ["ITL", *["125.0", "ms"] * 4] in rows
    assert ["time", "per", "output", "token", *["125.0", "ms"] * 4] in rows
    assert ["end", "to", "end,", "from", "send", *["875.0", "ms"] * 4] in rows
    for words in (
        "prompts are token ids: 25 tokens where 25 were asked for, by the server's usage",
        "outputs: 20 tokens of at most 20, in 20 pieces of text, by the server's usage",
        "goodput: 0.00 requests/s, 0.0% of all",
        "error http_429: 1, Retry-After 7; the first: ",
        "of a core; requests left 0.0 ms late on average, p99 0.0 ms",
    ):
        assert words in captured.out


def test_a_server_without_usage_has_its_pieces_counted(stand_in, capsys):
    stand_in.with_usage = False
    assert "in 24 pieces of text, of 6 requests without usage as pieces of text" in bench(capsys).out


def test_where_nothing_went_well_there_is_no_table_but_every_error(stand_in, capsys):
    stand_in.script = dict.fromkeys(range(1, 7), refusal("503 Service Unavailable", "draining"))
    out = bench(capsys, "--ttft-slo", "1").out
    first, goodput, error, client = out.splitlines()
    assert first.startswith("0 of 6 requests in ")
    assert goodput == "goodput: 0.00 requests/s, 0.0% of all"
    assert error.startswith("error http_503: 6; the first: ")
    assert client.startswith("client: ")


def test_a_client_that_is_late_or_busy_warns(stand_in, capsys):
    found = report(capsys)
    assert bench_serve.warnings(found) == []
    client = {**found["client"], "is_late": True, "is_busy": True, "cpu_share": 0.75}
    late, busy = bench_serve.warnings({"client": client})
    assert "behind its own schedule" in late
    assert "took 75% of a core" in busy


def test_a_closed_loop_and_shared_prefixes_reach_the_server(stand_in, capsys):
    found = report(capsys, "--concurrency", "2", "--shared-prefix", "3", "--prefix-groups", "2", "--ignore-eos")
    assert (found["concurrency"], found["client"]["most_in_flight"], found["shared_prefix"]) == (2, 2, 3)
    assert "rate" not in found
    assert {len(each["prompt"]) for each in stand_in.bodies[1:]} == {8}
    assert len({tuple(each["prompt"][:3]) for each in stand_in.bodies[1:]}) == 2
    assert all(each["ignore_eos"] for each in stand_in.bodies)
    assert "from send" not in bench(capsys, "--concurrency", "2").out


def test_ignore_eos_is_sent_only_when_asked_for(stand_in, capsys):
    report(capsys)
    assert not any("ignore_eos" in each for each in stand_in.bodies)


def test_a_chat_goes_to_its_route_as_text(stand_in, capsys):
    found = report(capsys, "--endpoint", "chat", "--model", "mine", "--prompt-tokens", "43")
    assert (found["prompts"], found["tokens_per_word"], found["model"]) == ("text", 2.0, "mine")
    assert stand_in.heads[-1].startswith("POST /v1/chat/completions ")
    assert found["prompt_tokens"] == {"asked": 6 * 43, "counted": 6 * 43, "requests_without_usage": 0}


def test_the_key_is_the_options_or_the_environments_and_headers_go_along(stand_in, capsys):
    out = bench(capsys, environment={"OPENAI_API_KEY": "from-outside"}).out
    assert "Authorization: Bearer from-outside" in stand_in.heads[-1]
    out += bench(capsys, "--api-key", "given", "--header", "X-Team: a: b", environment={"OPENAI_API_KEY": "x"}).out
    assert "Authorization: Bearer given" in stand_in.heads[-1]
    assert "X-Team: a: b" in stand_in.heads[-1]
    bench(capsys, "--header", "Authorization: Basic abc", "--api-key", "given")
    assert "Authorization: Basic abc" in stand_in.heads[-1]
    assert "given" not in out
    assert "from-outside" not in out
    bench(capsys)
    assert "Authorization" not in stand_in.heads[-1]


def test_a_trace_replaces_the_drawn_workload_and_the_seed_draws_its_prompts(stand_in, capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival": 9.0 + each, "prompt_tokens": 3 + each, "output_tokens": 1 + each} for each in (2, 0, 1)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    command = ["bench", "serve", "--url", "http://stand-in", "--trace", str(trace), "--json", "--seed"]
    prompts = []
    for seed in ("3", "3", "4"):
        assert run([*command, seed], {}) == 0
        prompts.append([each["prompt"] for each in stand_in.bodies[-3:]])
    assert [(len(each["prompt"]), each["max_tokens"]) for each in stand_in.bodies[-3:]] == [(3, 1), (4, 2), (5, 3)]
    assert prompts[0] == prompts[1] != prompts[2]
    assert json.loads(capsys.readouterr().out.splitlines()[0])["trace"] == str(trace)
    assert stand_in.came[2] - stand_in.came[1] == pytest.approx(1.0)


def test_save_has_a_line_for_each_request_with_the_time_of_each_piece(stand_in, capsys, tmp_path):
    stand_in.script[2] = refusal("503 Service Unavailable", "no", Retry_After="1")
    bench(capsys, "--rate", "inf", "--save", str(tmp_path / "a.jsonl"))
    first, second, *rest = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert len(rest) == 4
    assert (first["due"], first["pieces"], first["error"]) == (0.0, pytest.approx([0.5, 0.625, 0.75, 0.875]), None)
    assert first["usage"] == {"prompt_tokens": 5, "completion_tokens": 4}
    assert (second["error"], second["retry_after"], second["pieces"]) == ("http_503", "1", [])


def test_a_picture_is_written(stand_in, capsys, tmp_path):
    bench(capsys, "--plot", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message", "code"),
    [
        (["--concurrency", "2", "--rate", "1"], "'--concurrency': requests that wait for others have no rate", 2),
        (["--concurrency", "2", "--burstiness", "1"], "leave out --burstiness", 2),
        (["--concurrency", "0"], "--concurrency", 2),
        (["--header", "nothing"], "'nothing' is not a header", 2),
        (["--url", "stand-in"], "'stand-in' is not the URL of a server", 1),
        (["--timeout", "inf"], "--timeout must be above 0 seconds and finite, got inf", 1),
        (["--endpoint", "embeddings"], "--endpoint must be one of completions, chat, got 'embeddings'", 1),
        (["--prefix-groups", "2"], "give a --shared-prefix", 1),
        (["--rate", "0"], "rate (--rate) must be above 0", 1),
        (["--ttft-slo", "0"], "--ttft-slo must be above 0 seconds", 1),
        (["--trace", "nowhere.jsonl"], "leave out --requests, --prompt-tokens, --max-tokens", 2),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line_and_nothing_is_sent(stand_in, capsys, flags, message, code):
    captured = bench(capsys, *flags, code=code)
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert stand_in.bodies == []


def test_a_server_that_is_not_there_is_one_line(capsys):
    assert run(["bench", "serve", "--url", "http://127.0.0.1:1"], {}) == 1
    assert "no answer from 127.0.0.1, port 1" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("how", [["--rate", "inf"], ["--concurrency", "3"]])
def test_our_own_server_is_loaded_over_real_sockets_and_every_token_is_counted(capsys, endpoint, how):
    """Its vocabulary is too small for the ids that are drawn, so that the prompts are text."""
    engine = make_engine(max_model_len=128)
    flags = [*SMALL, "--max-tokens", "7", "--prompt-tokens", "40", "--endpoint", endpoint, *how, "--ignore-eos"]
    with listening(engine) as running:
        assert run(["bench", "serve", "--url", running.url, *flags, "--ttft-slo", "100", "--json"], {}) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["prompts"], found["errors"], found["completed"]) == ("tiny", "text", [], 6)
    assert found["output_tokens"] == {"asked": 42, "counted": 42, "requests_without_usage": 0, "pieces": 42}
    admissions = [each[2] for each in engine.runner.admissions][-6:]
    assert found["prompt_tokens"]["counted"] == sum(len(each.prompt_token_ids) for each in admissions)
    assert len({tuple(each.prompt_token_ids) for each in admissions}) == 6
    assert 0 < found["ttft_s"]["p50"] <= found["e2e_s"]["p50"] <= found["seconds"]
    assert found["goodput"]["share"] == 1.0
    assert found["client"]["cpu_share"] > 0


def test_more_connections_than_the_first_limit_on_open_files_are_no_error(stand_in, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, bench_serve.MOST_FILES) if hard != resource.RLIM_INFINITY else bench_serve.MOST_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 40, hard))
    try:
        found = report(capsys, "--requests", "60", "--rate", "inf")
        assert (found["errors"], found["client"]["most_in_flight"]) == ([], 60)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_command_runs_on_the_ordinary_event_loop():
    assert bench_serve.asyncio is asyncio
