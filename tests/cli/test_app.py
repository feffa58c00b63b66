from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial

import pytest
import typer.main
from typer.testing import CliRunner

import millpond.cli
from millpond.cli import loading
from millpond.cli.app import make_app, run
from millpond.errors import ConfigError, ModelFileError

whole_command = cache(partial(typer.main.get_command, make_app()))


def commands(command=None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every command: ("serve",), ("bench", "engine"), ..."""
    command = command or whole_command()
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))
    if path and not getattr(command, "commands", None):
        yield path


def test_a_command_imports_no_other_command():
    code = "import sys; from millpond.cli.app import app_for; app_for(['doctor', '--json']); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "millpond.cli.doctor" in found
    assert not {"millpond.cli.serve", "millpond.cli.sweep", "millpond.cli.bench"}.intersection(found)


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_every_help_page_says_what_the_command_does_and_shows_examples(path):
    result = CliRunner().invoke(make_app(), [*path, "--help"])
    assert result.exit_code == 0
    help_text, _, examples = result.output.partition("Examples:\n")
    assert f"millpond {' '.join(path)}" in examples
    assert len(help_text.split("Options:")[0].splitlines()) > 2, "no line says what it does"


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_a_group_alone_prints_its_help_and_is_no_error(arguments, capsys):
    assert run(arguments, {}) == 0
    assert "Commands:" in capsys.readouterr().out


def fail_with(monkeypatch, error):
    def open_engine(model, config, settings, chat_template=None, compiler=None):
        raise error

    monkeypatch.setattr(loading, "open_engine", open_engine)


@pytest.mark.parametrize("error", [ModelFileError("broken:\n  at byte 7"), OSError("broken: at byte 7")])
def test_an_error_is_one_line_on_standard_error_and_exit_code_1(monkeypatch, capsys, error):
    fail_with(monkeypatch, error)
    assert run(["generate", "x"], {}) == 1
    assert capsys.readouterr() == ("", "error: broken: at byte 7\n")


def test_memory_that_cannot_be_had_is_one_line_that_says_so(monkeypatch, capsys):
    fail_with(monkeypatch, MemoryError("Unable to allocate 499. TiB"))
    assert run(["generate", "x"], {}) == 1
    assert capsys.readouterr().err == "error: not enough memory: Unable to allocate 499. TiB\n"


def test_debug_shows_the_traceback_before_the_line(monkeypatch, capsys):
    fail_with(monkeypatch, ConfigError("no"))
    assert run(["--debug", "generate", "x"], {}) == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.endswith("error: no\n")


def test_a_bug_is_not_dressed_up_as_an_error(monkeypatch):
    fail_with(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        run(["generate", "x"], {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serf"], "No such command 'serf'"),
        (["serve", "--prot", "1"], "No such option: --prot"),
        (["serve", "--port", "99999"], "99999"),
        (["serve", "--kv-memory", "lots"], "'lots' is not an amount of memory (say 512M or 2G)"),
        (["bench", "engine", "--decode", "x"], "'x' is not a list of numbers"),
        (["pull"], "MODEL"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert run(arguments, {}) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_a_setting_that_cannot_work_is_exit_code_1_and_names_the_value(capsys):
    assert run(["generate", "x", "--dtype", "float8"], {}) == 1
    assert capsys.readouterr().err == "error: --dtype must be one of auto, float32, got 'float8'\n"


def options_of(path: tuple[str, ...]) -> set[str]:
    command = whole_command()
    for name in path:
        command = command.commands[name]
    return {option for parameter in command.params for option in parameter.opts}


def test_keys_and_values_have_a_type_to_choose_wherever_the_weights_have_one():
    offered = {" ".join(path): options_of(path) for path in commands()}
    assert {name for name, options in offered.items() if "--kv-dtype" in options} == {
        name for name, options in offered.items() if "--dtype" in options
    }
    assert "--kv-dtype" in offered["serve"]


def test_a_checkpoint_can_be_quantised_wherever_one_is_loaded():
    offered = {" ".join(path): options_of(path) for path in commands()}
    loads = {name for name, options in offered.items() if "--kv-dtype" in options} - {"doctor"}
    assert {name for name, options in offered.items() if "--quantize" in options} == loads


@pytest.mark.parametrize(
    "command",
    ["serve", "generate x", "chat", "bench engine", "bench overhead", "bench prefix", f"eval perplexity {__file__}"],
)
def test_how_to_quantise_reaches_every_engine(monkeypatch, command):
    opened = []

    def open_engine(model, config, settings, chat_template=None, compiler=None):
        opened.append(config.quantize)
        raise ConfigError("enough")

    monkeypatch.setattr(loading, "open_engine", open_engine)
    assert run([*command.split(), "--quantize", "q4"], {}) == 1
    assert opened == ["q4"]


@pytest.mark.parametrize(
    "command", ["serve", "generate x", "chat", "bench engine", "bench overhead", "bench speculative"]
)
def test_the_type_of_keys_and_values_reaches_every_engine(monkeypatch, command):
    opened = []

    def open_engine(model, config, settings, chat_template=None, compiler=None):
        opened.append(config.kv_dtype)
        raise ConfigError("enough")

    monkeypatch.setattr(loading, "open_engine", open_engine)
    assert run([*command.split(), "--kv-dtype", "int8"], {}) == 1
    assert opened == ["int8"]


def test_a_type_of_keys_and_values_that_is_not_known_or_does_not_fit_is_one_line(capsys):
    assert run(["generate", "x", "--kv-dtype", "fp8"], {}) == 1
    assert capsys.readouterr().err == "error: --kv-dtype must be one of auto, int8, got 'fp8'\n"
    assert run(["generate", "x", "--kv-dtype", "int8", "--dtype", "float32"], {}) == 1
    assert capsys.readouterr().err.startswith("error: --kv-dtype int8 would round what dtype float32 keeps exact")


def test_a_wrong_environment_is_an_error_of_one_line(capsys):
    assert run(["version"], {"MILLPOND_LOG_LEVEL": "loud"}) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_version_prints_the_versions_of_what_computes(capsys):
    assert run(["version"], {}) == 0
    out = capsys.readouterr().out
    assert out.startswith("millpond 0.")
    assert "numba 0." in out
    assert run(["--version"], {}) == 0
    assert capsys.readouterr().out == out


def test_the_command_exits_with_the_code_that_run_gives():
    done = subprocess.run([sys.executable, "-m", "millpond.cli", "serv"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: No such command 'serv'. Did you mean 'serve'?\n"


def test_ctrl_c_exits_with_130_and_no_traceback():
    code = """
import sys, threading
from millpond.cli import main
class Stdin:
    def read(self):
        print("reading", flush=True)
        threading.Event().wait()
sys.stdin, sys.argv = Stdin(), ["millpond", "generate"]
main()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert error == ""


def in_a_shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The command `millpond` as "$@" of a shell, whatever the streams it is given."""
    arguments = ["sh", "-c", command, "sh", sys.executable, "-m", "millpond.cli"]
    return subprocess.run(arguments, capture_output=True, timeout=60, env={**os.environ, **environment})


@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_one_that_nobody_reads_and_that_holds_nothing(streams):
    done = in_a_shell(f'"$@" generate --model /no-such-model {streams}')
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert in_a_shell(f'"$@" version {streams}').returncode == 0


def test_writing_to_a_closed_output_is_no_error():
    code = "import sys; from millpond.cli import _prepare_streams; _prepare_streams(); sys.stdout.write('x')"
    assert subprocess.run(["sh", "-c", '"$0" -c "$1" >&-', sys.executable, code], timeout=60).returncode == 0


def test_a_prompt_that_is_not_utf_8_reaches_the_tokenizer_that_refuses_it(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", "strict"))
    millpond.cli._prepare_streams()
    assert sys.stdin.read() == "caf\udce9"


def test_text_that_the_terminal_cannot_show_is_shown_by_its_code(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, "ascii", "strict"))
    millpond.cli._prepare_streams()
    print("caf\u00e9 \u7684", flush=True)
    assert shown.getvalue() == b"caf\\xe9 \\u7684\n"
