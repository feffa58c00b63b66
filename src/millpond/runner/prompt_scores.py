"""The log probabilities of a prompt's tokens: its rows go through the model in forwards of their own.

The head gives logits for few rows at once, so that their memory is bounded whatever a step forwards; the rows of a
prompt that wants them are cut to that, and only the one that samples, if any, is left to the step with everyone.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.core.step import Admission, RequestFault, RequestScores, ScheduledRequest, TokenScore
from millpond.runner.scores import Scorer

# Told of a prompt's logits: the request, the position of the first row, and [rows, vocab], good until it returns.
Watcher = Callable[[str, int, NDArray[np.float32]], None]

NOT_FINITE_MESSAGE = "the model's logits are not finite numbers"


class ScoredPrompts(NamedTuple):
    """left is what of the step's work is still to be done."""

    left: tuple[ScheduledRequest, ...]
    scores: tuple[RequestScores, ...] = ()
    faults: tuple[RequestFault, ...] = ()


class PromptScorer:
    """Knows by slot whose prompt is to be scored.

    all_logits gives the logits [rows, vocab] of every row of a chunk of at most most_rows tokens, and writes its K/V;
    the next call overwrites them. watcher, where there is one, is shown all that is scored; a prompt that is computed
    again after a preemption is shown again.
    """

    def __init__(
        self, scorer: Scorer, all_logits: Callable[[ScheduledRequest], NDArray[np.float32]], most_rows: int
    ) -> None:
        self._scorer, self._all_logits, self._most_rows = scorer, all_logits, most_rows
        self._prompts: dict[int, Admission] = {}
        self.watcher: Watcher | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._prompts)

    def admit(self, slot: int, admission: Admission) -> None:
        """A request takes a slot. One that has output already, and was preempted, has had its prompt's scores."""
        self.leave(slot)
        if admission.sampling.prompt_logprobs is not None and not admission.output_token_ids:
            self._prompts[slot] = admission

    def leave(self, slot: int) -> None:
        self._prompts.pop(slot, None)

    def take(self, scheduled: Sequence[ScheduledRequest]) -> ScoredPrompts:
        """Score what a step has of these prompts, all but the rows that sample."""
        left: list[ScheduledRequest] = []
        scores: list[RequestScores] = []
        faults: list[RequestFault] = []
        for each in scheduled:
            admission = self._prompts.get(each.slot)
            if admission is None:
                left.append(each)
                continue
            count = len(each.token_ids) - (1 + each.num_drafts if each.samples else 0)
            found = self._scores(each, count, admission)
            if found is None:
                faults.append(RequestFault(each.request_id, NOT_FINITE_MESSAGE))
                continue
            if found:
                scores.append(RequestScores(each.request_id, (), each.first_position + 1, tuple(found)))
            if each.samples:
                self.leave(each.slot)
                rest = each.token_ids[count:]
                left.append(each._replace(first_position=each.first_position + count, token_ids=rest, admission=None))
        return ScoredPrompts(tuple(left), tuple(scores), tuple(faults))

    def _scores(self, each: ScheduledRequest, count: int, admission: Admission) -> list[TokenScore] | None:
        """Of the tokens behind the first `count` of a share; None where a row is not finite."""
        num_top = admission.sampling.prompt_logprobs
        assert num_top is not None
        found: list[TokenScore] = []
        for start in range(0, count, self._most_rows):
            first, stop = each.first_position + start, min(start + self._most_rows, count)
            part = each._replace(first_position=first, token_ids=each.token_ids[start:stop], num_drafts=0)
            targets = admission.prompt_token_ids[first + 1 : first + 1 + stop - start]
            logits = self._all_logits(part)
            for row, token_id in zip(logits, targets, strict=True):
                score = self._scorer.score(row, token_id, num_top)
                if score is None:
                    return None
                found.append(score)
            if self.watcher is not None:
                self.watcher(each.request_id, first, logits)
        return found


def joined(sampled: Sequence[RequestScores], prompts: Sequence[RequestScores]) -> tuple[RequestScores, ...]:
    """One entry for each request of either."""
    if not prompts:
        return tuple(sampled)
    both = {each.request_id: each for each in prompts}
    for each in sampled:
        both[each.request_id] = both.get(each.request_id, each)._replace(sampled=each.sampled, embedding=each.embedding)
    return tuple(both.values())
