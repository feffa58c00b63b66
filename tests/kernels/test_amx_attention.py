"""What attention by AMX asks memory for (its results: test_attention.py)."""

import pytest
from numba import njit, types

from millpond.kernels.amx_attention import rows_tile
from millpond.kernels.attention import BLOCK
from millpond.kernels.isa import runnable
from millpond.kernels.jit import OPTIONS

pytestmark = pytest.mark.skipif("amx" not in runnable(), reason="this processor has no AMX, or may not use it")

HEAD_DIM = 64
LINES = BLOCK * HEAD_DIM * 2 // 64  # cache lines of a block's keys, and of its values
COPIES = 2  # of a block's code: in the loop, and for the first or the last one beside it


@pytest.fixture(scope="module")
def assembly() -> str:
    @njit(**OPTIONS)
    def entry(numbers, floats):
        n = numbers
        rows_tile(
            HEAD_DIM, 0, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11],
            floats[0], floats[1], n[12], n[13], n[14], n[15], n[16], n[17], n[18], n[19],
        )  # fmt: skip

    entry.compile((types.UniTuple(types.int64, 20), types.UniTuple(types.float32, 2)))
    return "".join(entry.inspect_asm().values())


@pytest.mark.parametrize("instruction", ["prefetcht0", "prefetcht1"])
def test_a_block_asks_for_the_lines_of_one_block(assembly, instruction):
    assert assembly.count(instruction) == COPIES * 2 * LINES


def test_the_lines_are_asked_for_a_few_at_a_time(assembly):
    lines = [line.split()[0] for line in assembly.splitlines() if line.strip() and not line.strip().startswith(".")]
    runs, run = [], 0
    for name in lines:
        run = run + 1 if name.startswith("prefetch") else 0
        runs.append(run)
    assert max(runs) == LINES // 4  # two products for keys of 64 dimensions, before and after each
