from __future__ import annotations

import json
import time

import pytest

from helpers import make_scheduler
from millpond.cli import bench_batching
from millpond.cli.app import run
from millpond.config import EngineConfig
from millpond.lab.stepping import ChecksumRunner

BATCHING = ["bench", "batching"]
SMALL = "--requests 5 --prompt-tokens 4,2,3,5,1 --max-tokens 6,2,4,1,3 --slots 2"


def report(capsys, flags):
    assert run([*BATCHING, *flags.split(), "--json"], {}) == 0
    return json.loads(capsys.readouterr().out)


def test_json_is_both_sides_on_standard_output_alone(capsys):
    got = report(capsys, SMALL)
    assert (got["unit"], got["same_tokens"], got["slots"]) == ("step", True, 2)
    assert [(side["steps"], side["issued_tokens"]) for side in (got["static"], got["continuous"])] == [
        (13, 33),
        (9, 26),
    ]
    assert got["workload"][0] == {"prompt_tokens": 4, "output_tokens": 6}
    assert got["static"]["requests"][1]["head_of_line_delay"] == 4


def test_the_table_sets_them_side_by_side(capsys):
    assert run([*BATCHING, *SMALL.split()], {}) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:1] == "│"]
    rows = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.strip("│ ").split("│")] for line in lines)}
    assert rows["steps"] == ["13", "9", "0.69"]
    assert rows["waste"] == ["21.2%", "0.0%", "0.00"]
    assert rows["goodput, tokens/step"] == ["1.23", "1.78", "1.44"]
    assert rows["held, steps"] == ["1.40", "0.00", "0.00"]
    assert rows["inflation"] == ["4.17", "2.70", "0.65"]
    assert "seconds" not in rows


def test_without_flags_lengths_are_spread_out_and_static_batches_lose(capsys):
    got = report(capsys, "")
    lengths = [each["output_tokens"] for each in got["workload"]]
    assert len(lengths) == 24
    assert max(lengths) > 4 * min(lengths)
    assert got["static"]["waste"] > 0.2 > got["continuous"]["waste"] == 0.0
    assert got["static"]["steps"] > got["continuous"]["steps"]


def test_a_pool_that_is_not_sized_holds_every_slot_at_its_longest(capsys):
    assert report(capsys, SMALL)["num_blocks"] == 2 * 1
    assert report(capsys, f"{SMALL} --blocks 9")["num_blocks"] == 9
    assert report(capsys, "")["continuous"]["preemptions"] == 0


def test_every_setting_changes_what_is_run(capsys):
    base = report(capsys, "")
    flags = ("--seed 1", "--slots 4", "--blocks 20", "--requests 9", "--max-num-batched-tokens 9", "--block-size 32")
    for each in flags:
        assert report(capsys, each) != base, each


@pytest.fixture
def opened(engine):
    """The fake engine, with a scheduler and a runner that make tokens."""
    engine.config = EngineConfig()
    engine.scheduler, engine.runner = make_scheduler(num_blocks=64, slots=2), ChecksumRunner()
    return engine


@pytest.mark.parametrize(("threads", "clock"), [(1, time.process_time), (2, time.perf_counter)])
def test_a_model_is_opened_with_the_sizes_and_timed(capsys, opened, monkeypatch, threads, clock):
    opened.config = EngineConfig(threads=threads)
    calls = []
    measure = bench_batching.measure

    def seen(bench, rounds, warm_up):
        calls.append((bench.clock, rounds, warm_up))
        return measure(bench, rounds, warm_up)

    monkeypatch.setattr(bench_batching, "measure", seen)
    got = report(capsys, f"{SMALL} --model m.gguf --rounds 2 --threads {threads} --blocks 40")
    assert calls == [(clock, 2, True)]
    ((model, config),) = opened.opened
    assert (model, config.max_num_seqs, config.num_blocks, config.threads) == ("m.gguf", 2, 40, threads)
    assert (config.watermark_blocks, config.max_num_batched_tokens, config.block_size) == (0, 512, 16)
    assert got["unit"] == "second"
    assert got["static"]["goodput_per_second"] > 0
    assert opened.runner.num_steps == 3 * (13 + 9)  # the warm-up and two rounds


def test_with_a_model_the_table_has_seconds_too(capsys, opened):
    assert run([*BATCHING, *SMALL.split(), "--model", "m.gguf", "--rounds", "1"], {}) == 0
    out = capsys.readouterr().out
    assert "│ seconds " in out
    assert "goodput, tokens/second" in out


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--slots 600", 1, "600 slots (--slots) are more than the 512 tokens of a step (--max-num-batched-tokens)"),
        ("--blocks 3", 1, "that needs 4 blocks of 16 tokens and the pool has 3"),
        ("--block-size 0", 1, "--block-size must be an integer of at least 1, got 0"),
        ("--rounds 0", 2, "'--rounds'"),
        ("--slots 1000000000000", 2, "'--slots'"),
        ("--block-size 1000000000000 --slots 9000000", 2, "'--slots'"),
        (
            "--slots 500 --max-tokens 1000000",
            1,
            "take 31252000 blocks, more than 4194304: say",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, flags, code, message):
    assert run([*BATCHING, *flags.split()], {}) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_timeline_is_written(capsys, tmp_path):
    assert run([*BATCHING, *SMALL.split(), "--plot", str(tmp_path / "a.svg")], {}) == 0
    text = (tmp_path / "a.svg").read_text()
    assert "<!-- no model: 5 requests, 2 slots -->" in text
    assert "<!-- static, 3 batches: 13 steps" in text
