from __future__ import annotations

from millpond.lab.workload import all_at_once, w1


def test_the_same_seed_gives_the_same_requests():
    assert w1(1000, seed=3) == w1(1000, seed=3)
    assert w1(1000, seed=3) != w1(1000, seed=4)


def test_w1_is_64_requests_at_once_and_reaches_both_ends_of_its_ranges():
    many = [each for seed in range(40) for each in w1(50, seed)]
    assert len(many) == 40 * 64
    assert {each.arrival for each in many} == {0.0}
    prompts = {len(each.prompt_token_ids) for each in many}
    outputs = {each.max_tokens for each in many}
    assert (min(prompts), max(prompts)) == (32, 256)
    assert (min(outputs), max(outputs)) == (16, 128)


def test_token_ids_stay_inside_the_vocabulary_and_use_all_of_it():
    requests = all_at_once(num_requests=20, prompt_tokens=(50, 50), output_tokens=(1, 1), vocab_size=7, seed=0)
    assert {token_id for each in requests for token_id in each.prompt_token_ids} == set(range(7))
