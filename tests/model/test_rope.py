"""Rotations: what each scaling makes of the frequencies, by its own words, and how files spell it."""

import numpy as np
import pytest

from millpond.errors import ModelFileError
from millpond.model.fields import Fields
from millpond.model.rope import Rope, read_rope, tables

DIMS = 64
PLAIN = 10000.0 ** -(np.arange(DIMS // 2) / (DIMS // 2))
LENGTHS = 2 * np.pi / PLAIN  # of a turn, in positions


def frequencies(max_model_len=4096, **changes):
    return Rope(**changes).frequencies(DIMS, max_model_len, None)


def test_llama3_leaves_short_turns_and_divides_long_ones():
    got = frequencies(scaling="llama3", factor=8.0, original_length=1024, low=1.0, high=4.0)
    short, long = LENGTHS < 1024 / 4, LENGTHS > 1024 / 1
    np.testing.assert_allclose(got[short], PLAIN[short], rtol=1e-6)
    np.testing.assert_allclose(got[long], PLAIN[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert between.any()
    assert ((got[between] < PLAIN[between]) & (got[between] > PLAIN[between] / 8)).all()


def test_yarn_leaves_pairs_that_turn_often_and_divides_those_that_turn_less_than_once():
    rope = Rope(scaling="yarn", factor=4.0, original_length=2048, low=1.0, high=32.0)
    got = rope.frequencies(DIMS, 8192, None)
    turns = 2048 / LENGTHS
    pair = np.arange(DIMS // 2)
    often, seldom = pair < np.flatnonzero(turns > 32)[-1], pair > np.flatnonzero(turns < 1)[0]
    np.testing.assert_allclose(got[often], PLAIN[often], rtol=1e-6)
    np.testing.assert_allclose(got[seldom], PLAIN[seldom] / 4, rtol=1e-6)
    assert (np.diff(got) < 0).all()
    assert rope.scale == pytest.approx(1 + 0.1 * np.log(4))


def test_dynamic_scaling_begins_where_texts_are_longer_than_the_models():
    changes = {"scaling": "dynamic", "factor": 2.0, "original_length": 1024}
    np.testing.assert_array_equal(frequencies(1024, **changes), frequencies(1024))
    longer = frequencies(2048, **changes)
    assert longer[0] == 1
    # twice the length and factor 2: the base grows by (2 * 2 - 1) ** (dims / (dims - 2)), the slowest pair by 3
    np.testing.assert_allclose(longer[-1], PLAIN[-1] / 3, rtol=1e-6)


@pytest.mark.parametrize(("longest", "divisor"), [(1024, 2.0), (1025, 5.0)])
def test_longrope_takes_the_divisors_for_the_longest_text_that_may_come(longest, divisor):
    short, long = (2.0,) * (DIMS // 2), (5.0,) * (DIMS // 2)
    rope = Rope(scaling="longrope", factor=4.0, original_length=1024, short=short, long=long)
    np.testing.assert_allclose(rope.frequencies(DIMS, longest, None), PLAIN / divisor, rtol=1e-6)
    assert rope.scale == pytest.approx(np.sqrt(1 + np.log(4) / np.log(1024)))


def test_a_table_is_scaled_and_turns_only_the_pairs_that_turn():
    rope = Rope(scaling="yarn", factor=1.0, original_length=64, amplitude=1.5)
    cosine, sine = tables((rope, None), 16, 64, 10, None)
    assert cosine.shape == sine.shape == (2, 10, 32)
    np.testing.assert_allclose(cosine[0, :, :8] ** 2 + sine[0, :, :8] ** 2, 1.5**2, rtol=1e-6)
    for table, first in ((0, 8), (1, 0)):
        np.testing.assert_array_equal(cosine[table, :, first:], 1)
        np.testing.assert_array_equal(sine[table, :, first:], 0)


def read(**config) -> Rope:
    return read_rope(Fields({"max_position_embeddings": 512, **config}, None))


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Rope()),
        ({"rope_theta": 5e5}, Rope(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, Rope(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(scaling="linear", factor=2.0, original_length=512)),
        ({"rope_scaling": {"type": "yarn", **YARN}}, Rope(1e4, "yarn", 4.0, 128, 1.0, 32.0)),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", **YARN, "attention_factor": 1.25}},
            Rope(5e5, "yarn", 4.0, 128, 1.0, 32.0, amplitude=1.25),
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, Rope(1e4, "dynamic", 2.0, 512)),
        (
            {
                "rope_scaling": {"type": "su", "short_factor": [1.0, 2.0], "long_factor": [3, 4]},
                "original_max_position_embeddings": 128,
            },
            Rope(1e4, "longrope", 4.0, 128, short=(1.0, 2.0), long=(3.0, 4.0)),
        ),
    ],
    ids=str,
)
def test_every_spelling_of_a_config_is_read(config, expected):
    assert read(**config) == expected


def scaling(**changes):
    return {"rope_scaling": {key: value for key, value in changes.items() if value is not None}}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
REFUSALS = {
    "unknown": (scaling(type="spiral", factor=2.0), "rope scaling 'spiral' is not supported; supported: none, linear"),
    "no factor": (scaling(type="linear"), "has no 'factor'"),
    "a factor of 0": (scaling(type="yarn", factor=0.0), "'factor' must be above 0, got 0"),
    "mscale": (scaling(type="yarn", **YARN, mscale=0.7), "'mscale' is 0.7, which is not supported"),
    "no low factor": (scaling(**{**LLAMA3, "low_freq_factor": None}), "has no 'low_freq_factor'"),
    "factors the wrong way": (
        scaling(**{**LLAMA3, "low_freq_factor": 4.0}),
        "must be above 'low_freq_factor', 4, got 4",
    ),
    "no list": (scaling(type="longrope", short_factor=[1.0], long_factor=3), "'long_factor' must be a list of numbers"),
    "not an object": (
        {"rope_scaling": "yarn"},
        "'rope_scaling' is 'yarn', which is not supported; supported: an object",
    ),
}


@pytest.mark.parametrize(("config", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_scaling_that_cannot_be_run_is_refused_with_what_is_wrong(config, message):
    with pytest.raises(ModelFileError, match=message):
        read(**config)
