"""The demo model held to the golden values of transformers: every position exact in float32, the fast path bounded."""

import numpy as np
import pytest

from millpond.kernels.isa import runnable
from reference import golden
from tiny_runner import TYPES, drive

# The fast path against the same weights in float32, over the whole text. Measured: 0.9645, 0.00255, 0.0117, 1.0018 with
# AVX512, 0.9585, 0.00263, 0.0113, 1.0034 with AMX: what is rounded otherwise moves the first and the last by as much.
MIN_TOP1_AGREEMENT = 0.955
MAX_KL_MEAN = 0.0030
MAX_KL_P99 = 0.014
MAX_PERPLEXITY_RATIO = 1.005
# The same with 8-bit keys and values. Measured: 0.9550, 0.00277, 0.0116, 1.0024.
INT8_KV_MIN_TOP1_AGREEMENT = 0.950
INT8_KV_MAX_KL_MEAN = 0.0033
INT8_KV_MAX_KL_P99 = 0.014
INT8_KV_MAX_PERPLEXITY_RATIO = 1.005

PROMPTS = {prompt.name: prompt for prompt in golden.load_prompts()}

every_prompt = pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)


@every_prompt
def test_in_float32_the_logits_of_every_position_are_the_reference(demo_runner, prompt):
    logits = demo_runner("float32").logits(prompt.token_ids.tolist())
    assert golden.compare_logits(prompt, logits) < golden.MAX_LOGIT_ERROR, golden.worst_positions(prompt, logits)


@pytest.mark.parametrize("budget", [512, 40])
def test_in_float32_the_greedy_text_of_all_prompts_in_one_batch_is_the_reference(demo_runner, budget):
    prompts = {name: prompt.token_ids.tolist() for name, prompt in PROMPTS.items()}
    sizes = {"max_num_batched_tokens": budget, "num_blocks": 128}
    answers, _ = drive(demo_runner("float32"), prompts, max_tokens=64, **sizes)
    for name, prompt in PROMPTS.items():
        assert answers[name].token_ids == prompt.greedy_token_ids.tolist(), name


@pytest.mark.slow
def test_the_fast_path_stays_close_to_the_reference_over_the_text(demo_runner):
    text = golden.load_text()
    measured = golden.quality(text, demo_runner("auto").logits(text.token_ids.tolist()))
    print(measured)
    assert measured.top1_agreement >= MIN_TOP1_AGREEMENT, measured
    assert measured.kl_mean <= MAX_KL_MEAN, measured
    assert measured.kl_p99 <= MAX_KL_P99, measured
    assert measured.perplexity_ratio <= MAX_PERPLEXITY_RATIO, measured


@pytest.mark.slow
def test_with_8_bit_keys_and_values_the_fast_path_stays_close_to_the_reference_over_the_text(demo_runner):
    text = golden.load_text()
    measured = golden.quality(text, demo_runner("auto", kv_dtype="int8").logits(text.token_ids.tolist()))
    print(measured)
    assert measured.top1_agreement >= INT8_KV_MIN_TOP1_AGREEMENT, measured
    assert measured.kl_mean <= INT8_KV_MAX_KL_MEAN, measured
    assert measured.kl_p99 <= INT8_KV_MAX_KL_P99, measured
    assert measured.perplexity_ratio <= INT8_KV_MAX_PERPLEXITY_RATIO, measured


def test_the_portable_kernels_give_the_float32_logits_of_the_others_bit_for_bit(demo_runner):
    tokens = PROMPTS["chat"].token_ids.tolist()
    portable, other = (demo_runner("float32", isa).logits(tokens) for isa in ("portable", "auto"))
    np.testing.assert_array_equal(portable, other)


def test_the_portable_kernels_stay_as_close_to_the_reference_as_the_others(demo_runner):
    text = golden.load_text().first(256)
    best = next(isa for isa in runnable() if isa != "amx")
    portable, other = (
        golden.quality(text, demo_runner("auto", isa).logits(text.token_ids.tolist())) for isa in ("portable", best)
    )
    assert portable.kl_mean <= 1.1 * other.kl_mean + 1e-5, (portable, other)


@pytest.mark.skipif("amx" not in runnable(), reason="this processor has no AMX, or may not use it")
def test_amx_which_rounds_no_row_to_8_bits_stays_closer_to_the_reference(demo_runner):
    text = golden.load_text().first(256)
    amx, other = (
        golden.quality(text, demo_runner("auto", isa).logits(text.token_ids.tolist())) for isa in ("amx", "avx512")
    )
    assert amx.kl_mean < 0.5 * other.kl_mean, (amx, other)  # measured: 0.00083 and 0.0027


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_chunks_of_any_size_give_the_same_bits(demo_runner, types):
    runner, tokens = demo_runner(**{"dtype": "auto", **types}), PROMPTS["chat"].token_ids.tolist()
    whole = runner.logits(tokens)
    for chunk in (1, 7, 16):
        np.testing.assert_array_equal(runner.logits(tokens, chunk), whole)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_requests_in_a_crowd_that_is_preempted_get_the_bits_that_they_get_alone(demo_runner, kv_dtype):
    runner = demo_runner("auto", kv_dtype=kv_dtype)
    prompts = {name: prompt.token_ids.tolist()[:60] for name, prompt in PROMPTS.items()}
    crowd, scheduler = drive(runner, prompts, max_tokens=30, num_blocks=15, max_num_batched_tokens=33)
    assert scheduler.counters.preemptions > 0
    for name, prompt in prompts.items():
        alone, _ = drive(runner, {name: prompt}, max_tokens=30)
        assert crowd[name].token_ids == alone[name].token_ids
        np.testing.assert_array_equal(crowd[name].logits, alone[name].logits)
