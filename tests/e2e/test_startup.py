"""The demo model, from a start in a process of its own: what the first requests wait for, and what is packed again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from after_ready import in_a_process
from e2e.real import SETTINGS
from millpond.build import build_model_runner
from millpond.config import EngineConfig
from millpond.load.store import resolve
from millpond.model.weights import Linear

pytestmark = pytest.mark.slow

ATTEMPTS = 5  # a process that another one pushes off its core at the wrong moment is not slow


def test_no_request_compiles_or_loads_anything():
    assert in_a_process("compiled", resolve("smollm2"))["new"] == {}


@pytest.mark.parametrize("sequences", [1, 4, 16, 64])
def test_the_first_requests_wait_no_longer_than_twice_as_long_as_the_second_ones(sequences):
    ratios = []
    for _ in range(ATTEMPTS):
        seconds = in_a_process("ttft", resolve("smollm2"), sequences)
        ratios.append(seconds["first"] / seconds["second"])
        if ratios[-1] <= 2:
            return
    pytest.fail(f"first over second: {ratios}")


def test_the_weights_are_packed_once_and_mapped_afterwards(tmp_path, monkeypatch):
    def room():
        return build_model_runner(resolve("smollm2"), EngineConfig(**SETTINGS), cache_dir=tmp_path)._packed.room

    fresh = room()
    (path,) = (tmp_path / "packed").iterdir()
    monkeypatch.setattr(Linear, "pack_into", lambda *args: pytest.fail("a layer was packed again"))
    mapped = room()
    np.testing.assert_array_equal(mapped, fresh)
    assert path.name in Path("/proc/self/maps").read_text()
