"""Steps and plain reads by turns: which read counts for which step, and that a read is of all the memory."""

import numpy as np
import pytest

from kernels.emit import RUNNABLE_ISAS
from millpond.kernels.roofline import PIECE, Probes
from millpond.runner.bandwidth import PlainReads, step_bandwidth


def test_a_step_counts_against_the_faster_of_the_reads_around_it_and_the_median_of_the_turns_is_reported():
    order, rates, seconds = [], iter([200.0, 100.0, 400.0, 1.0]), iter([1.0, 1.0, 1.0])

    def read():
        order.append("read")
        return next(rates)

    def step():
        order.append("step")
        return next(seconds)

    found = step_bandwidth(step, read, 100.0, 3)
    assert order == ["read", "step", "read", "step", "read", "step", "read"]
    assert found.rate == 150.0
    assert found.percent == pytest.approx(25.0)  # of 50, 25 and 25
    assert found.num_bytes == 100.0


@pytest.mark.parametrize("threads", [1, 2])
def test_a_plain_read_reads_every_whole_piece_of_the_memory_once(threads):
    probes = Probes(RUNNABLE_ISAS[0], threads)
    memory = np.zeros(8 * PIECE + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: 8 * PIECE]
    memory.view(np.int32)[:] = np.arange(memory.nbytes // 4)
    assert PlainReads(probes, memory).rate() > 0
    assert int(probes.sinks[:, :8].sum()) == int(np.arange(memory.nbytes // 4).sum())
