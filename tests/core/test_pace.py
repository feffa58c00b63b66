from __future__ import annotations

import random

import pytest

from helpers import Loop, ScriptedDrafter, ScriptedRunner, expected_output, make_loop, make_request, make_scheduler
from millpond.core.invariants import check_same_decisions
from millpond.core.pace import FIRST_TOKENS, StepPrices
from reference_scheduler import Lockstep


def machine(rows, tokens):
    """Seconds of a step: 1 ms for a row and for each of three more, 0.5 ms for a token of a prompt."""
    return 0.001 * (3 + rows if rows else 0) + 0.0005 * tokens


def paced(prices, rows, steps, target=0.020):
    """The budgets of steps on that machine, each spent to the last token."""
    budgets = []
    for _ in range(steps):
        budgets.append(prices.prefill_budget(rows, target))
        prices.note(rows, budgets[-1], machine(rows, budgets[-1]))
    return budgets


def test_a_step_with_prompts_comes_to_take_what_the_target_is():
    prices = StepPrices()
    prices.note(4, 0, machine(4, 0))
    assert paced(prices, 4, 1) == [FIRST_TOKENS]
    assert machine(4, paced(prices, 4, 1)[0]) == pytest.approx(0.020, rel=0.03)


def test_more_rows_leave_less_for_prompts():
    prices = StepPrices()
    prices.note(4, 0, machine(4, 0))
    prices.note(4, 10, machine(4, 10))
    assert [prices.prefill_budget(rows, 0.020) for rows in (1, 4, 8)] == [32, 26, 18]


def test_a_target_that_decoding_alone_exceeds_leaves_prompts_half_of_that_and_at_least_a_token():
    prices = StepPrices()
    prices.note(97, 0, machine(97, 0))
    prices.note(97, 10, machine(97, 10))
    assert prices.prefill_budget(97, 0.001) in (99, 100)
    prices.note(97, 1, 100.0)
    assert prices.prefill_budget(97, 0.001) == 1


def test_where_nobody_decodes_there_is_no_bound():
    prices = StepPrices()
    assert prices.prefill_budget(0, 0.001) is None
    prices.note(0, 100, 0.05)
    assert prices.prefill_budget(0, 0.001) is None
    assert prices.prefill_budget(1, 0.001) == 2  # what a prompt alone has cost is what it costs beside others


def test_a_prompt_that_grows_dearer_gets_fewer_tokens_a_step():
    prices = StepPrices()
    prices.note(4, 0, machine(4, 0))
    before = paced(prices, 4, 10)[-1]
    for _ in range(20):
        tokens = prices.prefill_budget(4, 0.020)
        prices.note(4, tokens, machine(4, 3 * tokens))
    assert prices.prefill_budget(4, 0.020) == pytest.approx(before / 3, rel=0.1)


def test_a_step_that_was_faster_than_one_without_prompts_makes_them_cheap():
    prices = StepPrices()
    prices.note(4, 0, 0.007)
    prices.note(4, 10, 0.006)
    assert prices.prefill_budget(4, 0.020) > 1000


def test_a_step_without_rows_or_tokens_says_nothing():
    prices = StepPrices()
    prices.note(0, 0, 5.0)
    assert prices.prefill_budget(1, 0.020) == FIRST_TOKENS


class TestTheSchedulersBudget:
    def test_running_requests_have_a_token_each_and_prompts_the_budget(self):
        loop = make_loop(make_request("a", 4), make_request("b", 4), num_blocks=30, slots=3)
        loop.step()
        loop.add(make_request("c", 20))
        shares = [[len(each.token_ids) for each in loop.step(7).scheduled] for _ in range(4)]
        # Once c runs it has its token like the others, and the budget on top.
        assert shares == [[1, 1, 7], [1, 1, 8], [1, 1, 5], [1, 1, 1]]

    @pytest.mark.parametrize("budget", [0, 1])
    def test_the_oldest_goes_on_and_so_does_a_prompt_however_small_the_budget(self, budget):
        loop = make_loop(make_request("a", 4, 50), num_blocks=30, slots=3)
        loop.step()
        loop.add(make_request("b", 5))
        assert [[len(each.token_ids) for each in loop.step(budget).scheduled] for _ in range(4)] == [
            [1, 1],
            [1, 2],
            [1, 2],
            [1, 1],
        ]

    def test_a_budget_never_exceeds_the_tokens_of_a_step(self):
        loop = make_loop(make_request("a", 20), num_blocks=30, budget=6)
        assert loop.step(1000).num_tokens == 6

    def test_without_a_budget_nothing_changes(self):
        loop = make_loop(make_request("a", 20), num_blocks=30)
        assert loop.step(None).num_tokens == 20


def soak(seed, drafts=False):
    """Sixty requests over a tiny pool, every step with another budget; each must have the answer that it has alone."""
    rng = random.Random(seed)
    num_blocks, block_size = rng.randint(3, 9), rng.randint(1, 5)
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "slots": rng.randint(2, 6)}
    drafter = ScriptedDrafter() if drafts else None
    scheduler = make_scheduler(**sizes, budget=rng.choice([None, 1, 3, 16]), reserve=rng.randrange(3), drafter=drafter)
    loop = (Loop if drafts else Lockstep)(scheduler, ScriptedRunner(block_size=block_size))
    requests, bound = [], 0
    for index in range(60):
        length = rng.randint(1, min(num_blocks * block_size, 12))
        max_tokens = rng.randint(1, min(12, scheduler.door.max_tokens_that_fit(length)))
        requests.append(make_request(f"r{index}", length, max_tokens))
        loop.add(requests[-1])
        bound += length + max_tokens
    taken = 0
    while scheduler.has_work:
        loop.step(rng.choice([None, 1, 1, 2, 5, 30]))
        taken += 1
        assert taken <= bound + 1, "the oldest request did not go on in every step"
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, request.max_tokens)
    assert scheduler.pool.num_free == num_blocks
    return loop


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_whatever_the_budgets_are_every_answer_is_the_one_it_would_be_alone(seed, drafts):
    soak(seed, drafts)


def test_the_same_budgets_give_the_same_decisions():
    check_same_decisions(soak(3).outputs, soak(3).outputs)


def test_the_soak_chunks_and_preempts():
    loops = [soak(seed) for seed in range(15)]
    assert sum(loop.scheduler.counters.preemptions for loop in loops) > 50
    assert sum(not each.samples for loop in loops for output in loop.outputs for each in output.scheduled) > 300
