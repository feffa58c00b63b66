"""The load client against a server with known delays, in virtual time: what it reports is what the server did."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest

from load_stand_in import DONE, END, URL, StandIn, chunk, event, head, piece, refusal, usage
from millpond.errors import ConfigError, EngineError
from millpond.lab.arrivals import Traffic
from millpond.lab.http_client import Server
from millpond.lab.latency import Slo
from millpond.lab.lengths import Lengths
from millpond.lab.load_client import FAREWELL_SECONDS, LoadClient
from millpond.lab.load_dialect import TOKEN_IDS, Dialect, find_dialect
from millpond.lab.load_plan import LoadPlan
from millpond.lab.load_report import figures, in_flight
from millpond.lab.load_test import run_load, write_requests
from millpond.lab.workload import WorkloadRequest
from virtual_loop import run_virtually

IDS = Dialect(model="m")
SERVER = Server.at(URL, {})


def workload(*arrivals, prompt=5, max_tokens=4):
    return [WorkloadRequest(arrival, (0,) * prompt, max_tokens) for arrival in arrivals]


def load(stand_in, requests, *, timeout=60.0, concurrency=None, cpu_seconds=0.0, held_up=None, **settings):
    """The run of a workload against a stand-in; held_up is (at, seconds): something keeps the client from working."""
    plan = LoadPlan(timeout=timeout, concurrency=concurrency, **settings)
    ticks = iter((1.0, 1.0 + cpu_seconds))

    async def work():
        loop = asyncio.get_running_loop()
        if held_up is not None:
            loop.call_at(held_up[0], loop.hold_up, held_up[1])
        client = LoadClient(SERVER, plan.route, timeout)
        written = write_requests(requests, IDS, plan)
        return await run_load(client, written, concurrency=concurrency, cpu_clock=lambda: next(ticks))

    return run_virtually(work, stand_in)


def one(*steps, **settings):
    """The record of one request that the server does this with."""
    return load(StandIn(script={0: steps}), workload(0.0), **settings).records[0]


def exactly(*values):
    return pytest.approx(values, abs=1e-9)


def test_the_latencies_are_the_servers_delays_to_the_digit():
    stand_in = StandIn(first=0.5, gap=0.125)
    found = figures(load(stand_in, workload(0.0, 1.0, 1.25, max_tokens=5)), Slo())
    for name, delay in (("ttft_s", 0.5), ("itl_s", 0.125), ("tpot_s", 0.125), ("e2e_s", 1.0)):
        figure = found[name]
        assert (figure["mean"], figure["p50"], figure["p90"], figure["p99"]) == exactly(*4 * [delay])
    assert found["seconds"] == pytest.approx(2.25)
    assert found["output_tok_s"] == pytest.approx(15 / 2.25)
    assert found["total_tok_s"] == pytest.approx(30 / 2.25)
    assert found["requests_s"] == pytest.approx(3 / 2.25)
    assert (found["completed"], found["failed"], found["errors"]) == (3, 0, [])


def test_each_piece_came_when_the_server_sent_it():
    stand_in = StandIn(first=0.3, gap=0.07)
    requests = Traffic(num_requests=20, rate=3.0, prompt_tokens=Lengths((5,)), max_tokens=Lengths((1, 4, 9))).requests()
    run = load(stand_in, requests)
    assert stand_in.came == exactly(*(each.arrival for each in requests))
    assert len(stand_in.sent) == 20
    for number, record in enumerate(run.records):
        assert list(record.pieces) == exactly(*stand_in.sent[number])
        assert record.output_tokens == len(record.pieces) == record.max_tokens


def test_requests_come_by_the_clock_whether_or_not_earlier_ones_are_done():
    stand_in = StandIn(first=10.0)
    load(stand_in, workload(0.0, 1.0, 1.5, 2.0))
    assert stand_in.came == exactly(0.0, 1.0, 1.5, 2.0)


def test_the_wait_for_a_busy_server_is_in_the_latencies_of_those_who_waited():
    # One slot, 1 s an answer, two requests a second: the n-th waits n * 0.5 s before its own 0.625 s.
    stand_in = StandIn(first=0.625, gap=0.125, slots=1)
    run = load(stand_in, workload(*(0.5 * number for number in range(6))))
    assert [each.times.ttft for each in run.records] == exactly(*(0.625 + 0.5 * number for number in range(6)))


def test_a_client_that_was_held_up_counts_from_when_requests_were_due_and_says_that_it_was_late():
    run = load(StandIn(first=0.5), workload(0.0, 2.0, 3.0, 5.0), held_up=(1.5, 2.5))
    found = figures(run, Slo())
    assert [each.started - each.due for each in run.records] == exactly(0.0, 2.0, 1.0, 0.0)
    assert [each.times.ttft for each in run.records] == exactly(0.5, 2.5, 1.5, 0.5)
    assert found["from_send_s"]["ttft"]["mean"] == pytest.approx(0.5)
    assert found["from_send_s"]["e2e"]["max"] == pytest.approx(0.875)
    assert found["client"]["lag_s"]["max"] == pytest.approx(2.0)
    assert found["client"]["is_late"]


def test_a_client_on_time_is_not_late_and_its_share_of_a_core_is_reported():
    found = figures(load(StandIn(), workload(0.0, 1.0), cpu_seconds=0.1875), Slo())["client"]
    assert (found["is_late"], found["is_busy"], found["lag_s"]["max"]) == (False, False, pytest.approx(0.0))
    assert found["cpu_share"] == pytest.approx(0.1875 / 1.875)
    assert figures(load(StandIn(), workload(0.0), cpu_seconds=0.5), Slo())["client"]["is_busy"]


def test_a_closed_loop_has_so_many_requests_under_way_and_sends_the_next_when_one_is_over():
    stand_in = StandIn(first=0.5, gap=0.5)
    run = load(stand_in, workload(*[0.0] * 7, max_tokens=2), concurrency=3)
    assert stand_in.came == exactly(0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0)
    assert {each.times.ttft for each in run.records} == {0.5}
    assert figures(run, Slo())["client"]["most_in_flight"] == 3
    assert list(in_flight(run.records)) == [(0.0, 3), (1.0, 3), (2.0, 1), (3.0, 0)]


def test_pieces_that_come_together_have_no_time_between_and_tokens_are_those_of_the_usage():
    two = piece("a") + piece("b")
    record = one(head(), 1.0, chunk(two), 2.0, chunk(piece("c", "length")), chunk(usage(5, 9) + DONE) + END)
    assert list(record.pieces) == exactly(1.0, 1.0, 3.0)
    assert record.gaps == exactly(0.0, 2.0)
    assert (record.output_tokens, record.times.mean_itl) == (9, 0.25)


def test_without_usage_pieces_count_as_tokens_and_the_report_says_so():
    found = figures(load(StandIn(with_usage=False), workload(0.0, 0.0, max_tokens=3)), Slo())
    assert found["output_tokens"] == {"asked": 6, "counted": 6, "requests_without_usage": 2, "pieces": 6}
    assert found["prompt_tokens"] == {"asked": 10, "counted": 10, "requests_without_usage": 2}


def test_with_usage_the_report_has_the_servers_own_count():
    script = {0: [head(), chunk(piece("ab", "stop")), chunk(usage(7, 2)), chunk(DONE) + END]}
    found = figures(load(StandIn(script=script), workload(0.0, 0.0, max_tokens=3)), Slo())
    assert found["output_tokens"] == {"asked": 6, "counted": 5, "requests_without_usage": 0, "pieces": 4}
    assert found["prompt_tokens"] == {"asked": 10, "counted": 12, "requests_without_usage": 0}


def test_events_may_be_cut_anywhere_end_in_cr_lf_and_have_comments_between():
    answer = b": hello\r\n\r\n" + (piece("a") + b"event: x\nid: 3\n" + piece("b", "stop") + DONE).replace(
        b"\n", b"\r\n"
    )
    steps = [step for at in range(len(answer)) for step in (0.25, chunk(answer[at : at + 1]))]
    record = one(head(), *steps, END, timeout=1e6)
    assert (record.error, record.finish_reason, len(record.pieces)) == (None, "stop", 2)
    last = answer.rindex(b"\r\n\r\n", 0, answer.index(b"data: [DONE]")) + 4
    assert record.pieces[-1] == pytest.approx(0.25 * last)


def test_the_role_of_a_chat_is_no_token_and_its_reasoning_is():
    def delta(**content):
        return chunk(event({"choices": [{"delta": content, "finish_reason": None}]}))

    end = chunk(event({"choices": [{"delta": {}, "finish_reason": "stop"}]}) + DONE) + END
    record = one(
        head(),
        delta(role="assistant", content=""),
        1.0,
        delta(reasoning_content="a"),
        1.0,
        delta(content="b"),
        1.0,
        end,
    )
    assert list(record.pieces) == exactly(1.0, 2.0)
    assert record.ended == pytest.approx(3.0)


def test_an_answer_without_any_text_has_its_end_as_its_first_token():
    record = one(head(), 1.5, chunk(piece("", "stop")), chunk(usage(5, 1) + DONE) + END)
    assert (record.error, list(record.pieces), record.output_tokens) == (None, [1.5], 1)


@pytest.mark.parametrize("end", [[0.5], [chunk(b"data: [DO"), 0.5]])
def test_a_body_may_end_with_the_connection_where_it_has_no_length(end):
    open_ended = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    record = one(open_ended, 1.0, piece("a", "stop").rstrip(b"\n"), None)
    assert (record.error, list(record.pieces)) == (None, [1.0])


OVERLOAD = refusal("429 Too Many Requests", "later", Retry_After="7")


@pytest.mark.parametrize(
    ("steps", "kind", "says"),
    [
        (refusal("400 Bad Request", "too long"), "http_400", "too long"),
        (OVERLOAD, "http_429", "later"),
        (refusal("503 Service Unavailable", "draining"), "http_503", "draining"),
        ([head("307 Temporary Redirect", Location="/x") + END], "http_307", ""),
        ([head(), chunk(piece("a")), 1.0, None], "cut", "closed"),
        ([head(), chunk(piece("a", "stop")), None], "cut", "closed"),
        ([head(), chunk(piece("a")), END], "cut", "after 1 pieces of text, with no finish_reason"),
        ([None], "cut", "closed"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndata:", None], "cut", "closed"),
        ([head(), chunk(piece("a")), chunk(event({"error": {"message": "it broke"}})), END], "error_event", "it broke"),
        ([head(), chunk(event({"object": "error", "message": "old"})), END], "error_event", "old"),
        ([head(), chunk(piece("a", "error") + DONE), END], "error_event", "'error'"),
        ([head(), chunk(DONE), END], "no_stream", "DONE"),
        ([head(kind="application/json"), chunk(b'{"choices": []}'), END], "no_stream", "choices"),
        ([head(), chunk(b"data: {not json\n\n"), END], "no_stream", "not json"),
        ([head(), chunk(b"data: [1]\n\n"), END], "no_stream", "[1]"),
        ([head(), chunk(event({"choices": [], "usage": {"prompt_tokens": 1}})), END], "no_stream", "usage"),
        ([b"SSH-2.0-OpenSSH_9\r\n"], "cut", "not HTTP"),
        ([head(), chunk(piece("a")), 100.0], "timeout", "60 seconds"),
        ([100.0], "timeout", "60 seconds"),
    ],
)
def test_each_way_to_fail_has_its_kind_and_its_words(steps, kind, says):
    record = one(*steps)
    assert record.error == kind
    assert says in record.message
    assert not record.is_ok


def test_a_server_that_is_not_there_is_an_error_of_every_request():
    run = load(None, workload(0.0, 1.0))
    assert [each.error for each in run.records] == ["connect", "connect"]
    found = figures(run, Slo(1.0, 1.0))
    assert (found["completed"], found["output_tok_s"], found["ttft_s"]) == (0, 0.0, {})
    assert found["goodput"]["share"] == 0.0
    assert found["client"]["connect_s"] == {}


def test_a_timeout_ends_the_request_then_and_not_later():
    record = one(head(), 1.0, chunk(piece("a")), 100.0, timeout=2.5)
    assert (record.error, record.ended, list(record.pieces)) == ("timeout", 2.5, [1.0])


def test_a_server_that_leaves_the_connection_open_after_the_last_event_is_not_waited_for():
    record = one(head(), 1.0, chunk(piece("a", "stop") + DONE), 100.0)
    assert (record.error, record.ended) == (None, 1.0 + FAREWELL_SECONDS)


def test_what_failed_is_counted_by_kind_with_what_retry_after_said_and_drops_out_of_nothing_else():
    script = {
        0: OVERLOAD,
        2: refusal("429 Too Many Requests", "later", Retry_After="12"),
        3: OVERLOAD,
        4: [head(), chunk(piece("a")), None],
    }
    found = figures(load(StandIn(script=script, first=0.5), workload(*[0.0] * 6)), Slo(0.5, None))
    overload, cut = found["errors"]
    assert (overload["kind"], overload["count"], overload["retry_after"]) == ("http_429", 3, ["7", "12"])
    assert "later" in overload["message"]
    assert (cut["kind"], cut["count"], cut["retry_after"]) == ("cut", 1, [])
    assert (found["requests"], found["completed"], found["failed"]) == (6, 2, 4)
    assert found["goodput"]["share"] == pytest.approx(2 / 6)
    assert found["output_tokens"]["counted"] == 8


@pytest.mark.parametrize(("slo", "good"), [(Slo(0.5, 0.125), 3), (Slo(0.4, None), 0), (Slo(None, 0.1), 0)])
def test_goodput_counts_those_that_met_the_bounds(slo, good):
    found = figures(load(StandIn(first=0.5, gap=0.125), workload(0.0, 0.0, 0.125)), slo)["goodput"]
    assert found == {
        "ttft": slo.ttft,
        "itl": slo.itl,
        "share": good / 3,
        "requests_s": good,
        "output_tok_s": 4 * good,
    }


def test_the_answer_is_told_of_as_it_comes():
    told = []

    async def work():
        written = write_requests(workload(0.0, 0.0, 5.0), IDS, LoadPlan())
        return await run_load(LoadClient(SERVER, "/v1/completions", 60.0), written, notify=told.append)

    run_virtually(work, StandIn())
    assert told == [1, 2, 3]


def bodies(requests, dialect=IDS, **settings):
    return [json.loads(each.body) for each in write_requests(requests, dialect, LoadPlan(**settings))]


def test_prompts_are_drawn_by_the_seed_and_have_their_length():
    requests = workload(0.0, 0.0, prompt=50)
    first, second = bodies(requests, seed=3)
    assert [first, second] == bodies(requests, seed=3)
    assert len(first["prompt"]) == len(second["prompt"]) == 50
    assert first["prompt"] != second["prompt"] != bodies(requests, seed=4)[1]["prompt"]
    assert set(first["prompt"]) <= set(TOKEN_IDS)


def test_a_body_is_greedy_streamed_and_asks_for_no_more_than_it_was_told_to():
    found = bodies(workload(0.0))[0]
    del found["prompt"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    assert found == {"model": "m", "max_tokens": 4, "temperature": 0.0, **options}
    plain = Dialect(model="m", is_chat=True, takes_ids=False, has_usage=False, ignore_eos=True)
    found = bodies(workload(0.0), plain)[0]
    assert found.pop("messages")[0]["role"] == "user"
    assert found == {"model": "m", "max_tokens": 4, "temperature": 0.0, "stream": True, "ignore_eos": True}


def test_shared_prefixes_stand_in_front_of_prompts_that_differ():
    found = [each["prompt"] for each in bodies(workload(*[0.0] * 40), shared_prefix=8, prefix_groups=3)]
    assert {len(each) for each in found} == {13}
    assert len({tuple(each[:8]) for each in found}) == 3
    assert len({tuple(each[8:]) for each in found}) == 40
    one_group = [each["prompt"] for each in bodies(workload(0.0, 0.0), shared_prefix=8)]
    assert one_group[0][:8] == one_group[1][:8]


def test_a_prefix_that_makes_the_workload_too_large_is_refused():
    with pytest.raises(ConfigError, match="at most 67108864 tokens"):
        bodies(workload(*[0.0] * 100), shared_prefix=1 << 20)


def dialect(stand_in, **settings):
    return run_virtually(lambda: find_dialect(SERVER, LoadPlan(**settings)), stand_in)


def test_the_first_model_is_taken_and_token_ids_and_usage_where_the_server_has_them():
    stand_in = StandIn()
    assert dialect(stand_in) == Dialect(model="m", takes_ids=True, has_usage=True)
    assert dialect(StandIn(), model="other").model == "other"
    assert len(stand_in.bodies) == 1
    assert max(stand_in.bodies[0]["prompt"]) == TOKEN_IDS[-1]


def no_ids(body):
    return refusal("400 Bad Request", "text only") if isinstance(body.get("prompt"), list) else None


def no_usage(body):
    return refusal("400 Bad Request", "unknown field") if "stream_options" in body else None


def test_a_server_without_ids_gets_text_of_about_that_length():
    found = dialect(StandIn(takes=no_ids))
    assert (found.takes_ids, found.has_usage, found.tokens_per_word, found.extra_tokens) == (False, True, 2.0, 3.0)
    text = bodies(workload(0.0, prompt=43), found)[0]["prompt"]
    assert len(text.split()) == 20
    assert not dialect(StandIn(), prompts="text").takes_ids


def test_a_server_that_takes_a_list_of_ids_for_something_else_gets_text():
    class Stringifies(StandIn):
        def answer(self, body):
            text = str(body["prompt"])
            return super().answer({**body, "prompt": text})

    assert dialect(Stringifies()) == Dialect(model="m", takes_ids=False, tokens_per_word=2.0, extra_tokens=3.0)
    with pytest.raises(EngineError, match="success: an answer that does not count token ids as tokens"):
        dialect(Stringifies(), prompts="ids")


def test_a_prefix_of_words_does_not_count_the_templates_tokens_twice():
    found = dialect(StandIn(), endpoint="chat")
    (request,) = bodies(workload(0.0, prompt=43), found, shared_prefix=20)
    assert len(request["messages"][0]["content"].split()) == 10 + 20


def test_where_only_a_short_prompt_fits_the_words_are_measured_by_it_alone():
    def short(body):
        return refusal("400 Bad Request", "too long") if len(body["messages"][0]["content"].split()) > 8 else None

    found = dialect(StandIn(takes=short), endpoint="chat")
    assert (found.tokens_per_word, found.extra_tokens) == ((2 * 8 + 3) / 8, 0.0)


def test_a_server_that_refuses_to_send_usage_is_not_asked_for_it():
    found = dialect(StandIn(takes=no_usage))
    assert (found.takes_ids, found.has_usage) == (True, False)
    assert dialect(StandIn(with_usage=False)).has_usage is False


def test_a_server_that_answers_nothing_is_an_error_with_its_words():
    broken = StandIn(takes=lambda body: refusal("400 Bad Request", "no such model"))
    with pytest.raises(EngineError, match=r"http_400.*no such model"):
        dialect(broken)
    assert [("stream_options" in each, isinstance(each["prompt"], list)) for each in broken.bodies] == [
        (True, True),
        (False, True),
        (True, False),
        (False, False),
    ]


@pytest.mark.parametrize("status", ["401 Unauthorized", "429 Too Many Requests"])
def test_a_refusal_that_no_other_words_would_change_is_an_error_at_once(status):
    stand_in = StandIn(takes=lambda body: refusal(status, "no"))
    with pytest.raises(EngineError, match=f"http_{status[:3]}"):
        dialect(stand_in)
    assert len(stand_in.bodies) == 1


def test_no_server_is_an_error_that_names_it():
    with pytest.raises(EngineError, match="no answer from stand-in, port 8000"):
        dialect(None)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"endpoint": "chat", "prompts": "ids"}, "a chat has no token ids"),
        ({"endpoint": "x"}, "--endpoint must be one of completions, chat, got 'x'"),
        ({"prompts": "x"}, "--prompts must be one of auto, ids, text, got 'x'"),
        ({"timeout": 0.0}, "--timeout must be above 0 seconds and finite, got 0"),
        ({"timeout": float("nan")}, "got nan"),
        ({"prefix_groups": 2}, r"2 groups \(--prefix-groups\) of no tokens"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_the_name_of_its_option(settings, says):
    with pytest.raises(ConfigError, match=says):
        LoadPlan(**settings)


def test_a_burst_leaves_in_the_order_of_its_numbers():
    stand_in = StandIn()
    run = load(stand_in, workload(*[0.0] * 50))
    assert [each.index for each in run.records] == list(range(50))
    assert all(first.due <= second.due for first, second in pairwise(run.records))
    assert [each["prompt"] for each in stand_in.bodies] == [each["prompt"] for each in bodies(workload(*[0.0] * 50))]
