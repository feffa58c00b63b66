"""What the golden files hold, and that the measures against them notice what they should."""

from __future__ import annotations

import numpy as np
import pytest

from reference import golden
from reference.golden import PromptGolden

VOCAB = 500
POSITIONS = 70  # more than one block of rows


@pytest.fixture
def logits():
    return (4 * np.random.default_rng(1).standard_normal((POSITIONS, VOCAB))).astype(np.float32)


@pytest.fixture
def token_ids():
    return np.random.default_rng(2).integers(0, VOCAB, POSITIONS).astype(np.int32)


def prompt_of(token_ids, logits) -> PromptGolden:
    greedy = {"greedy_token_ids": token_ids[:4], "greedy_margins": np.ones(4, np.float32)}
    return PromptGolden(name="made-up", token_ids=token_ids, **greedy, **golden.fingerprint(logits))


def softmax(logits):
    exponentials = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def test_logits_agree_with_their_own_fingerprint(token_ids, logits):
    assert golden.compare_logits(prompt_of(token_ids, logits), logits) < 1e-6


@pytest.mark.parametrize("position", [0, 33, POSITIONS - 1])
def test_a_shift_of_two_ten_thousandths_at_any_one_position_is_seen(token_ids, logits, position):
    reference = prompt_of(token_ids, logits)
    logits[position] += 2e-4
    assert golden.compare_logits(reference, logits) > golden.MAX_LOGIT_ERROR
    assert golden.worst_positions(reference, logits)[0][0] == position


def test_a_shift_of_one_likely_token_alone_is_seen(token_ids, logits):
    reference = prompt_of(token_ids, logits)
    likely = next(token for token in reference.top_ids[5][::-1] if token not in reference.column_ids)
    logits[5, likely] += 2e-4
    assert golden.compare_logits(reference, logits) > golden.MAX_LOGIT_ERROR


def test_a_shift_of_one_unlikely_token_alone_is_seen_in_the_fixed_columns(token_ids, logits):
    reference = prompt_of(token_ids, logits)
    unlikely = reference.column_ids[logits[5, reference.column_ids].argmin()]
    logits[5, unlikely] += 2e-4
    assert golden.compare_logits(reference, logits) > golden.MAX_LOGIT_ERROR


def test_an_error_in_a_column_outside_the_fingerprint_is_seen_when_it_takes_the_lead(token_ids, logits):
    reference = prompt_of(token_ids, logits)
    kept = set(reference.column_ids.tolist()) | set(reference.top_ids[5].tolist())
    outside = next(column for column in range(VOCAB) if column not in kept)
    logits[5, outside] = logits[5].max() + 1
    assert golden.compare_logits(reference, logits) > 0.1


def test_logits_that_are_not_finite_are_infinitely_far_away(token_ids, logits):
    reference = prompt_of(token_ids, logits)
    logits[3, 7] = np.nan
    assert golden.compare_logits(reference, logits) == np.inf


def test_a_missing_position_is_refused_with_both_numbers(token_ids, logits):
    with pytest.raises(ValueError, match=rf"\({POSITIONS - 1}, {VOCAB}\).*{POSITIONS} positions"):
        golden.compare_logits(prompt_of(token_ids, logits), logits[:-1])


def test_a_model_that_is_the_reference_has_no_divergence_from_it(token_ids, logits):
    measured = golden.quality(golden.coarsen(token_ids, logits), logits)
    assert measured.top1_agreement == 1.0
    assert abs(measured.kl_max) < 1e-6
    assert measured.perplexity_ratio == pytest.approx(1.0, abs=1e-6)


def test_full_divergence_is_the_textbook_sum(token_ids, logits):
    other = logits + np.random.default_rng(3).standard_normal(logits.shape).astype(np.float32)
    p, q = softmax(logits), softmax(other)
    expected = (p * np.log(p / q)).sum(axis=1)
    measured = golden.full_quality(token_ids, logits, other)
    assert measured.kl_mean == pytest.approx(expected.mean())
    assert measured.kl_max == pytest.approx(expected.max())
    assert measured.nll == pytest.approx(-np.log(q[np.arange(POSITIONS - 1), token_ids[1:]]).mean())


def test_coarse_divergence_is_the_textbook_sum_over_the_kept_tokens_and_the_rest(token_ids, logits):
    other = logits + np.random.default_rng(3).standard_normal(logits.shape).astype(np.float32)
    reference = golden.coarsen(token_ids, logits)
    p, q = (np.take_along_axis(softmax(each), reference.top_ids, axis=1) for each in (logits, other))
    p, q = (np.column_stack([kept, 1 - kept.sum(axis=1)]) for kept in (p, q))
    assert golden.quality(reference, other).kl_mean == pytest.approx((p * np.log(p / q)).sum(axis=1).mean(), abs=1e-6)


def test_coarse_divergence_is_most_of_the_full_one_and_never_more(token_ids, logits):
    other = logits + 0.3 * np.random.default_rng(3).standard_normal(logits.shape).astype(np.float32)
    coarse = golden.quality(golden.coarsen(token_ids, logits), other)
    full = golden.full_quality(token_ids, logits, other)
    assert 0.8 * full.kl_mean < coarse.kl_mean < full.kl_mean
    assert coarse.top1_agreement == full.top1_agreement < 1.0
    assert coarse.nll == full.nll


def test_agreement_counts_the_positions_whose_most_likely_token_is_the_same(token_ids, logits):
    reference = golden.coarsen(token_ids, logits)
    for position in range(7):
        logits[position, logits[position].argmin()] = logits[position].max() + 1
    assert golden.quality(reference, logits).top1_agreement == pytest.approx(1 - 7 / POSITIONS)


def test_quality_of_logits_that_are_not_finite_is_refused(token_ids, logits):
    reference = golden.coarsen(token_ids, logits)
    logits[3, 7] = np.inf
    with pytest.raises(ValueError, match="1 positions are not finite, the first at position 3"):
        golden.quality(reference, logits)


def test_the_reference_of_a_beginning_is_the_beginning_of_the_reference(token_ids, logits):
    whole, part = golden.coarsen(token_ids, logits).first(10), golden.coarsen(token_ids[:10], logits[:10])
    for name in ("token_ids", "top_ids", "top_logprobs", "rest_logprob", "nll"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(part, name))


def test_equal_logits_rank_the_lower_id_first():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [9, 4, 300]] = 1.0
    assert golden.fingerprint(logits)["top_ids"][0, :3].tolist() == [4, 9, 300]


def test_the_prompts_on_file_are_whole():
    prompts = golden.load_prompts()
    assert [prompt.name for prompt in prompts] == ["chat", "code", "languages", "long", "one"]
    for prompt in prompts:
        positions = len(prompt.token_ids)
        assert prompt.top_logits.shape == (positions, golden.NUM_TOP)
        assert prompt.column_logits.shape == (positions, golden.NUM_COLUMNS)
        assert prompt.log_normalizer.shape == (positions,)
        assert len(prompt.greedy_token_ids) == 64
        assert prompt.top_ids[-1, 0] == prompt.greedy_token_ids[0]


def test_no_greedy_token_on_file_leads_by_less_than_float32_can_tell():
    assert min(prompt.greedy_margins.min() for prompt in golden.load_prompts()) > 10 * golden.MAX_LOGIT_ERROR


def test_the_chat_answer_on_file_ends_where_its_end_token_is():
    chat = golden.load_prompts()[0]
    assert chat.greedy_until(frozenset([2])) == chat.greedy_token_ids[:7].tolist()
    assert chat.greedy_until(frozenset()) == chat.greedy_token_ids.tolist()


def test_the_distributions_of_the_text_on_file_add_up_to_one():
    text = golden.load_text()
    assert text.top_ids.shape == (2000, golden.NUM_CLASSES)
    assert text.nll.shape == (1999,)
    total = np.exp(text.top_logprobs.astype(np.float64)).sum(axis=1) + np.exp(text.rest_logprob)
    np.testing.assert_allclose(total, 1.0, atol=1e-6)
