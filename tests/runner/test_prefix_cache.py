"""With the real kernels: what is found in the prefix cache has the bits that computing it again would give."""

import random

import pytest

from millpond.build import open_disk
from millpond.config import EngineConfig
from millpond.core.request import SamplingParams
from tiny_llama import write_tiny_llama
from tiny_runner import TYPES, assert_same_bits, drive, fill_with_leftovers, random_tokens, tiny_runner

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "seeded": SamplingParams(temperature=50.0, top_k=40, repetition_penalty=1.3, presence_penalty=0.5),
}


def random_prompts(seed, count=20):
    """Prompts of up to 90 tokens, the beginnings of most are those of others."""
    rng = random.Random(seed)
    texts = [random_tokens(90, 100 * seed + number) for number in range(2)]
    prompts = {}
    for index in range(count):
        length = rng.randint(1, 90)
        own = random_tokens(90, 1000 * seed + 10 + index)
        num_shared = rng.choice([0, length, rng.randint(0, length)])
        prompts[f"r{index}"] = rng.choice(texts)[:num_shared] + own[: length - num_shared]
    return prompts


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("block_size", [16, 32])
def test_random_workloads_have_the_same_bits_with_the_cache_and_without(tmp_path, types, sampling, block_size):
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, types={"*": "Q4_1"}, head_dim=32)
    runner = tiny_runner(path, block_size=block_size, num_blocks=224 // block_size, **types)
    prompts, hits, resumed, preemptions = random_prompts(block_size), 0, 0, 0
    roomy = {"block_size": block_size, "num_blocks": 224 // block_size, "max_num_seqs": 1, "sampling": sampling}
    fill_with_leftovers(runner)
    expected, _ = drive(runner, prompts, **roomy)
    for budget in (23, 64):
        fill_with_leftovers(runner)
        tight = roomy | {"max_num_seqs": 6, "max_num_batched_tokens": budget, "prefix_cache": True}
        answers, scheduler = drive(runner, prompts, **tight)
        for request_id in prompts:
            assert_same_bits(answers[request_id], expected[request_id])
        hits += scheduler.counters.hit_tokens
        resumed += scheduler.counters.resumed_hit_tokens
        preemptions += scheduler.counters.preemptions
    assert hits >= 4 * block_size
    assert preemptions > 0
    assert resumed > 0


def test_children_share_the_blocks_of_their_prompt_and_each_has_its_own_answer(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, types={"*": "Q4_1"}, head_dim=32)
    runner = tiny_runner(path)
    prompt = random_tokens(40)
    children = {f"r{index}": prompt for index in range(6)}
    sampling = SAMPLINGS["seeded"]
    expected, _ = drive(runner, children, max_num_seqs=1, sampling=sampling)
    answers, scheduler = drive(runner, children, sampling=sampling, prefix_cache=True)
    for request_id in children:
        assert_same_bits(answers[request_id], expected[request_id])
    assert len({tuple(answer.token_ids) for answer in answers.values()}) > 3
    # The prompt once, and of each other child the 8 tokens of the block that is not full.
    assert scheduler.counters.forward_tokens == 40 + 5 * 8 + 6 * 11
    assert scheduler.counters.iterations == 1 + 12 + 1


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("block_size", [16, 32])
def test_what_is_loaded_from_disk_after_a_restart_has_the_same_bits(tmp_path, types, block_size):
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, types={"*": "Q4_1"}, head_dim=32)
    sizes = {"block_size": block_size, "num_blocks": 224 // block_size}
    prompts = random_prompts(block_size, 8)
    expected, _ = drive(tiny_runner(path, **sizes, **types), prompts, **sizes, sampling=SAMPLINGS["seeded"])
    loaded = []
    for _ in range(2):
        runner = tiny_runner(path, **sizes, **types)
        fill_with_leftovers(runner)
        config = EngineConfig(**sizes, **types)
        disk = open_disk(tmp_path / "prefixes", (path,), config, runner)
        settings = {"sampling": SAMPLINGS["seeded"], "prefix_cache": True, "disk": disk}
        answers, scheduler = drive(runner, prompts, **sizes, **settings)
        disk.close()
        for request_id in prompts:
            assert_same_bits(answers[request_id], expected[request_id])
        loaded.append(scheduler.counters.disk_hit_tokens)
    assert loaded[1] >= loaded[0] + 4 * block_size
