"""Which input channels are taken out of their 8-bit group: the few whose size coarsens it, and no others."""

import ctypes

import numpy as np
import pytest

from millpond.kernels.matmul import DESCRIPTOR_SIZE, GROUP, HALF, MAGNITUDES, OUTLIER_COUNT, OUTLIERS
from millpond.kernels.pack import pack_affine, pack_float
from millpond.model.outliers import (
    MOST_OUTLIERS,
    PROBE_TOKENS,
    _group_weights,
    choose_channels,
    find_outliers,
    probe_tokens,
    take_out,
)

GROUPS = 6
EVEN = np.ones(GROUPS, np.float32)


def even_magnitudes(groups: int = GROUPS) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.9, 1.1, groups * GROUP).astype(np.float32)


def magnitudes_with(**channels: float) -> np.ndarray:
    """Even magnitudes but for some channels: c40=50 makes that of channel 40 fifty."""
    magnitudes = even_magnitudes()
    for name, value in channels.items():
        magnitudes[int(name[1:])] = value
    return magnitudes


def integer_layer(depth=GROUPS * GROUP, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (48, depth), dtype=np.uint8)
    scale, offset = rng.uniform(0.5, 1.5, (2, 48, depth // HALF)).astype(np.float16)
    return pack_affine(codes, scale, offset, 4)


def test_channels_of_one_size_stay_where_they_are():
    assert choose_channels(even_magnitudes(), EVEN).tolist() == []


def test_a_large_channel_is_taken_out():
    assert choose_channels(magnitudes_with(c40=50), EVEN).tolist() == [40]


def test_large_channels_of_different_groups_are_all_taken_out():
    assert sorted(choose_channels(magnitudes_with(c3=80, c100=50, c200=60), EVEN).tolist()) == [3, 100, 200]


def test_where_there_is_not_room_for_all_the_channels_that_do_most_harm_are_taken_out():
    magnitudes = even_magnitudes(2 * MOST_OUTLIERS)
    large = np.arange(2 * MOST_OUTLIERS) * GROUP + 7
    magnitudes[large] = np.linspace(100, 200, 2 * MOST_OUTLIERS)
    chosen = choose_channels(magnitudes, np.ones(2 * MOST_OUTLIERS, np.float32))
    assert sorted(chosen.tolist()) == large[MOST_OUTLIERS:].tolist()


def test_two_large_channels_of_one_group_are_both_taken_out_though_one_alone_would_gain_nothing():
    assert sorted(choose_channels(magnitudes_with(c40=50, c41=50), EVEN).tolist()) == [40, 41]


def test_a_group_that_is_large_all_over_does_not_keep_another_groups_channel_in():
    magnitudes = magnitudes_with(c100=50)
    magnitudes[:GROUP] = 60
    assert choose_channels(magnitudes, EVEN).tolist() == [100]


def test_a_group_whose_weights_hardly_count_keeps_its_large_channel():
    weights = EVEN.copy()
    weights[1] = 1e-6
    assert choose_channels(magnitudes_with(c100=50), EVEN).tolist() == [100]
    assert choose_channels(magnitudes_with(c100=50), weights).tolist() == []


def test_no_more_channels_are_taken_out_than_there_is_room_for():
    magnitudes = even_magnitudes()
    magnitudes[::10] = np.linspace(100, 1000, len(magnitudes[::10]))
    assert len(choose_channels(magnitudes, EVEN)) <= MOST_OUTLIERS


def test_no_channel_is_taken_out_twice_and_all_are_there():
    magnitudes = np.exp(np.random.default_rng(1).standard_normal(GROUPS * GROUP) * 3).astype(np.float32)
    chosen = choose_channels(magnitudes, EVEN).tolist()
    assert len(set(chosen)) == len(chosen)
    assert all(0 <= channel < GROUPS * GROUP for channel in chosen)
    assert chosen, "so uneven a layer has channels to take out"


@pytest.mark.parametrize("fill", [0.0, np.nan, np.inf])
def test_a_probe_that_saw_nothing_or_nothing_finite_takes_nothing_out(fill):
    magnitudes = np.full(GROUPS * GROUP, fill, np.float32)
    assert choose_channels(magnitudes, EVEN).tolist() == []


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_channel_that_is_not_finite_raises_no_warning_and_takes_no_good_one_out(bad):
    assert set(choose_channels(magnitudes_with(c40=bad), EVEN).tolist()) <= {40}


def test_the_probe_fills_the_descriptors_of_integer_layers_and_no_others():
    layers = [integer_layer(seed=1), pack_float(np.ones((48, 64), np.float32), 2), integer_layer(seed=2)]
    rows = np.array([each.descriptor(None) for each in layers])
    before = rows.copy()
    seen = []

    def probe():
        seen.extend(rows[:, MAGNITUDES].tolist())
        for i, channel in ((0, 40), (2, 7)):
            sums = (ctypes.c_float * (GROUPS * GROUP)).from_address(int(rows[i, MAGNITUDES]))
            sums[:] = magnitudes_with(**{f"c{channel}": 90}).tolist()

    pairs = list(zip(layers, rows, strict=True))
    kept = find_outliers(pairs, probe)
    np.testing.assert_array_equal(rows, before)
    take_out(pairs, kept)
    assert [address != 0 for address in seen] == [True, False, True]
    assert [channels.tolist() for channels in kept] == [[40], [7]]
    np.testing.assert_array_equal(rows[:, OUTLIER_COUNT], [1, 0, 1])
    np.testing.assert_array_equal(rows[[0, 2], OUTLIERS], [each.ctypes.data for each in kept])
    assert not rows[:, MAGNITUDES].any()
    others = [i for i in range(DESCRIPTOR_SIZE) if i not in (OUTLIER_COUNT, OUTLIERS, MAGNITUDES)]
    np.testing.assert_array_equal(rows[:, others], before[:, others])


def test_a_group_counts_by_the_squares_of_its_weights_over_all_columns():
    layer = integer_layer()
    layer.weights["scales"][...] = 1
    layer.weights["scales"][:, 2] = 0.1
    np.testing.assert_allclose(_group_weights(layer), [48, 48, 0.48, 48, 48, 48], rtol=1e-3)


@pytest.mark.parametrize("vocab", [1, 267, 49152, 151936])
def test_the_probe_reads_the_same_tokens_of_the_vocabulary_every_time(vocab):
    tokens = probe_tokens(vocab)
    assert tokens == probe_tokens(vocab)
    assert len(tokens) == PROBE_TOKENS
    assert all(0 <= token < vocab for token in tokens)
    assert len(set(tokens)) == min(vocab, PROBE_TOKENS)
