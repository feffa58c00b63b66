"""While an engine is built, nothing looks for garbage, and afterwards nothing looks for it among what was built."""

from __future__ import annotations

import gc

import pytest

from millpond.cli.loading import setting_up


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()
    gc.enable()


def test_what_was_built_is_never_looked_at_again():
    with setting_up():
        assert not gc.isenabled()
        built = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(built)


def test_after_a_failure_garbage_is_looked_for_as_before():
    with pytest.raises(ValueError, match="broken"), setting_up():
        raise ValueError("broken")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
