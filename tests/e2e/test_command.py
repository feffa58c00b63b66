"""The command on the demo model: what doctor says is what the engine does, and a server's life from ready to gone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time

import httpx
import openai
import pytest

from e2e.real import BOUND_SECONDS, KV_MEMORY, MAX_MODEL_LEN, MILLPOND, millpond
from millpond.load.store import resolve
from millpond.source_hash import source_hash

pytestmark = pytest.mark.slow

SIZES = ["--kv-memory", str(KV_MEMORY), "--max-model-len", str(MAX_MODEL_LEN)]
DRAIN_SECONDS = 30


@contextlib.contextmanager
def served(*arguments):
    """A server in a process of its own; yields the process, its URL and its start-up lines. Ended if it still runs."""
    command = [*MILLPOND, "serve", "smollm2", "--port", "0", *SIZES, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if "watermark reserves" in line:
                break
        found = re.search(r"millpond serves smollm2 at (http://\S+)", "".join(lines))
        assert found, f"the server ended: {''.join(lines)}"
        yield process, found[1], "".join(lines)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def doctor(*arguments):
    done = millpond("doctor", "--json", *SIZES, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_doctor_says_what_the_engine_does(base):
    told = doctor("--threads", "1")
    scheduler, config = base.scheduler, base.config
    assert told["threads"]["threads"] == config.threads
    assert told["processor"]["kernels"] == config.isa
    assert told["pool"]["blocks"] == scheduler.pool.num_blocks
    assert told["pool"]["tokens"] == scheduler.pool.num_blocks * scheduler.block_size
    assert told["pool"]["memory_bytes"] <= KV_MEMORY
    assert told["pool"]["watermark_blocks"] == scheduler.watermark_blocks > 0
    assert told["pool"]["max_model_len"] == config.max_model_len == base.limits.max_total_tokens
    assert told["model"]["vocab_size"] == base.limits.vocab_size


def test_doctor_says_how_many_threads_are_used_where_none_are_asked_for():
    with served("--watermark", "0.05", "--max-num-seqs", "8") as (_, _, lines):
        told = doctor("--watermark", "0.05", "--max-num-seqs", "8")
        assert f"{told['threads']['threads']} threads" in lines
        assert f"{told['pool']['blocks']} blocks of {told['pool']['block_size']} tokens" in lines
        assert f"({told['pool']['tokens']} tokens in bfloat16, " in lines
        assert f"reserves {told['pool']['watermark_blocks']} blocks" in lines
        assert told["pool"]["watermark_blocks"] == int(0.05 * told["pool"]["blocks"])


def test_a_server_answers_from_its_ready_line_to_its_stop_signal_and_lets_an_answer_end():
    with served("--threads", "1", "--audit") as (process, url, _):
        with httpx.Client(base_url=url, timeout=BOUND_SECONDS) as client:
            assert client.get("/health").json()["status"] == "ok"
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client_of_openai:
                assert [model.id for model in client_of_openai.models.list()] == ["smollm2"]
                whole = client_of_openai.completions.create(
                    model="smollm2", prompt="1, 2, 3, 4, 5,", max_tokens=6, temperature=0
                )
                assert whole.choices[0].text.startswith(" 6, 7")
            before = client.get("/health").json()["steps"]
            body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = (line for line in response.iter_lines() if line)
                next(lines)
                assert client.get("/health").json()["steps"] > before
                process.send_signal(signal.SIGTERM)
                started = time.monotonic()
                rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        _, error = process.communicate(timeout=BOUND_SECONDS)
        assert time.monotonic() - started < DRAIN_SECONDS
        assert (process.returncode, "Traceback" in error) == (0, False), error
        host, port = url.removeprefix("http://").split(":")
        with socket.create_server((host, int(port))):
            pass


def test_a_port_in_use_is_one_line_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = millpond("serve", "--port", port, "--threads", "1", *SIZES)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use (choose another with --port)"
    ]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (["--bogus"], 2, "--bogus"),
        (["no-such-model"], 1, "no-such-model"),
        (["--max-model-len", "8193"], 1, "8192"),
        (["--kv-memory", "999T"], 1, "memory"),
    ],
)
def test_a_start_that_cannot_work_is_one_line_and_an_exit_code(arguments, exit_code, says):
    done = millpond("serve", "--port", "0", *arguments)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert line.startswith("error: ")
    assert says in line


@pytest.mark.parametrize("kept", [60_000_000, -1])
def test_a_model_file_cut_short_is_one_line_that_says_incomplete(tmp_path, kept):
    cut = tmp_path / "cut.gguf"
    with open(resolve("smollm2"), "rb") as whole:
        cut.write_bytes(whole.read()[:kept])
    done = millpond("generate", "hi", "--model", str(cut))
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert line.startswith("error: cut.gguf: incomplete file: ")


def test_a_conversation_through_a_pipe_goes_on_past_commands_and_ends_with_the_input():
    lines = "Name the capital of France.\n/nonsense\n\nAnd of Italy?\n"
    done = millpond(
        *("chat", "--temperature", "0", "--max-tokens", "24", "--max-model-len", "512", "--threads", "1"), stdin=lines
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout.splitlines()[0]
    assert "/nonsense is not a command" in done.stderr
    assert len([line for line in done.stdout.splitlines() if line]) >= 2


def test_compiled_kernels_are_kept_below_the_cache_folder_that_the_environment_names(tmp_path):
    environment = {**os.environ, "MILLPOND_CACHE": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    command = [*MILLPOND, "doctor", str(resolve("smollm2")), "--json", *SIZES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_SECONDS)
    folder = json.loads(done.stdout)["kernel_cache"]["folder"]
    assert folder == str(tmp_path / "kernels" / source_hash())
    assert (tmp_path / "kernels" / source_hash()).is_dir()
