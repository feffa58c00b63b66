"""The options that the lab's commands share, and that all of them take them alike."""

from __future__ import annotations

import json

import pytest
import typer

from millpond.cli.app import run
from millpond.cli.traffic import parse_lengths, slo_of
from millpond.core.scheduler import Scheduler
from millpond.errors import ConfigError
from millpond.lab.lengths import Lengths

# Each command that takes a workload, with what makes it small, and the prompts and outputs that it says it had.
COMMANDS = {
    "watermark": ["sweep", "watermark", "--blocks", "64", "--reserves", "0"],
    "batching": ["bench", "batching", "--blocks", "64"],
    "simulate": ["simulate", "--blocks", "64"],
    "config": ["sweep", "config", "--pool-tokens", "512", "--slots", "4", "--budgets", "64", "--rates", "5"],
}
TRACED = [name for name in COMMANDS if name != "batching"]
LENGTHS = ["7", "4,11", "4-16", "lognormal:6:0.5:20"]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("6", Lengths((6,))),
        ("4, 10", Lengths((4, 10))),
        (" 4 - 16 ", Lengths(range(4, 17), drawn=True)),
        ("5-5", Lengths(range(5, 6), drawn=True)),
        ("1048576", Lengths((1048576,))),
        ("lognormal:96:0.6:400", Lengths(range(1, 401), drawn=True, median=96, sigma=0.6)),
        ("lognormal:9:0:9", Lengths(range(1, 10), drawn=True, median=9, sigma=0.0)),
    ],
)
def test_lengths_are_one_number_several_a_range_or_lognormal(text, lengths):
    assert parse_lengths(text) == lengths
    assert parse_lengths(lengths) == lengths


@pytest.mark.parametrize("lengths", [parse_lengths(text) for text in LENGTHS])
def test_what_is_shown_as_the_default_is_what_may_be_typed(lengths):
    assert parse_lengths(str(lengths)) == lengths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a length: say 128, or 4,10 in turn, or 32-256 evenly, or lognormal:MEDIAN:SIGMA:MOST"),
        ("a", "'a' is not a length"),
        ("-4", "is not a length"),
        ("4-", "is not a length"),
        ("4,", "is not a length"),
        ("1-2-3", "is not a length"),
        ("4.5", "is not a length"),
        ("nan", "is not a length"),
        ("lognormal:9:1", "is not a length"),
        ("lognormal:9:-1:20", "is not a length"),
        ("0", "must go upwards, from 1 to at most 1048576 tokens"),
        ("4,0", "from 1"),
        ("0-4", "from 1"),
        ("9-3", "must go upwards"),
        ("lognormal:9:1:5", "must go upwards"),
        ("lognormal:0:1:5", "from 1"),
        ("1048577", "to at most 1048576 tokens"),
        ("1-99999999999999999999", "holds a length above 1048576 tokens"),
        ("9" * 5000, "holds a length above 1048576 tokens"),
        ("lognormal:9:10.5:99", "has a SIGMA above 10"),
    ],
)
def test_other_lengths_are_refused(text, message):
    with pytest.raises(typer.BadParameter, match=message) as caught:
        parse_lengths(text)
    assert len(caught.value.message) < 200


def report(capsys, command, *flags):
    assert run([*COMMANDS[command], "--requests", "6", *flags, "--json"], {}) == 0
    found = json.loads(capsys.readouterr().out)
    if isinstance(found, dict):  # how long it took is another thing in each run
        found.pop("run_seconds", None)
        found.pop("run_requests_s", None)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_every_kind_of_lengths_for_prompts_and_outputs(capsys, command):
    for option, other in (("--prompt-tokens", "--max-tokens"), ("--max-tokens", "--prompt-tokens")):
        found = [report(capsys, command, option, lengths, other, "5") for lengths in LENGTHS]
        assert all(found.count(each) == 1 for each in found)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_seed_alone_decides_what_is_drawn(capsys, command):
    lengths = "--prompt-tokens", "2-9", "--max-tokens", "lognormal:8:0.7:30"
    first, again, other = (report(capsys, command, *lengths, "--seed", seed) for seed in ("0", "0", "1"))
    assert first == again != other


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt-tokens", "many"], "'--prompt-tokens': 'many' is not a length"),
        (["--max-tokens", "0"], "'--max-tokens': '0' must go upwards, from 1"),
        (["--requests", "0"], "'--requests': Input should be greater than or equal to 1"),
        (["--requests", "1000000000000"], "'--requests': Input should be less than or equal to 1000000"),
        (["--requests", "nan"], "'--requests': Input should be a valid integer"),
        (["--seed", "x"], "'--seed': Input should be a valid integer"),
        (["--plot", "a.txt"], "'--plot': a picture is one of .png, .svg, .pdf, got 'a.txt'"),
        (["--plot", "nowhere/a.png"], "'--plot': there is no folder"),
    ],
)
def test_every_command_refuses_the_same_in_one_line(capsys, command, flags, message):
    refused(capsys, [*COMMANDS[command], *flags], message, 2)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_workload_that_would_take_gigabytes_is_refused_at_once(capsys, command):
    flags = ["--requests", "1000000", "--prompt-tokens", "1000000", "--max-tokens", "2"]
    if command == "config":
        flags += ["--rates", "inf"]
    refused(
        capsys, [*COMMANDS[command], *flags, *(["--rate", "inf"] if command == "simulate" else [])], "--requests", 1
    )


def refused(capsys, arguments, message, code):
    assert run(arguments, {}) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "prompt_tokens": 6, "output_tokens": 10}\n' * 8)
    return str(path)


@pytest.mark.parametrize("command", TRACED)
@pytest.mark.parametrize(
    "flags",
    [["--requests", "3"], ["--prompt-tokens", "6"], ["--max-tokens", "10"], ["--seed", "0"]],
)
def test_a_trace_and_a_described_workload_are_refused_together(capsys, command, trace, flags):
    message = f"'--trace': a trace brings its own requests: leave out {flags[0]}"
    refused(capsys, [*COMMANDS[command][:-2], "--trace", trace, *flags], message, 2)


def test_rates_describe_a_workload_too(capsys, trace):
    refused(capsys, ["simulate", "--trace", trace, "--rate", "1", "--burstiness", "2"], "--rate, --burstiness", 2)
    refused(capsys, ["sweep", "config", "--trace", trace, "--rates", "1"], "leave out --rates", 2)


@pytest.mark.parametrize("command", TRACED)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("", "is empty; a trace (--trace) has a line"),
        ("\x00\xff", "line 1 is not a JSON object"),
        ("[" * 100_000, "line 1 is not a JSON object"),
        ('{"arrival": 0}', "line 1: prompt_tokens must be a whole number from 1 to 1048576, got nothing"),
    ],
)
def test_a_damaged_trace_is_refused_by_its_line(capsys, command, tmp_path, content, message):
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    refused(capsys, [*COMMANDS[command][:-2], "--trace", str(path)], message, 1)


@pytest.mark.parametrize("command", TRACED)
def test_a_trace_that_is_no_file_is_refused(capsys, command, tmp_path):
    for path in (tmp_path, "/dev/zero"):
        refused(capsys, [*COMMANDS[command][:-2], "--trace", str(path)], "a folder, a pipe or a device, not a file", 1)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_an_slo_that_nothing_or_everything_would_meet_is_refused(bound):
    for name, bounds in (("--ttft-slo", (bound, None)), ("--itl-slo", (None, bound))):
        with pytest.raises(ConfigError, match=f"{name} must be above 0 seconds and finite"):
            slo_of(*bounds)


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_in_the_middle_of_a_step_ends_it_without_a_word(capsys, command, monkeypatch):
    steps = []

    def schedule(self, prefill_budget=None):
        steps.append(self)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return decide(self)

    decide = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", schedule)
    assert run([*COMMANDS[command], "--requests", "6"], {}) == 130
    assert len(steps) == 5
    assert capsys.readouterr() == ("", "")
