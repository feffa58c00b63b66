from __future__ import annotations

import pytest

from millpond.errors import ConfigError, EngineError
from millpond.lab import bench_prefix
from millpond.lab.bench_prefix import PrefixBench, Turn
from tiny_engine import make_engine


class Paced:
    """A runner whose step takes a second, and one more for each token."""

    def __init__(self, inner):
        self.inner = inner
        self.now = 0.0

    def clock(self):
        return self.now

    def execute(self, output):
        self.now += 1.0 + output.num_tokens
        return self.inner.execute(output)


def bench(**sizes):
    engine = make_engine(wrap=Paced, **sizes)
    return PrefixBench(engine, engine.runner.clock)


def measured(monkeypatch, work, **sizes):
    monkeypatch.setitem(bench_prefix.WORKLOADS, "test", lambda vocab_size, random: work)
    (row,) = bench(**sizes).run(["test"], 2, lambda name: None)
    return row


def test_a_prefix_in_common_is_computed_once(monkeypatch):
    prefix = tuple(range(8))
    row = measured(monkeypatch, [(Turn((*prefix, 20 + index), 2),) for index in range(3)])
    assert (row.prompt_tokens, row.saved_tokens, row.forward_tokens) == (27, 16, 9 + 1 + 1 + 3 - 1 + 2 - 1)
    # Without it a step of 27 and one of 3; with it 9, then 1 and 2 that begin, then 2.
    assert (row.plain_tok_s, row.cached_tok_s) == (6 / 32, 6 / (10 + 4 + 3))
    assert (row.plain_ttft, row.cached_ttft, row.gain) == (28.0, 14.0, 32 / 17)


def test_a_turn_comes_behind_what_was_said_and_pays_for_what_is_new(monkeypatch):
    row = measured(monkeypatch, [(Turn((5, 6, 7, 8), 5), Turn((9, 10), 2))])
    assert row.prompt_tokens == 4 + (4 + 5 + 2)
    assert row.saved_tokens == 8


def test_strangers_save_nothing_and_lose_nothing():
    (row,) = bench(num_blocks=4096, max_num_seqs=64, max_model_len=512, audit=False).run(
        ["strangers"], 1, lambda name: None
    )
    assert (row.saved_tokens, row.gain) == (0, 1.0)


# Full blocks of 4: of all that was said but the token said last; of the 512 in common; of a prompt of 256 but its last.
SAVED = {"chat": 4 * sum((112 * turn - 1) // 4 * 4 for turn in range(1, 6)), "shared": 15 * 512, "children": 7 * 252}


@pytest.mark.parametrize("name", SAVED)
def test_every_workload_saves_what_is_shared(name):
    engine = make_engine(num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=2048, audit=False)
    (row,) = PrefixBench(engine, lambda: float(len(engine.runner.outputs))).run([name], 1, lambda name: None)
    assert row.saved_tokens == SAVED[name]


def test_an_answer_that_changes_ends_the_measurement(monkeypatch):
    monkeypatch.setitem(bench_prefix.WORKLOADS, "test", lambda vocab_size, random: [(Turn((1, 2), 3),)])

    class Moody(Paced):
        def execute(self, output):
            self.inner.script["0-0"] = [int(self.now) % 200] * 3
            return super().execute(output)

    engine = make_engine(wrap=Moody)
    with pytest.raises(EngineError, match="test: an answer with the prefix cache differs"):
        PrefixBench(engine, engine.runner.clock).run(["test"], 1, lambda name: None)


def test_an_unknown_workload_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="no workload is called 'chad'; there are chat, shared, children, strangers"):
        bench().run(["shared", "chad"], 1, lambda name: None)
