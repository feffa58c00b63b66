from __future__ import annotations

import socket

import pytest

import millpond.serve.run
from millpond.cli.app import run
from millpond.config import EngineConfig


@pytest.fixture
def served(engine, monkeypatch):
    """What the command asked the server to do: (host, port, model_names, log_level) of each call."""
    calls = []

    def serve(engine, host, port, *, model_names, notify, log_level):
        calls.append((host, port, model_names, log_level))

    monkeypatch.setattr(millpond.serve.run, "serve", serve)
    return calls


def test_it_serves_the_demo_model_on_loopback_by_default(engine, served):
    assert run(["serve"], {}) == 0
    assert engine.opened == [("smollm2", EngineConfig())]
    assert served == [("127.0.0.1", 8000, ("smollm2",), "info")]


def test_every_engine_flag_reaches_the_engine(engine, served):
    flags = (
        "--dtype float32 --max-model-len 100 --max-num-seqs 3 --max-num-batched-tokens 30 --block-size 8 "
        "--watermark 0.5 --watermark-blocks 2 --kv-memory 1M --threads 1 --isa portable --audit --seed 9 "
        "--speculative ngram --speculative-tokens 5 --no-prefix-cache"
    )
    assert run(["serve", "m.gguf", *flags.split()], {}) == 0
    config = EngineConfig(
        dtype="float32",
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=30,
        block_size=8,
        watermark=0.5,
        watermark_blocks=2,
        kv_memory=2**20,
        speculative="ngram",
        speculative_tokens=5,
        prefix_cache=False,
        threads=1,
        isa="portable",
        audit=True,
        seed=9,
    )
    assert engine.opened == [("m.gguf", config)]


def test_every_server_flag_reaches_the_server(engine, served):
    run(["serve", "--host", "::1", "--port", "0", "--served-model-name", "demo", "--log-level", "debug"], {})
    assert served == [("::1", 0, ("demo",), "debug")]


def test_the_log_level_comes_from_the_environment_where_no_flag_is_given(engine, served):
    run(["serve"], {"MILLPOND_LOG_LEVEL": "error"})
    assert served[0][3] == "error"


def test_an_unknown_log_level_is_wrong_usage(engine, served, capsys):
    assert run(["serve", "--log-level", "loud"], {}) == 2
    assert "'loud' is not one of debug, info, warning, error" in capsys.readouterr().err
    assert engine.opened == []


def test_an_address_in_use_is_one_line_with_the_way_out(engine, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert run(["serve", "--port", str(port)], {}) == 1
    error = capsys.readouterr().err
    assert error == f"error: cannot listen on 127.0.0.1:{port}: Address already in use (choose another with --port)\n"


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".test", "no such host"])
def test_a_host_that_cannot_be_is_one_line_that_names_the_flag(engine, capsys, host):
    assert run(["serve", "--host", host, "--port", "0"], {}) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot listen on {host}:0: ")
    assert error.endswith(" (choose another with --host)\n")
    assert error.count("\n") == 1
