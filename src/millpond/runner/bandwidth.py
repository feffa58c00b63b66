"""How much of the memory's speed a step gets: steps and plain reads of the same weights by turns."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.roofline import PIECE, READ, Probes


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """num_bytes: what the step has to read from memory; rate: bytes a second of plain reads, the median of all turns;
    percent: num_bytes a second of the step, in percent of the faster of the reads before and after it, the median."""

    num_bytes: float
    rate: float
    percent: float


class PlainReads:
    """Reads all of `memory` by all threads, as the machine's own speed is measured."""

    def __init__(self, probes: Probes, memory: NDArray[np.uint8]) -> None:
        self._probes, self._count = probes, memory.nbytes // PIECE // probes.threads
        pieces = np.arange(probes.threads * self._count, dtype=np.int64) * PIECE + memory.ctypes.data
        self._pieces = pieces.reshape(probes.threads, -1)

    def rate(self) -> float:
        """Bytes per second of one pass, from the first thread's begin to the last one's end."""
        places = self._pieces.ctypes.data + np.arange(len(self._pieces)) * self._pieces.strides[0]
        clocks = self._probes.run(READ, places, self._count)
        return float(self._pieces.size * PIECE / (clocks.max() - clocks.min()) * 1e9)


def step_bandwidth(
    step_seconds: Callable[[], float], read_rate: Callable[[], float], num_bytes: float, turns: int
) -> Bandwidth:
    """A read, then so many turns of a step and a read. Both move alike with the machine's moods; a read that something
    else held up flatters nobody, for the faster of its two neighbours counts for a step."""
    rates, shares = [read_rate()], []
    for _ in range(turns):
        seconds = step_seconds()
        rates.append(read_rate())
        shares.append(num_bytes / seconds / max(rates[-2:]))
    return Bandwidth(num_bytes, median(rates), 100 * median(shares))
