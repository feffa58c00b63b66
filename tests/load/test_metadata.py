import pytest

from millpond.errors import ModelFileError
from millpond.load import metadata as read

META = {
    "count": 30,
    "theta": 100000.0,
    "name": "llama",
    "flag": True,
    "types": [1, 3],
    "nan": float("nan"),
}


def test_values_come_back_as_they_are():
    assert read.require_int(META, "count", low=30, high=30) == 30
    assert read.require_float(META, "theta", above=0.0) == 100000.0
    assert read.require_float(META, "count") == 30.0
    assert read.require_str(META, "name") == "llama"


def test_a_key_that_is_not_there_gives_the_default():
    assert read.optional_int(META, "absent", 7) == 7
    assert read.optional_int(META, "absent") is None
    assert read.optional_float(META, "absent", 0.5) == 0.5
    assert read.optional_str(META, "absent") is None


@pytest.mark.parametrize("get", [read.require_int, read.require_float, read.require_str])
def test_a_required_key_that_is_not_there_is_named(get):
    with pytest.raises(ModelFileError, match=r"the metadata has no 'llama\.block_count'"):
        get(META, "llama.block_count")


@pytest.mark.parametrize(
    ("get", "key", "message"),
    [
        (read.require_int, "theta", "'theta' must be an integer, got float '100000.0'"),
        (read.require_int, "flag", "'flag' must be an integer, got bool 'True'"),
        (read.require_int, "types", "'types' must be an integer, got an array of 2"),
        (read.optional_int, "name", "'name' must be an integer, got str 'llama'"),
        (read.require_float, "name", "'name' must be a number, got str 'llama'"),
        (read.require_float, "nan", "'nan' must be finite, got nan"),
        (read.require_str, "count", "'count' must be a string, got int '30'"),
    ],
)
def test_a_value_of_another_kind_is_named_with_what_was_expected(get, key, message):
    with pytest.raises(ModelFileError) as caught:
        get(META, key)
    assert message in str(caught.value)


def test_a_value_out_of_range_is_refused_with_both_numbers():
    with pytest.raises(ModelFileError, match="'count' must be at least 31, got 30"):
        read.require_int(META, "count", low=31)
    with pytest.raises(ModelFileError, match="'count' must be at most 29, got 30"):
        read.optional_int(META, "count", 1, high=29)
    with pytest.raises(ModelFileError, match="'theta' must be above 100000, got 100000"):
        read.require_float(META, "theta", above=100000.0)
