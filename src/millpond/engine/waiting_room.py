"""Who waits for the first step of an answer, and whether there is room for more. Owned by the event loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millpond.config import LoadLimits
from millpond.engine.drain_rate import DrainRate
from millpond.errors import InvalidRequestError, OverloadedError


class WaitingRoom:
    """Requests from the moment they are taken: waiting until a step admits them, then inside until they end.

    A preempted request stays inside. A call of several requests is let in whole or not at all.
    """

    def __init__(self, limits: LoadLimits, max_num_seqs: int) -> None:
        self._limits = limits
        self._max_num_seqs = max_num_seqs
        self._waiting: dict[str, int] = {}
        self._inside: set[str] = set()
        self._waiting_tokens = 0
        self._rate = DrainRate()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the prompts that wait."""
        return self._waiting_tokens

    def check(self, now: float, num_requests: int, num_tokens: int, *, slots_are_free: bool) -> None:
        """Raise OverloadedError, with the time to wait, where a call finds no room; num_tokens counts its prompts'.

        A slot that is free is room, unless somebody was left waiting beside it for want of blocks. A prompt that is
        longer than all that may wait is let in where nobody waits. Raises InvalidRequestError for a list that no
        empty queue could take.
        """
        limits = self._limits
        self._check_possible(num_requests, num_tokens)
        free_slots = max(0, self._max_num_seqs - len(self._inside)) if slots_are_free else 0
        over = len(self._waiting) + num_requests - limits.max_waiting_requests - free_slots
        if over > 0:
            beside = f" beside {free_slots} free slots" if free_slots else ""
            waiting = f"{len(self._waiting)} requests wait, of at most {limits.max_waiting_requests}{beside}"
            raise self._overloaded(now, waiting, num_requests, num_tokens, "requests", over, 0)
        over = self._waiting_tokens + num_tokens - limits.max_waiting_tokens
        if over > 0 and self._waiting:
            waiting = f"prompts of {self._waiting_tokens} tokens wait, of at most {limits.max_waiting_tokens}"
            raise self._overloaded(now, waiting, num_requests, num_tokens, "tokens", 0, over)

    def _check_possible(self, num_requests: int, num_tokens: int) -> None:
        most = self._max_num_seqs + self._limits.max_waiting_requests
        if num_requests > most:
            raise InvalidRequestError(
                f"the call makes {num_requests} requests, and this server takes at most {most} at once; split it",
                "prompt",
            )
        if num_requests > 1 and num_tokens > self._limits.max_waiting_tokens:
            raise InvalidRequestError(
                f"the prompts of the call have {num_tokens} tokens together, and at most "
                f"{self._limits.max_waiting_tokens} may wait at once; split it",
                "prompt",
            )

    def _overloaded(
        self, now: float, waiting: str, num_requests: int, num_tokens: int, bound: str, requests: int, tokens: int
    ) -> OverloadedError:
        seconds = self._rate.seconds_until(now, requests, tokens)
        asked = f"a call of {num_requests} with {num_tokens} prompt tokens" if num_requests > 1 else "this one"
        return OverloadedError(
            f"the server is overloaded: {waiting}, which leaves no room for {asked}; try again in {seconds} s",
            bound,
            seconds,
        )

    def seconds_to_wait(self, now: float, num_before: int, *, slots_are_free: bool) -> float:
        """How long a request waits behind so many others, as measured; 0 where a slot is free or none has finished."""
        if slots_are_free and len(self._inside) + num_before < self._max_num_seqs:
            return 0.0
        return self._rate.seconds_measured(now, num_before + 1, 0) or 0.0

    @property
    def mean_output_tokens(self) -> float:
        """Of the answers that finished of late; 0 where none has."""
        return self._rate.mean_output_tokens

    @property
    def num_inside(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._inside)

    def enter(self, now: float, num_tokens_of: Mapping[str, int]) -> None:
        """Take requests in, by id, with the tokens of their prompts. check() comes first."""
        if not self._waiting and not self._inside:
            self._rate.begin(now)
        self._waiting.update(num_tokens_of)
        self._waiting_tokens += sum(num_tokens_of.values())

    def admit(self, request_ids: Iterable[str]) -> None:
        """A step admitted these, for the first time or again; ids that have left are passed over."""
        for request_id in request_ids:
            num_tokens = self._waiting.pop(request_id, None)
            if num_tokens is not None:
                self._waiting_tokens -= num_tokens
                self._inside.add(request_id)

    def finish(self, now: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """An answer is complete, which is what the rate is measured by."""
        self._rate.finish(now, num_prompt_tokens, num_output_tokens)

    def leave(self, request_ids: Iterable[str]) -> None:
        """These have ended, in whatever way."""
        for request_id in request_ids:
            self._waiting_tokens -= self._waiting.pop(request_id, 0)
            self._inside.discard(request_id)
