from __future__ import annotations

import socket
import sys

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

import millpond.serve.run
from millpond.cli.app import run
from millpond.config import EngineConfig, LoadLimits, ServerConfig
from tls_pair import certificate_in

FAIR = ["--policy", "fair", "--tenant-weight"]
TWO_KEYS = ["--api-key", "x", "--api-key", "y"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The files of a certificate and its key."""
    return certificate_in(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def served(engine, monkeypatch):
    """What the command asked the server to do: (host, port, model_names, config, load) of each call."""
    calls = []

    def serve(engine, host, port, config, *, load, model_names, notify):
        calls.append((host, port, model_names, config, load))

    monkeypatch.setattr(millpond.serve.run, "serve", serve)
    return calls


def test_it_serves_the_demo_model_on_loopback_by_default(engine, served):
    assert run(["serve"], {}) == 0
    assert engine.opened == [("smollm2", EngineConfig())]
    assert served == [("127.0.0.1", 8000, ("smollm2",), ServerConfig(), LoadLimits())]


def test_every_engine_flag_reaches_the_engine(engine, served):
    flags = (
        "--dtype float32 --max-model-len 100 --max-num-seqs 3 --max-num-batched-tokens 30 --block-size 8 "
        "--watermark 0.5 --watermark-blocks 2 --kv-memory 1M --threads 1 --isa portable --audit --seed 9 "
        "--speculative ngram --speculative-tokens 5 --itl-target 12.5 --no-prefix-cache"
    )
    assert run(["serve", "m.gguf", *flags.split()], {}) == 0
    config = EngineConfig(
        dtype="float32",
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=30,
        itl_target=12.5,
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


def test_a_model_on_a_path_is_served_under_the_name_of_its_file_and_any_other_as_it_was_given(engine, served, tmp_path):
    engine.model_name = "tiny"
    (tmp_path / "tiny.gguf").write_bytes(b"")
    for arguments in ([str(tmp_path)], [f"{tmp_path}/tiny.gguf"], ["smollm2"], ["org/repo:tiny.gguf"]):
        assert run(["serve", *arguments], {}) == 0
    assert run(["serve", str(tmp_path), "--served-model-name", "mine"], {}) == 0
    assert [names for _, _, names, _, _ in served] == [
        ("tiny",), ("tiny",), ("smollm2",), ("org/repo:tiny.gguf",), ("mine",)
    ]  # fmt: skip


def test_a_reserve_that_chooses_itself_is_asked_for_by_name_and_nothing_else_is(engine, served, capsys):
    assert run(["serve", "m.gguf", "--watermark", "auto"], {}) == 0
    assert engine.opened == [("m.gguf", EngineConfig(watermark="auto"))]
    assert run(["serve", "m.gguf", "--watermark", "much"], {}) == 2
    assert "'much' is neither a share such as 0.01 nor auto" in capsys.readouterr().err


def test_prefixes_on_disk_have_a_folder_and_a_size(engine, served, tmp_path):
    assert run(["serve", "m.gguf", "--cache-dir", str(tmp_path), "--cache-dir-size", "2G"], {}) == 0
    assert engine.opened == [("m.gguf", EngineConfig(prefix_dir=tmp_path, prefix_dir_size=2 * 2**30))]


def test_a_folder_without_a_name_and_a_tenant_with_two_weights_are_wrong_usage(engine, served, capsys):
    for folder in ("", "  "):
        assert run(["serve", "--cache-dir", folder], {}) == 2
        assert (
            "'--cache-dir': the name of the folder is empty: name one, or leave the option" in capsys.readouterr().err
        )
    assert run(["serve", *FAIR, "user:a=2", "--tenant-weight", "user:a=3"], {}) == 2
    assert "'--tenant-weight': 'user:a' has two weights" in capsys.readouterr().err
    assert engine.opened == []


@pytest.mark.parametrize(
    ("weights", "keys"),
    [(["user:ann=2", "header:team=0.5", "=3", "user:key1=4"], []), (["key1=2", "key2=0.5"], TWO_KEYS)],
)
def test_the_weights_of_tenants_that_there_can_be_reach_the_engine(engine, served, weights, keys):
    flags = [each for weight in weights for each in ("--tenant-weight", weight)]
    assert run(["serve", "--policy", "fair", *flags, *keys], {}) == 0
    ((_, config),) = engine.opened
    assert [f"{tenant}={weight:g}" for tenant, weight in config.tenant_weights] == weights


def test_every_server_flag_reaches_the_server(engine, served, pair):
    cert, key = pair
    flags = (
        "--host ::1 --port 0 --served-model-name demo --log-level debug --drain-timeout 2.5 --max-body-bytes 1M "
        "--api-key one --api-key two --cors-origin https://a.test --cors-origin https://b.test --log-prompts --strict "
        f"--log-format json --tls-cert {cert} --tls-key {key} --otlp-endpoint http://127.0.0.1:4318/v1/traces"
    )
    assert run(["serve", *flags.split()], {}) == 0
    config = ServerConfig(
        log_level="debug",
        drain_timeout=2.5,
        max_body_bytes=2**20,
        api_keys=("one", "two"),
        cors_origins=("https://a.test", "https://b.test"),
        log_prompts=True,
        strict=True,
        tls_cert=cert,
        tls_key=key,
        otlp_endpoint="http://127.0.0.1:4318/v1/traces",
    )
    assert served == [("::1", 0, ("demo",), config, LoadLimits())]


def test_the_log_format_reaches_the_log(engine, served, monkeypatch):
    formats = []
    monkeypatch.setattr("millpond.serve.logs.configure_logging", lambda *settings: formats.append(settings))
    run(["serve", "--log-format", "json", "--log-level", "warning"], {})
    run(["serve"], {})
    assert formats == [("warning", "json"), ("info", "text")]


def test_keys_come_from_the_flags_the_environment_and_a_file_each_once(engine, served, tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of the team\nfile-1\n\n  file-2  \none\n")
    flags = ["--api-key", "one", "--api-key", "two", "--api-key-file", str(path)]
    assert run(["serve", *flags], {"MILLPOND_API_KEYS": "env-1, env-2"}) == 0
    assert served[0][3].api_keys == ("one", "two", "env-1", "env-2", "file-1", "file-2")
    assert run(["serve"], {"MILLPOND_API_KEYS": ""}) == 0
    assert served[1][3].api_keys == ()


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--api-key", ""], {}, "API key 1 of 1 is empty"),
        (["--api-key", "good", "--api-key", "sécret"], {}, "API key 2 of 2 is empty, or not of visible ASCII"),
        ([], {"MILLPOND_API_KEYS": "good,,"}, "API key 2 of 2 is empty"),
        (["--api-key-file", "EMPTY"], {}, "there is no API key in "),
        (["--api-key-file", "/no/such/file"], {}, "cannot read the API keys in /no/such/file: No such file"),
        (["--cors-origin", "a.test"], {}, "a CORS origin is '*' or scheme://host[:port], got 'a.test'"),
        (["--tls-key", "key.pem"], {}, "a TLS key is of no use without its certificate"),
        (["--tls-cert", "/no/such/cert.pem"], {}, "cannot read /no/such/cert.pem: No such file"),
        (["--drain-timeout", "-1"], {}, "--drain-timeout must be at least 0 seconds, got -1.0"),
        (["--drain-timeout", "nan"], {}, "--drain-timeout must be at least 0 seconds, got nan"),
        (["--max-body-bytes", "0"], {}, "--max-body-bytes must be an integer of at least 1, got 0"),
        (["--policy", "lifo"], {}, "--policy must be one of fcfs, priority, fair, got 'lifo'"),
        (
            ["--max-num-seqs", "9", "--max-num-batched-tokens", "8"],
            {},
            "--max-num-batched-tokens (8) must be at least ",
        ),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], {}, "at least --max-num-seqs (9), or some"),
        (["--cache-dir", "DIR", "--no-prefix-cache"], {}, "--cache-dir keeps what the prefix cache has, but --prefix-"),
        (
            ["--cache-dir-size", "4G"],
            {},
            "--cache-dir-size bounds a folder that is not named: name one with --cache-dir",
        ),
        (
            ["--tenant-weight", "key1=2"],
            {},
            "--tenant-weight count with the policy fair, and it is fcfs: set --policy to",
        ),
        (
            [*FAIR, "key1=2"],
            {},
            "--tenant-weight names 'key1', which is nobody without API keys: give some (--api-key)",
        ),
        ([*FAIR, "ann=2"], {}, "--tenant-weight names 'ann', which is nobody: without API keys, who asks is user:NAME"),
        ([*FAIR, "user:=2"], {}, "names 'user:', which is nobody"),
        ([*FAIR, "key3=2", *TWO_KEYS], {}, "names 'key3', which is nobody: who asks is key1 to key2, for there are 2"),
        ([*FAIR, "key0=2", *TWO_KEYS], {}, "names 'key0', which is nobody"),
        ([*FAIR, "user:ann=2", "--api-key", "x"], {}, "names 'user:ann', which is nobody: who asks is key1, for there"),
        (["--otlp-endpoint", "localhost:4318"], {}, "--otlp-endpoint must be an http or https URL"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line_before_the_model_is_loaded(
    engine, served, capsys, tmp_path, arguments, environment, message
):
    (tmp_path / "empty").write_text("# nothing\n")
    paths = {"EMPTY": str(tmp_path / "empty"), "DIR": str(tmp_path)}
    arguments = [paths.get(each, each) for each in arguments]
    assert run(["serve", "--port", "0", *arguments], environment) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "sécret" not in error
    assert engine.opened == served == []


def test_an_unknown_log_format_is_wrong_usage(engine, served, capsys):
    assert run(["serve", "--log-format", "xml"], {}) == 2
    assert "'xml' is not one of text, json" in capsys.readouterr().err


def test_a_key_of_another_certificate_is_one_line_before_the_model_is_loaded(engine, served, capsys, pair, tmp_path):
    cert, _ = pair
    other = certificate_in(tmp_path)[1]
    assert run(["serve", "--port", "0", "--tls-cert", str(cert), "--tls-key", str(other)], {}) == 1
    assert "are no certificate and key of one pair" in capsys.readouterr().err
    assert engine.opened == []


def test_a_locked_key_is_refused_and_asks_nobody_for_a_password(engine, served, capsys, pair, tmp_path):
    cert, key = pair
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        load_pem_private_key(key.read_bytes(), None).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")
        )
    )
    assert run(["serve", "--port", "0", "--tls-cert", str(cert), "--tls-key", str(locked)], {}) == 1
    assert "is locked with a password" in capsys.readouterr().err


def test_traces_without_opentelemetry_are_one_line_that_says_what_to_install(engine, served, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert run(["serve", "--port", "0", "--otlp-endpoint", "http://127.0.0.1:4318"], {}) == 1
    assert "pip install 'millpond[otel]'" in capsys.readouterr().err
    assert engine.opened == []


def test_every_bound_on_the_load_reaches_the_server(engine, served):
    flags = "--max-waiting-requests 5 --max-waiting-tokens 600 --request-timeout 70 --queue-timeout 8 --stuck-after 9"
    assert run(["serve", *flags.split()], {}) == 0
    assert served[0][-1] == LoadLimits(
        max_waiting_requests=5, max_waiting_tokens=600, request_timeout=70.0, queue_timeout=8.0, stuck_after=9.0
    )


def test_a_bound_that_cannot_be_is_refused_before_a_model_is_opened(engine, served, capsys):
    assert run(["serve", "--queue-timeout", "0"], {}) == 1
    assert "--queue-timeout must be a number of seconds above 0, got 0.0" in capsys.readouterr().err
    assert engine.opened == served == []


def test_the_log_level_comes_from_the_environment_where_no_flag_is_given(engine, served):
    run(["serve"], {"MILLPOND_LOG_LEVEL": "error"})
    assert served[0][3].log_level == "error"


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


def test_a_chat_template_reaches_the_engine(engine, served):
    assert run(["serve"], {}) == 0
    assert engine.given_template is None
    assert run(["serve", "--chat-template", "own.jinja"], {}) == 0
    assert engine.given_template == "own.jinja"


def test_what_a_model_cannot_do_is_said_once(engine, served, capsys, monkeypatch):
    monkeypatch.setattr(engine.chat_template, "is_missing", True, raising=False)
    assert run(["serve"], {}) == 0
    assert "no chat template" in capsys.readouterr().err
    engine.limits.generates = False
    assert run(["serve"], {}) == 0
    said = capsys.readouterr().err
    assert "embeddings alone" in said
    assert "no chat template" not in said
