"""A prompt's hidden states as one vector, and what a step of an encoder gives."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.core.step import RequestFault, RequestScores, SampledTokens, ScheduledRequest
from millpond.model.pooling import CLS, LAST, MEAN
from millpond.runner.prompt_scores import NOT_FINITE_MESSAGE

Given = tuple[tuple[SampledTokens, ...], tuple[RequestFault, ...], tuple[RequestScores, ...]]
NO_TOKEN = (0,)  # a request ends by a token: an encoder has none to give, and nobody reads this one


def pooled(hidden: NDArray[np.float32], pooling: str) -> NDArray[np.float64]:
    """One vector of a prompt's rows [tokens, size]. The mean adds up row after row: the same bits in any company."""
    if pooling == MEAN:
        total: NDArray[np.float64] = hidden.sum(axis=0, dtype=np.float64)
        return total / len(hidden)
    return hidden[{CLS: 0, LAST: -1}[pooling]].astype(np.float64)


def unit_bytes(vector: NDArray[np.float64]) -> bytes:
    """The vector with length 1, as little-endian float32."""
    return (vector / np.sqrt(np.square(vector).sum())).astype("<f4").tobytes()


def embeddings_of(scheduled: Sequence[ScheduledRequest], hidden: NDArray[np.float32], pooling: str) -> Given:
    """Of each request its embedding, from the rows of its prompt, which is whole; a fault where it is not finite."""
    sampled, faults, scores, row = [], [], [], 0
    for each in scheduled:
        first, row = row, row + len(each.token_ids)
        vector = pooled(hidden[first:row], pooling)
        if np.isfinite(vector).all():
            sampled.append(SampledTokens(each.request_id, NO_TOKEN))
            scores.append(RequestScores(each.request_id, embedding=unit_bytes(vector)))
        else:
            faults.append(RequestFault(each.request_id, NOT_FINITE_MESSAGE))
    return tuple(sampled), tuple(faults), tuple(scores)
