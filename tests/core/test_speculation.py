"""When guesses are tried: the price of a row, what a request has learned, and how it comes back."""

import itertools

import pytest

from helpers import make_request
from millpond.core.speculation import FIXED_ROWS, PROBE_EVERY, PromptLookup, StepLoad


def tokens_for_a_row(load):
    return load.tokens / (FIXED_ROWS + load.rows)


class Player:
    """One request whose output is given; drafts are compared with what comes."""

    def __init__(self, output, *, lookup=None, prompt=(1, 2, 3), num_sampling=1):
        self.output, self.num_sampling = list(output), num_sampling
        self.lookup = lookup or PromptLookup(8)
        self.request = make_request("a", 1, len(self.output))
        self.request.prompt_token_ids = tuple(prompt)
        self.drafts = []

    def step(self):
        """The drafts of one step, and how many were right."""
        position = self.request.num_output_tokens
        load = StepLoad(self.num_sampling, self.num_sampling)
        most = len(self.output) - position - 1
        drafts = self.lookup.draft(self.request, most, load) if most > 0 else ()
        right = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(drafts, self.output[position:], strict=False)
            )
        )
        self.request.output_token_ids += self.output[position : position + right + 1]
        if drafts:
            self.lookup.learn(self.request, len(drafts), right)
        self.drafts.append((position, len(drafts), right))
        return drafts

    def run(self):
        while self.request.num_output_tokens < len(self.output):
            self.step()
        return self


def never_right(num_tokens):
    """A run of two tokens again and again, with something new behind it each time."""
    return list(itertools.chain.from_iterable((1, 2, 1000 + i) for i in range(num_tokens // 3)))


@pytest.mark.parametrize("chance", [0.0, 0.24, 0.26, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("num_sampling", [1, 4, 16, 64])
def test_the_drafts_that_are_taken_make_a_token_cheapest(chance, num_sampling):
    load = StepLoad(num_sampling, num_sampling)
    taken = load.take(chance, 20)
    by_count = []
    for count in range(21):
        expected = sum(chance**i for i in range(1, count + 1))
        by_count.append((num_sampling + expected) / (FIXED_ROWS + num_sampling + count))
    assert tokens_for_a_row(load) == pytest.approx(max(by_count))
    assert by_count[taken] == pytest.approx(max(by_count))


def test_the_more_sequences_a_step_has_the_surer_a_draft_must_be():
    counts = [StepLoad(n, n).take(0.8, 8) for n in (1, 4, 11, 13, 64)]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[2], counts[3]) == (3, 1, 0)


def test_a_text_that_repeats_itself_takes_few_steps():
    player = Player([1, 2, 3, 4, 5, 6] * 20).run()
    assert len(player.drafts) < 120 / 4
    assert max(count for _, count, _ in player.drafts) == 8


def test_drafts_are_no_more_than_there_is_room_for():
    player = Player([1, 2, 3] * 20)
    player.run()
    assert PromptLookup(3).draft(player.request, 50, StepLoad(0, 0)) == (1, 2, 3)
    assert PromptLookup(8).draft(player.request, 2, StepLoad(0, 0)) == (1, 2)


def test_a_text_with_nothing_to_repeat_is_never_guessed_at():
    assert {count for _, count, _ in Player(range(100, 300)).run().drafts} == {0}


def test_guessing_that_fails_stops_and_is_tried_again_once_in_a_while():
    player = Player(never_right(600)).run()
    tried = [position for position, count, _ in player.drafts if count]
    late = [position for position in tried if position > 100]
    assert len(late) > 10
    assert all(after - before >= PROBE_EVERY for before, after in itertools.pairwise(late))
    assert sum(count for _, count, _ in player.drafts) < 600 / 16


def test_a_text_that_begins_to_repeat_itself_late_is_found_out():
    player = Player(never_right(300) + [1, 2, 3, 4] * 100).run()
    assert [right for _, _, right in player.drafts[-10:-1]] == [8] * 9


def test_what_is_guessed_at_alone_is_not_among_64_sequences():
    alone, crowd = (Player([1, 2, 3, 4, 5] * 30, num_sampling=n).run() for n in (1, 64))
    assert sum(count for _, count, _ in alone.drafts) > 100
    assert sum(count for _, count, _ in crowd.drafts) == 0


@pytest.mark.parametrize("num_sampling", [1, 8, 32])
def test_however_many_sequences_there_are_one_step_in_32_has_a_probe(num_sampling):
    lookup = PromptLookup(8)
    players = [Player(never_right(1500), lookup=lookup, num_sampling=num_sampling) for _ in range(num_sampling)]
    for index, player in enumerate(players):
        player.request.request_id = str(index)
    for _ in range(100):
        for player in players:
            player.step()
    num_drafts = 0
    for _ in range(1000):
        num_drafts += sum(len(player.step()) for player in players)
    assert 0 < num_drafts <= 1000 / PROBE_EVERY + num_sampling


def test_a_request_that_has_ended_is_forgotten():
    lookup = PromptLookup(8)
    Player([1, 2, 3] * 5, lookup=lookup).run()
    lookup.forget("a")
    assert Player(range(10, 20), lookup=lookup, prompt=(7, 8)).step() == ()
    lookup.forget("never drafted for")
