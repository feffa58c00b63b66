from pathlib import Path

import numpy as np
import pytest

from millpond.load.mapped import forget, map_file

SIZE = 32 << 20


def file_bytes_in_memory() -> int:
    """Of files, what this process has in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    pytest.skip("the system does not say")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say")
def test_what_is_forgotten_takes_no_memory_and_is_read_again(tmp_path):
    content = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
    (tmp_path / "f").write_bytes(content)
    whole = np.frombuffer(map_file(tmp_path / "f"), np.uint8)
    part = whole[1000 : SIZE // 2].view(np.uint16).reshape(-1, 4)
    total = int(whole.sum())
    before = file_bytes_in_memory()
    forget(part)
    assert SIZE // 4 < before - file_bytes_in_memory() < 3 * SIZE // 4
    forget(whole)
    assert before - file_bytes_in_memory() > 3 * SIZE // 4
    assert int(whole.sum()) == total == int(content.sum())


@pytest.mark.parametrize("data", [np.arange(10), np.frombuffer(b"abc", np.uint8), np.zeros((2, 3)).T])
def test_what_is_no_part_of_a_mapped_file_is_left_alone(data):
    before = data.copy()
    forget(data)
    assert np.array_equal(data, before)
