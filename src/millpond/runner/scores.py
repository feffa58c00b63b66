"""Log probabilities of tokens under raw logits, a row at a time: of no other row and of no batch."""

import numpy as np
from numpy.typing import NDArray

from millpond.core.step import TokenScore

# Of a logit of -infinity, which JSON does not have; OpenAI's interface writes the same.
LEAST_LOGPROB = -9999.0
GROUP = 32


class Scorer:
    """Scores rows of logits [vocab]. Its buffer makes every row's sums the same operations on the same places."""

    def __init__(self, vocab_size: int) -> None:
        self._shares = np.empty(vocab_size, np.float32)

    def score(self, row: NDArray[np.float32], token_id: int, num_top: int) -> TokenScore | None:
        """The token's log probability in this row and the num_top likeliest; None for a row that is not finite."""
        top = row.max()
        if not -np.inf < top < np.inf:
            return None
        np.subtract(row, top, out=self._shares)
        np.exp(self._shares, out=self._shares)
        # From here on Python's own numbers: the sum, and what is said of it, in double precision.
        total = float(top) + float(np.log(self._shares.sum(dtype=np.float64)))
        rank = int((row > row[token_id]).sum()) + 1
        best = likeliest(row, num_top) if num_top else ()
        listed = tuple([(int(each), logprob_of(row[each], total)) for each in best])
        return TokenScore(token_id, logprob_of(row[token_id], total), rank, listed)


def logprob_of(logit: np.float32, total: float) -> float:
    return max(float(logit) - total, LEAST_LOGPROB)


def likeliest(row: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ids of the `count` largest logits, largest first, lower id first among equals.

    The largest of each of many groups, cut so that numpy compares whole vectors, say how small none of them can be.
    """
    count, groups = min(count, row.size), row.size // GROUP
    least = -np.inf
    if groups >= count:
        tops = row[: groups * GROUP].reshape(GROUP, groups).max(axis=0)
        least = np.partition(tops, groups - count)[groups - count]
    ids = np.flatnonzero(row >= least)
    return ids[np.lexsort((ids, -row[ids]))[:count]]
