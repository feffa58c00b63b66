import pytest

from bench.peers.workers import loop


class Scripted:
    """An engine whose prompts each need some steps before they decode; a step gives each decoding request a token."""

    def __init__(self, steps_to_prefill=lambda index: index):
        self.settings = {}
        self.waits, self.left, self.steps_to_prefill, self.num_steps = [], [], steps_to_prefill, 0

    def add(self, prompt, max_tokens):
        self.waits.append(self.steps_to_prefill(len(self.waits)))
        self.left.append(max_tokens)

    def step(self):
        self.num_steps += 1
        given = 0
        for index, wait in enumerate(self.waits):
            if wait:
                self.waits[index] -= 1
            elif self.left[index]:
                self.left[index] -= 1
                given += 1
        return given

    def unfinished(self):
        return any(self.left)

    def abort_all(self):
        self.left = []


def test_decode_counts_only_steps_in_which_every_sequence_got_a_token():
    engine = Scripted()
    assert loop.decode(engine, [[1]] * 4, 10)["tokens"] == 40
    # Three steps in which the last ones still prefill, one that is not counted, ten that are.
    assert engine.num_steps == 3 + 1 + 10


def test_after_decode_nothing_is_left_running():
    engine = Scripted()
    loop.decode(engine, [[1]] * 4, 10)
    assert not engine.unfinished()


def test_decode_says_so_where_not_all_the_sequences_ever_decode_together():
    with pytest.raises(loop.MeasurementError, match="only 0 of 10 steps gave all 2"):
        loop.decode(Scripted(lambda index: 60 * index), [[1]] * 2, 10)


def test_decode_says_so_where_a_sequence_falls_out_on_the_way():
    engine = Scripted(lambda index: 0)
    whole = engine.step
    engine.step = lambda: whole() - (engine.num_steps == 5)
    with pytest.raises(loop.MeasurementError, match="gave 1 tokens to 2 sequences"):
        loop.decode(engine, [[1]] * 2, 10)


def test_a_batch_counts_every_output_token():
    assert loop.batch(Scripted(), [([1], 3), ([1, 2], 5)])["tokens"] == 8


def test_a_batch_that_ends_early_is_no_measurement():
    engine = Scripted()
    engine.unfinished = lambda: engine.num_steps < 2
    with pytest.raises(loop.MeasurementError, match="where 9 were asked for"):
        loop.batch(engine, [([1], 9)])


def test_an_unknown_command_is_named():
    with pytest.raises(loop.MeasurementError, match="'dance'"):
        loop.answer(Scripted(), {"op": "dance"})
