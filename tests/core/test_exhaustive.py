"""Every reachable state of very small pools, and faults in drafting that a search through them must find.

The explorer is the lab's (tests/lab/test_explorer.py, tests/lab/test_proof.py); here it is let loose on the scheduler.
"""

import pytest

from millpond.core.scheduler import Scheduler
from millpond.lab.explorer import Explorer
from millpond.lab.world import Case, ChosenDrafts, right_token

CASES = [
    Case(3, 1, 2, 0, None, 3),
    Case(3, 1, 2, 2, None, 3),
    Case(2, 2, 3, 1, None, 3),
    Case(4, 1, 2, 1, 2, 2),
    Case(4, 1, 2, 3, None, 2),
    Case(3, 2, 2, 1, 2, 2),
    Case(2, 2, 2, 0, 1, 3),
]
DRAFT_CASES = [
    Case(4, 1, 2, 1, None, 2, most_drafts=3),
    Case(2, 2, 2, 0, 3, 2, most_drafts=2),
    Case(2, 1, 3, 1, None, 3, most_drafts=1),
]


CACHE_CASES = [
    Case(2, 1, 2, 1, None, 3, prefix_cache=True),
    Case(3, 1, 1, 0, 2, 2, prefix_cache=True),
    Case(2, 2, 2, 0, 3, 2, prefix_cache=True),
    Case(2, 1, 2, 0, None, 2, most_drafts=1, prefix_cache=True),
]


POLICY_CASES = [
    Case(2, 1, 2, 1, 2, 2, policy="priority"),
    Case(3, 1, 2, 0, 2, 2, policy="priority"),
    Case(2, 2, 2, 1, 3, 2, policy="priority"),
    Case(2, 1, 2, 0, None, 2, most_drafts=1, policy="priority"),
    Case(2, 1, 2, 0, None, 2, prefix_cache=True, policy="priority"),
    Case(2, 1, 2, 0, None, 2, policy="fair"),
    Case(2, 1, 2, 1, 1, 2, policy="fair"),
    Case(2, 1, 2, 0, None, 2, most_drafts=1, policy="fair"),
]


@pytest.mark.parametrize("case", [*CASES, *DRAFT_CASES, *CACHE_CASES, *POLICY_CASES], ids=str)
def test_every_reachable_state_keeps_the_invariants_and_drains(case):
    explored = Explorer([case]).run()
    assert explored.finding is None
    assert explored.num_states >= 150
    assert explored.longest_drain <= case.most_unfinished * case.num_blocks * case.block_size + 1


@pytest.mark.parametrize("budget", [None, 1, 2])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(3, 1), (1, 3), (2, 2)])
def test_one_after_the_other_takes_a_step_for_every_position_and_one_to_release(num_blocks, block_size, budget):
    explored = Explorer([Case(num_blocks, block_size, 1, 0, budget, 2)]).run()
    assert explored.longest_drain == 2 * num_blocks * block_size + 1


class WrongGuessesCountedAsComputed(Scheduler):
    def _take_in(self, request, token_ids):
        num_drafts = len(request.draft_token_ids)
        taken = super()._take_in(request, token_ids)
        request.num_computed_tokens += num_drafts - (len(taken) - 1 if num_drafts else 0)
        return taken


class BlocksOfWrongGuessesKept(Scheduler):
    def _trim(self, request):
        pass


@pytest.mark.parametrize(
    ("kind", "finding"), [(WrongGuessesCountedAsComputed, "INV-[36]"), (BlocksOfWrongGuessesKept, "INV-3")]
)
def test_a_fault_in_drafting_is_found_in_two_steps(kind, finding):
    found = Explorer(DRAFT_CASES, kind).run().finding
    assert [action.verb for action in found.trace] == ["add", "schedule", "update"]
    with pytest.raises(AssertionError, match=finding):
        raise AssertionError(found.message)


class WrongGuessesPublished(Scheduler):
    def _take_in(self, request, token_ids):
        num_computed = request.num_computed_tokens
        request.num_computed_tokens += len(request.draft_token_ids)
        request.output_token_ids += request.draft_token_ids
        if self.cache is not None and request.num_computed_tokens >= request.publish_at:
            self._publish(request)
        del request.output_token_ids[len(request.output_token_ids) - len(request.draft_token_ids) :]
        request.num_computed_tokens = num_computed
        return super()._take_in(request, token_ids)


def test_a_wrong_guess_that_can_be_found_is_found_in_two_steps():
    case = Case(3, 1, 1, 0, None, 1, most_drafts=2, prefix_cache=True)
    found = Explorer([case], WrongGuessesPublished).run().finding
    assert [action.verb for action in found.trace] == ["add", "schedule", "update"]
    assert found.message.startswith("INV-10")


def test_guesses_beyond_max_tokens_are_found(monkeypatch):
    def draft(self, request, most, load):
        return tuple(right_token(request.arrival, request.num_tokens + index) for index in range(next(self.counts, 0)))

    monkeypatch.setattr(ChosenDrafts, "draft", draft)
    found = Explorer(DRAFT_CASES).run().finding
    assert found.message.startswith(("INV-3", "INV-6"))
