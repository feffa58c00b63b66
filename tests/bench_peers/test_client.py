import asyncio
import json
import threading
from contextlib import contextmanager

import pytest

from bench.peers import client
from millpond.lab.workload import WorkloadRequest

REQUEST = WorkloadRequest(0.0, (1, 2, 3), 3)


def frame(content):
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def piece(text):
    return frame({"choices": [{"text": text}]})


def usage(tokens):
    return frame({"choices": [], "usage": {"completion_tokens": tokens}})


def chunked(*parts, status="200 OK", kind="text/event-stream"):
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def plain(content, status="200 OK"):
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextmanager
def answering(answer):
    """A server that gives everyone the same bytes; yields its port and the list of the bodies it got."""
    loop, started, bodies, ports = asyncio.new_event_loop(), threading.Event(), [], []
    over = asyncio.Event()

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def serve():
        async with await asyncio.start_server(handle, client.HOST, 0) as server:
            ports.append(server.sockets[0].getsockname()[1])
            started.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield ports[0], bodies
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def load(answer, requests=(REQUEST,), *, stream=True):
    with answering(answer) as (port, bodies):
        return client.load(port, requests, "m", {"cache_prompt": False}, stream=stream), bodies


def test_a_stream_gives_a_time_for_each_piece_of_text_and_the_tokens_of_its_usage():
    result, _ = load(chunked(piece("a"), piece("b"), piece("c"), usage(3), frame(b"[DONE]")))
    (timeline,) = result.timelines
    assert len(timeline.pieces) == 3
    assert timeline.tokens == 3
    assert timeline.pieces == sorted(timeline.pieces)


def test_a_frame_may_be_cut_anywhere_between_chunks():
    whole = piece("a") + piece("b") + usage(3)
    result, _ = load(chunked(*(whole[at : at + 7] for at in range(0, len(whole), 7))))
    assert len(result.timelines[0].pieces) == 2


def test_pieces_without_text_are_no_pieces():
    result, _ = load(chunked(piece("a"), piece(""), usage(3)))
    assert len(result.timelines[0].pieces) == 1


def test_a_plain_answer_is_one_piece():
    answer = plain({"choices": [{"text": "abc"}], "usage": {"completion_tokens": 3}})
    result, bodies = load(answer, stream=False)
    assert len(result.timelines[0].pieces) == 1
    assert "stream" not in bodies[0]


def test_the_body_asks_for_exactly_so_many_greedy_tokens_and_passes_on_what_the_engine_needs():
    _, bodies = load(chunked(piece("a"), usage(3)))
    assert bodies[0] == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 3,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (plain({"error": "too long"}, "400 Bad Request"), "status 400.*too long"),
        (chunked(piece("a"), frame({"error": {"message": "it broke"}})), "it broke"),
        (chunked(piece("a"), usage(2)), "2 tokens came where 3"),
        (b"", "without an answer"),
        (chunked(piece("a"), usage(3))[:-9], "did not end its answer"),
        (chunked(), "nothing in it"),
    ],
)
def test_anything_but_the_whole_completion_is_an_error_that_says_so(answer, says):
    with pytest.raises(client.ServerAnswer, match=says):
        load(answer)


def test_a_port_where_nobody_listens_is_a_refused_connection():
    with answering(b"") as (port, _):
        pass
    with pytest.raises(ConnectionRefusedError):
        client.load(port, [REQUEST], "m", {}, stream=True)


def test_ttft_counts_from_when_the_request_was_due():
    timeline = client.Timeline(due=2.0, pieces=[2.5, 2.75, 3.5], tokens=3)
    assert timeline.ttft == 0.5
    assert timeline.gaps == [0.25, 0.75]
    assert timeline.seconds_per_token == 0.5


def test_a_sample_has_every_ttft_and_every_gap():
    timelines = (client.Timeline(0.0, [1.0, 2.0], 2), client.Timeline(1.0, [1.5, 1.75, 2.0], 3))
    sample = client.LoadResult(4.0, timelines).as_sample()
    assert sample == {
        "seconds": 4.0,
        "tokens": 5,
        "ttft": [1.0, 0.5],
        "tpot": [1.0, 0.25],
        "itl": [1.0, 0.25, 0.25],
    }
