"""The numbers that the scheduler must reproduce to the digit, with no model."""

import pytest

from helpers import Loop, expected_output, make_request, make_scheduler


def drained(*, requests, max_tokens, slots, num_blocks, reserve):
    loop = Loop(make_scheduler(num_blocks=num_blocks, slots=slots, reserve=reserve))
    loop.add(*(make_request(f"r{index}", 6, max_tokens) for index in range(requests)))
    assert loop.run() == loop.scheduler.counters.iterations
    return loop


@pytest.mark.parametrize(
    ("reserve", "evictions", "thrashed", "iterations", "recomputed", "forward", "share"),
    [
        (0, 4, 4, 38, 36, 152, "23.7 %"),
        (1, 3, 3, 41, 27, 144, "18.8 %"),
        (2, 1, 1, 41, 9, 128, "7.0 %"),
        (3, 0, 0, 41, 0, 120, "0.0 %"),
    ],
)
def test_the_table_of_reserves(reserve, evictions, thrashed, iterations, recomputed, forward, share):
    loop = drained(requests=8, max_tokens=10, slots=3, num_blocks=8, reserve=reserve)
    counters = loop.scheduler.counters
    assert (counters.preemptions, counters.thrashed_admissions, counters.iterations) == (
        evictions,
        thrashed,
        iterations,
    )
    assert (counters.recomputed_tokens, counters.forward_tokens) == (recomputed, forward)
    assert f"{100 * counters.recompute_share:.1f} %" == share
    assert counters.admissions == 8 + evictions


def test_every_victim_of_the_table_leaves_three_steps_after_its_admission_with_three_tokens():
    loop = drained(requests=8, max_tokens=10, slots=3, num_blocks=8, reserve=0)
    admitted_at = {}
    victims = []
    for output in loop.outputs:
        victims += [output.step - admitted_at[victim] for victim in output.preempted]
        admitted_at |= dict.fromkeys(output.admitted, output.step)
    assert victims == [3, 3, 3, 3]
    resumed = [admission for _, _, admission in loop.runner.admissions if admission.output_token_ids]
    assert [len(admission.output_token_ids) for admission in resumed] == [3, 3, 3, 3]


def test_the_counter_case_where_a_reserve_only_costs():
    without = drained(requests=8, max_tokens=19, slots=6, num_blocks=16, reserve=0).scheduler.counters
    with_reserve = drained(requests=8, max_tokens=19, slots=6, num_blocks=16, reserve=3).scheduler.counters
    assert (without.preemptions, with_reserve.preemptions) == (5, 5)
    assert with_reserve.iterations - without.iterations == 4


@pytest.mark.parametrize("reserve", [1, 2, 3, 16])
def test_on_a_roomy_pool_a_reserve_changes_nothing(reserve):
    without = drained(requests=8, max_tokens=10, slots=3, num_blocks=64, reserve=0)
    with_reserve = drained(requests=8, max_tokens=10, slots=3, num_blocks=64, reserve=reserve)
    assert with_reserve.outputs == without.outputs
    assert without.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("reserve", range(8))
def test_no_reserve_changes_an_answer(reserve):
    loop = drained(requests=8, max_tokens=10, slots=3, num_blocks=8, reserve=reserve)
    answers = {update.request.request_id: update.request for update in loop.updates}
    assert len(answers) == 8
    for request in answers.values():
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 10)
