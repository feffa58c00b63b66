"""The sampler against its slow reference, and the promises that no reference can check."""

import numpy as np
import pytest

from millpond.core.request import SamplingParams
from millpond.core.step import Admission
from millpond.runner.sampler import Sampler
from runner import reference_sampler as reference

GREEDY = SamplingParams(temperature=0)
VOCAB, WIDTH = 1500, 1504


def sampler(slots=8, vocab=VOCAB, width=None):
    return Sampler(slots, vocab, width or vocab)


def rows_of(*rows):
    return np.array(rows, np.float32)


def one(logits, sampling=GREEDY, *, seed=0, prompt=(0,), output=()):
    """The token that one request, alone, gets from one row of logits."""
    logits = rows_of(logits)
    alone = sampler(1, logits.shape[1])
    alone.admit(0, Admission(tuple(prompt), tuple(output), sampling, seed))
    tokens, flags = alone.sample(logits, [0], [len(output)])
    assert flags == [False]
    return tokens[0]


def draws(logits, sampling, count, *, seed=0):
    """`count` tokens drawn from the same row at output positions 0, 1, ..."""
    logits = np.repeat(rows_of(logits), count, axis=0)
    alone = sampler(1, logits.shape[1])
    alone.admit(0, Admission((0,), (), sampling, seed))
    return np.array(alone.sample(logits, [0] * count, range(count))[0])


def chi_square(observed, expected):
    return float(((observed - expected) ** 2 / expected).sum())


def random_logits(rng, vocab=VOCAB):
    """One row of one of the shapes that matter: smooth, flat, peaked, full of ties, partly masked."""
    row = rng.standard_normal(vocab) * rng.choice([0.01, 1, 3, 10])
    match rng.integers(5):
        case 1:
            row[rng.integers(vocab, size=12)] += rng.uniform(5, 30)
        case 2:
            row = np.round(row)
        case 3:
            row = np.round(row * 4) / 4 - 1000
        case 4:
            row[rng.integers(vocab, size=vocab // 2)] = -np.inf
    return row.astype(np.float32)


def random_sampling(rng):
    """Rules at random, each of them switched off as often as not."""

    def maybe(values, off):
        return rng.choice(values).item() if rng.random() < 0.5 else off

    return SamplingParams(
        temperature=rng.choice([0.0, 1e-5, 1e-3, 0.3, 0.7, 1.0, 1.5, 100.0]).item(),
        top_k=maybe([-1, 1, 2, 20, 63, 64, 65, 400, VOCAB, 10**9], 0),
        top_p=maybe([1e-4, 0.1, 0.5, 0.9, 0.95, 0.999], 1.0),
        min_p=maybe([1e-6, 0.05, 0.3, 1.0], 0.0),
        repetition_penalty=maybe([0.5, 1.1, 2.0], 1.0),
        presence_penalty=maybe([-2.0, 0.5, 2.0], 0.0),
        frequency_penalty=maybe([-0.5, 0.25, 2.0], 0.0),
    )


def random_request(rng):
    prompt = tuple(rng.integers(VOCAB, size=rng.integers(1, 60)).tolist())
    output = tuple(rng.integers(VOCAB, size=rng.integers(0, 60)).tolist())
    return Admission(prompt, output, random_sampling(rng), int(rng.integers(2**63)))


def random_batch(seed, count):
    """Requests with rules of their own, and their logits [count, WIDTH] with padding that would win."""
    rng = np.random.default_rng(seed)
    requests = [random_request(rng) for _ in range(count)]
    logits = np.full((count, WIDTH), 1e9, np.float32)
    for row in logits:
        row[:VOCAB] = random_logits(rng)
    return requests, logits


def sample_batch(requests, logits, slots, num_slots):
    batch = Sampler(num_slots, VOCAB, WIDTH)
    for slot, request in zip(slots, requests, strict=True):
        batch.admit(slot, request)
    tokens, flags = batch.sample(logits, slots, [len(request.output_token_ids) for request in requests])
    assert not any(flags)
    return tokens


# Against the reference


def test_the_references_generator_is_splitmix64():
    assert [reference.splitmix64(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("seed", range(8))
def test_a_mixed_batch_gives_the_references_tokens(seed):
    requests, logits = random_batch(seed, 64)
    expected = [
        reference.sample(row[:VOCAB], r.sampling, r.seed, r.prompt_token_ids, r.output_token_ids)
        for row, r in zip(logits, requests, strict=True)
    ]
    assert sample_batch(requests, logits, range(64), 64) == expected


@pytest.mark.parametrize("seed", [0, 1, 7, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -(2**63)])
def test_every_64_bit_seed_has_the_references_draws(seed):
    row, sampling = [0.0] * 1000, SamplingParams(temperature=1.0)
    expected = [reference.sample(rows_of(row)[0], sampling, seed, (0,), (0,) * i) for i in range(20)]
    assert draws(row, sampling, 20, seed=seed).tolist() == expected


# Greedy


@pytest.mark.parametrize("best", [0, 1, 511, 512, 513, 1023, 1024, VOCAB - 1])
def test_greedy_finds_the_largest_logit_wherever_it_is(best):
    row = np.full(VOCAB, -3.5)
    row[best] = -3.25
    assert one(row) == best


@pytest.mark.parametrize("value", [5.0, -5.0, 0.0, 1e30])
def test_greedy_takes_the_lowest_id_among_equals(value):
    row = np.full(VOCAB, -1e35)
    row[[1400, 700, 701, 513]] = value
    assert one(row) == 513


def test_negative_zero_equals_zero():
    row = np.full(VOCAB, -1.0)
    row[3], row[900] = -0.0, 0.0
    assert one(row) == 3
    assert one(row, SamplingParams(top_k=1)) == 3


@pytest.mark.parametrize("temperature", [1e-7, 1e-6, 9.9e-6, 1e-5, 2e-5, 1e-4, 1e-3])
def test_a_small_temperature_tends_to_greedy(temperature):
    rows = np.random.default_rng(3).standard_normal((50, VOCAB)) * 1000
    for position, row in enumerate(rows):
        assert one(row, SamplingParams(temperature=temperature), output=(0,) * position) == one(row)


def test_a_temperature_below_the_threshold_is_zero_even_between_equals():
    assert set(draws([1.0, 1.0], SamplingParams(temperature=9.9e-6), 100)) == {0}
    assert set(draws([1.0, 1.0], SamplingParams(temperature=1e-5), 100)) == {0, 1}


def test_top_k_1_and_a_tiny_top_p_are_greedy_at_any_temperature():
    rng = np.random.default_rng(4)
    for position in range(60):
        row, history = random_logits(rng), (0,) * position
        assert one(row, SamplingParams(temperature=100, top_k=1), output=history) == one(row)
        assert one(row, SamplingParams(temperature=0.5, top_p=1e-4, min_p=0.9), output=history) == one(row)


def test_the_largest_finite_logits_do_not_overflow():
    row = [-3.4e38, 3.4e38, -3.4e38]
    assert one(row) == 1
    assert set(draws(row, SamplingParams(temperature=1e-5), 50)) == {1}
    assert set(draws(row, SamplingParams(temperature=100, top_p=0.5, top_k=2), 50)) == {1}


# Which tokens may be drawn


def test_top_k_keeps_exactly_k_and_prefers_low_ids_among_equals():
    assert set(draws([0, 1, 1, 1, 1, 2], SamplingParams(top_k=3), 500)) == {5, 1, 2}


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    row = np.log([0.5, 0.25, 0.125, 0.125])
    assert set(draws(row, SamplingParams(top_p=0.74), 500)) == {0, 1}
    assert set(draws(row, SamplingParams(top_p=0.76), 500)) == {0, 1, 2}
    assert set(draws([0.0] * 8, SamplingParams(top_p=0.5), 500)) == {0, 1, 2, 3}


def test_top_p_counts_what_top_k_left():
    assert set(draws([0.0] * 8, SamplingParams(top_k=4, top_p=0.5), 500)) == {0, 1}


def test_min_p_is_a_share_of_the_likeliest_token_after_temperature():
    row = np.log([1.0, 0.26, 0.24])
    assert set(draws(row, SamplingParams(min_p=0.25), 500)) == {0, 1}
    assert set(draws(row, SamplingParams(min_p=0.25, temperature=2), 500)) == {0, 1, 2}
    assert set(draws([2.0, 2.0, 1.9], SamplingParams(min_p=1.0), 500)) == {0, 1}


@pytest.mark.parametrize("kept", [1, 63, 64, 65, 512, 513, 1499])
def test_the_number_of_candidates_is_exact_on_a_large_vocabulary(kept):
    for row in (np.zeros(VOCAB), np.linspace(0.5, 0.0, VOCAB)):
        seen = draws(row, SamplingParams(top_k=kept, temperature=100), 8 * kept + 50)
        assert seen.max() < kept
        assert len(set(seen)) > 0.99 * kept


def test_a_rare_token_is_drawn_as_often_as_it_should_be():
    seen = draws(np.log([1.0, 1e-3]), SamplingParams(), 200_000)
    assert 160 < (seen == 1).sum() < 240


# Randomness


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_probabilities(temperature):
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5, 0.5, -2.0, 1.5])
    shares = np.exp(logits / temperature)
    seen = np.bincount(draws(logits, SamplingParams(temperature=temperature), 20_000), minlength=8)
    assert chi_square(seen, 20_000 * shares / shares.sum()) < 24.3  # 99.9 % of fair draws, 7 degrees of freedom


def test_neighbouring_positions_are_independent():
    seen = draws([0.0] * 4, SamplingParams(), 20_000)
    pairs = np.bincount(seen[:-1] * 4 + seen[1:], minlength=16)
    assert chi_square(pairs, 19_999 / 16) < 37.7  # 99.9 %, 15 degrees of freedom


@pytest.mark.parametrize("distance", [1, 2, 1 << 32, reference.STEP])
def test_neighbouring_seeds_are_independent(distance):
    seen = np.array([draws([0.0] * 4, SamplingParams(), 64, seed=i * distance) for i in range(100)])
    assert chi_square(np.bincount((seen[:-1] * 4 + seen[1:]).ravel(), minlength=16), 99 * 64 / 16) < 37.7
    shifted = seen[:-1, 1:] == seen[1:, :-1]
    assert 0.22 < shifted.mean() < 0.28


# Independence


def test_a_rows_token_does_not_depend_on_batch_order_or_slot():
    requests, logits = random_batch(100, 24)
    together = sample_batch(requests, logits, range(24), 24)
    order = np.random.default_rng(5).permutation(24)
    shuffled = sample_batch([requests[i] for i in order], logits[order], [int(23 - i) for i in order], 24)
    alone = [sample_batch([requests[i]], logits[i : i + 1], [2], 3)[0] for i in range(24)]
    assert [shuffled[np.flatnonzero(order == i)[0]] for i in range(24)] == together
    assert alone == together


def test_two_requests_with_other_rules_do_not_feel_each_other():
    row = np.random.default_rng(6).standard_normal(VOCAB).astype(np.float32)
    pair = (
        Admission((5, 6), (), SamplingParams(temperature=0, repetition_penalty=2.0), 1),
        Admission((7,), (), SamplingParams(temperature=1, top_k=1), 99),
    )

    def generate(order, slots, steps=6):
        batch, texts = sampler(2), {i: [] for i in order}
        for i, slot in zip(order, slots, strict=True):
            batch.admit(slot, pair[i])
        for step in range(steps):
            tokens, _ = batch.sample(np.repeat(row[None], len(order), axis=0), slots, [step] * len(order))
            for i, token in zip(order, tokens, strict=True):
                texts[i].append(token)
        return texts

    both = generate([0, 1], [0, 1])
    assert generate([1, 0], [0, 1]) == both
    assert generate([0], [1])[0] == both[0]
    assert generate([1], [0])[1] == both[1]
    assert len(set(both[0])) > 1
    assert len(set(both[1])) == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_resumed_request_continues_as_if_never_preempted(seed):
    rng = np.random.default_rng(seed)
    logits = np.array([random_logits(rng, 40) for _ in range(40)])
    sampling = SamplingParams(
        temperature=0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
    )
    prompt = (3, 3, 7)

    def generate(preempted_at=()):
        batch, slot, output = sampler(4, 40), 0, []
        batch.admit(slot, Admission(prompt, (), sampling, 42))
        for step, row in enumerate(logits):
            if step in preempted_at:
                batch.admit(slot, Admission((1, 2), (4, 4), sampling, 5))  # somebody else takes the slot
                slot = (slot + 1) % 2
                batch.admit(slot, Admission(prompt, tuple(output), sampling, 42))
            output += batch.sample(row[None], [slot], [step])[0]
        return output

    undisturbed = generate()
    assert undisturbed == [
        reference.sample(row, sampling, 42, prompt, tuple(undisturbed[:i])) for i, row in enumerate(logits)
    ]
    assert generate(preempted_at=(1, 17, 18, 39)) == undisturbed


def test_a_slot_forgets_its_last_request():
    batch = sampler(1, 4)
    batch.admit(0, Admission((0,), (0,), SamplingParams(temperature=0, presence_penalty=2.0), 0))
    batch.admit(0, Admission((1,), (), SamplingParams(temperature=0, presence_penalty=1.0), 0))
    assert batch.sample(rows_of([1.0, 0.5, 0, 0]), [0], [0]) == ([0], [False])
    batch.admit(0, Admission((1,), (0, 0), GREEDY, 0))
    assert batch.sample(rows_of([1.0, 0.5, 0, 0]), [0], [2]) == ([0], [False])


# Penalties, by hand


def test_repetition_penalty_shrinks_positive_and_grows_negative_logits():
    twice = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert one([2.0, 1.5, 0.0], twice, prompt=(0,)) == 1
    assert one([-1.0, -1.5, -9.0], twice, prompt=(0,)) == 1
    assert one([2.0, 0.9, 0.0], twice, prompt=(0,)) == 0


def test_repetition_penalty_counts_prompt_and_output_once_each():
    twice = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert one([2.0, 1.5, 0.0], twice, prompt=(2,), output=(0,)) == 1
    assert one([2.0, 0.9, 0.0], twice, prompt=(0, 0, 0), output=(0, 0)) == 0


def test_presence_and_frequency_penalties_see_the_output_only():
    for name in ("presence_penalty", "frequency_penalty"):
        sampling = SamplingParams(temperature=0, **{name: 1.0})
        assert one([2.0, 1.5, 0.0], sampling, prompt=(0, 0)) == 0
        assert one([2.0, 1.5, 0.0], sampling, prompt=(2,), output=(0,)) == 1


def test_presence_is_paid_once_and_frequency_each_time():
    output = (0, 0, 0)
    assert one([2.0, 0.9], SamplingParams(temperature=0, presence_penalty=1.0), prompt=(1,), output=output) == 0
    assert one([2.0, 0.9], SamplingParams(temperature=0, frequency_penalty=1.0), prompt=(1,), output=output) == 1


def test_repetition_comes_before_the_subtractions():
    sampling = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=1.0)
    assert one([4.0, 0.8], sampling, prompt=(1,), output=(0,)) == 0  # 4 / 2 - 1 = 1, not (4 - 1) / 2


def test_a_sampled_token_is_penalised_from_the_next_step_on():
    batch = sampler(1, 3)
    batch.admit(0, Admission((2,), (), SamplingParams(temperature=0, frequency_penalty=1.0), 0))
    row = rows_of([2.0, 1.5, -9.0])
    assert [batch.sample(row, [0], [step])[0][0] for step in range(5)] == [0, 1, 0, 1, 0]


def test_an_extreme_penalty_is_not_taken_for_a_fault():
    sampling = SamplingParams(temperature=0, repetition_penalty=1e-300)
    assert one([0.5, 1.5, -np.inf], sampling, prompt=(1, 2)) == 1


# The largest logits of each tile, as the head notes them


def noted(logits):
    """The largest of each 48 columns of rows, and not a number where one of these is not; filled up with 1e9."""
    padding = np.full((len(logits), -logits.shape[1] % 48), 1e9, np.float32)
    return np.concatenate([logits, padding], axis=1).reshape(len(logits), -1, 48).max(axis=2)


@pytest.mark.parametrize("seed", range(4))
def test_with_the_largest_logits_noted_the_tokens_are_the_same(seed):
    requests, logits = random_batch(seed, 64)
    batch, output_positions = Sampler(64, VOCAB, WIDTH), [len(each.output_token_ids) for each in requests]
    for slot, request in enumerate(requests):
        batch.admit(slot, request)
    tokens, flags = batch.sample(logits, range(64), output_positions, None, noted(logits))
    assert tokens == sample_batch(requests, logits, range(64), 64)
    assert not any(flags)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(repetition_penalty=1.5, top_k=5)])
@pytest.mark.parametrize("fault", [np.nan, np.inf, "nothing"])
def test_a_fault_in_what_was_noted_is_one_of_its_row(sampling, fault):
    logits = np.random.default_rng(9).standard_normal((3, VOCAB)).astype(np.float32)
    if fault == "nothing":
        logits[1] = -np.inf
    else:
        logits[1, 700] = fault
    batch = sampler(3)
    for slot in range(3):
        batch.admit(slot, Admission((5,), (), sampling, slot))
    assert batch.sample(logits, range(3), [0, 0, 0], None, noted(logits))[1] == [False, True, False]


def test_a_row_without_penalties_is_looked_at_only_where_its_largest_logit_was_noted():
    logits, batch = rows_of(np.zeros(96)), sampler(1, 96)
    logits[0, [40, 50]] = 7, 3
    batch.admit(0, Admission((5,), (), GREEDY, 0))
    assert batch.sample(logits, [0], [0], None, rows_of([2, 3]))[0] == [50]


def test_tops_that_do_not_fit_are_refused():
    batch, logits = sampler(2, 100), np.zeros((2, 100), np.float32)
    for tops in (np.zeros((1, 3), np.float32), np.zeros((2, 2), np.float32), np.zeros((2, 6), np.float32)[:, ::2]):
        with pytest.raises(ValueError, match="2 rows and at least 3 tiles, got float32"):
            batch.sample(logits, [0, 1], [0, 0], None, tops)
    with pytest.raises(ValueError, match="got float64"):
        batch.sample(logits, [0, 1], [0, 0], None, np.zeros((2, 3)))


# Padding and faults


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=100), SamplingParams(top_k=2, top_p=0.9)])
@pytest.mark.parametrize("padding", [1e9, np.nan, np.inf])
def test_padding_columns_are_never_chosen(sampling, padding):
    batch = Sampler(1, 5, 8)
    batch.admit(0, Admission((0, 6), (7,), sampling, 0))
    tokens, flags = batch.sample(rows_of(*[[0.0] * 5 + [padding] * 3] * 300), [0] * 300, range(300))
    assert max(tokens) < 5
    assert not any(flags)


def test_penalties_ignore_ids_that_have_no_logit():
    batch = Sampler(1, 2, 4)
    batch.admit(0, Admission((0, 3), (2,), SamplingParams(temperature=0, repetition_penalty=2.0), 0))
    assert batch.sample(rows_of([2.0, 1.5, 9, 9]), [0], [1]) == ([1], [False])


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(repetition_penalty=1.5, top_k=5)])
@pytest.mark.parametrize("fault", [np.nan, -np.float32(np.nan), np.inf, "nothing"])
@pytest.mark.parametrize("where", [0, 700, VOCAB - 1])
def test_a_row_that_is_not_finite_is_flagged_and_the_others_are_not(sampling, fault, where):
    rows = np.random.default_rng(8).standard_normal((3, VOCAB)).astype(np.float32)
    batch = sampler(3)
    for slot in range(3):
        batch.admit(slot, Admission((where,), (), sampling, slot))
    sound, _ = batch.sample(rows, [0, 1, 2], [0, 0, 0])
    if fault == "nothing":
        rows[1] = -np.inf
    else:
        rows[1, where] = fault
    for slot in range(3):
        batch.admit(slot, Admission((where,), (), sampling, slot))
    tokens, flags = batch.sample(rows, [0, 1, 2], [0, 0, 0])
    assert flags == [False, True, False]
    assert tokens == [sound[0], -1, sound[2]]


def test_a_masked_token_is_never_drawn():
    row = [-np.inf, 0.0, -np.inf, 0.0]
    seen = draws(row, SamplingParams(temperature=100, frequency_penalty=-2.0), 300)
    assert set(seen) == {1, 3}


def test_a_row_with_one_finite_logit_gives_that_token():
    row = np.full(VOCAB, -np.inf)
    row[777] = -4.0
    assert one(row) == 777
    assert one(row, SamplingParams(top_p=0.5, top_k=10, min_p=0.5)) == 777


def test_logits_that_do_not_fit_are_refused():
    batch = Sampler(2, 5, 8)
    with pytest.raises(ValueError, match=r"\(1, 8\), got \(1, 5\)"):
        batch.sample(np.zeros((1, 5), np.float32), [0], [0])
    with pytest.raises(ValueError, match="1 slots and 2 output positions"):
        batch.sample(np.zeros((1, 8), np.float32), [0], [0, 1])
    with pytest.raises(ValueError, match="float32 in C order, got float64"):
        batch.sample(np.zeros((1, 8)), [0], [0])
    with pytest.raises(ValueError, match="vocab_size must be from 1 to 8"):
        Sampler(2, 9, 8)


def test_warming_up_and_an_empty_step_change_nothing():
    batch = sampler(1, 3)
    batch.admit(0, Admission((2,), (), SamplingParams(temperature=0, frequency_penalty=1.0), 0))
    batch.warm_up()
    assert batch.sample(np.empty((0, 3), np.float32), [], []) == ([], [])
    assert batch.sample(rows_of([2.0, 1.5, 0.0]), [0], [0]) == ([0], [False])
