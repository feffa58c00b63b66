"""One request's timeline: what happened to it, when, and with which numbers. Short and bounded, whatever happens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from millpond.core.notes import Blocked
from millpond.core.request import Request

# A request that is preempted again and again keeps its beginning and what came last.
MOST_ENTRIES = 48
FIRST_ENTRIES = 16

# What an entry says to a person, of its own numbers.
TEXTS = {
    "queued": "{prompt_tokens:prompt token}, at most {max_tokens} new ones, behind {behind:other}",
    "admitted": "{blocks:block} for {tokens:token}, of which {found_tokens} were found in the prefix cache",
    "resumed": "{blocks:block} for {tokens:token}, of which {found_tokens} were found again",
    "computed": "{tokens:token} in {chunks:step}",
    "preempted": "lost {blocks:block} and {computed_tokens:computed token} {to}",
    "first_token": "after {seconds:.3f} s",
    "finished": "{reason} after {output_tokens:token}",
}
LACKS = {
    "slots": "needs a slot; {free} of {total} are free",
    "blocks": "needs {need:block}; {free} of {total} are free",
    "reserve": "needs {need:block}; {free} of {total} are free",
    "budget": "needs a token of the step; those that run take all {total}",
    "prefix": "waits a step for a block that another request is computing",
    "policy": "another goes first by the policy",
    "disk": "waits for its prefix to be read from disk",
}


class Counted(int):
    """A number that is written with what it counts: f"{Counted(2):block}" is "2 blocks"."""

    def __format__(self, noun: str) -> str:
        number = str(int(self))
        return f"{number} {noun}{'' if self == 1 else 's'}" if noun else number


class Origin(NamedTuple):
    """Where a request came from: other names that it may be asked for by, and the number of the API key, 0 for none."""

    names: tuple[str, ...] = ()
    key: int = 0


NOWHERE = Origin()


@dataclass(slots=True, eq=False)
class Entry:
    """An event, from its first step and moment (seconds of the engine's clock) to its last."""

    event: str
    step: int
    time: float
    numbers: Mapping[str, Any] | Blocked
    last_step: int = -1
    last_time: float = -1.0

    def __post_init__(self) -> None:
        self.last_step, self.last_time = self.step, self.time

    def figures(self) -> dict[str, Any]:
        """Its numbers by their names."""
        if not isinstance(self.numbers, Blocked):
            return dict(self.numbers)
        figures = self.numbers._asdict()
        del figures["request_id"]
        return figures


def text_of(event: str, figures: Mapping[str, Any]) -> str:
    """An entry in words."""
    counted = {name: Counted(value) if isinstance(value, int) else value for name, value in figures.items()}
    if event == "blocked":
        held_back = min(figures["free"], figures["held_back"])
        but = f", {held_back} of them held back from newcomers" if held_back else ""
        return LACKS[figures["on"]].format_map(counted) + but
    by = figures.get("by")
    to = "as it could not grow and was the last in order" if by is None else f"to {by}"
    text = TEXTS[event].format_map({**counted, "to": to})
    why = figures["error"] or figures["cause"] if event == "finished" else None
    return f"{text}: {why}" if why else text


class Counts(NamedTuple):
    """How far a request has come."""

    prompt_tokens: int
    max_tokens: int | None = None
    output_tokens: int = 0
    computed_tokens: int = 0
    blocks: int = 0

    @classmethod
    def of(cls, request: Request) -> Counts:
        return cls(
            request.num_prompt_tokens,
            request.max_tokens,
            request.num_output_tokens,
            request.num_computed_tokens,
            len(request.block_ids),
        )


class Summary(NamedTuple):
    """A timeline in a line. Seconds of waiting are in all; queued_seconds of them came before the first admission.

    blocked_seconds are those of each thing that the request lacked at the head of the queue; the rest of its waiting
    it stood behind others. recomputed_tokens are positions that were prefilled again after preemptions.
    """

    queued_seconds: float
    waiting_seconds: float
    blocked_seconds: dict[str, float]
    preemptions: int
    recomputed_tokens: int

    @property
    def text(self) -> str:
        parts = [f"queued {self.queued_seconds:.3f} s"]
        if self.blocked_seconds:
            lacks = (f"{on} {seconds:.3f} s" for on, seconds in self.blocked_seconds.items())
            parts.append(f"blocked on {', '.join(lacks)}")
        if self.preemptions:
            again = self.waiting_seconds - self.queued_seconds
            parts.append(f"preempted {Counted(self.preemptions):time} and waiting {again:.3f} s for that")
            parts.append(f"{Counted(self.recomputed_tokens):token} computed again")
        return ", ".join(parts)

    def rounded(self) -> dict[str, Any]:
        """As JSON has it, in microseconds."""
        blocked = {on: round(seconds, 6) for on, seconds in self.blocked_seconds.items()}
        seconds = {"queued_seconds": round(self.queued_seconds, 6), "waiting_seconds": round(self.waiting_seconds, 6)}
        return {**self._asdict(), **seconds, "blocked_seconds": blocked}

    @classmethod
    def joined(cls, summaries: Iterable[Summary]) -> Summary:
        """Of the choices of one answer: the waiting of the one that waited longest, everything else together."""
        each = list(summaries)
        longest = max(each, key=lambda it: it.waiting_seconds)
        return longest._replace(
            preemptions=sum(it.preemptions for it in each), recomputed_tokens=sum(it.recomputed_tokens for it in each)
        )


@dataclass(slots=True, eq=False)
class Timeline:
    """What is kept of a request: entries, oldest first (num_left_out of them from the middle are gone), and sums.

    The engine's thread writes; any thread may read, one field at a time. request is None before the engine has taken it
    and after its end, when finish_reason is set. computed is how far its chunks have been written down.
    """

    request_id: str
    arrived: float
    counts_kept: Counts
    origin: Origin = NOWHERE
    request: Request | None = None
    entries: list[Entry] = field(default_factory=list)
    num_left_out: int = 0
    finish_reason: str | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    computed: int = 0
    has_first_token: bool = False
    waiting_since: float | None = None
    blocked_since: float | None = None
    waiting_seconds: float = 0.0
    queued_seconds: float | None = None
    blocked_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting_since = self.arrived

    @property
    def state(self) -> str:
        """`queued` until the engine's next step begins, then waiting or running, in the end finished."""
        request = self.request
        if self.finish_reason is not None:
            return "finished"
        return "queued" if request is None else request.state.value

    @property
    def counts(self) -> Counts:
        request = self.request
        return self.counts_kept if request is None else Counts.of(request)

    @property
    def lack(self) -> str | None:
        """What it lacks at the head of the queue, in words; None where it is not there."""
        last = self.entries[-1] if self.entries else None
        if last is None or last.event != "blocked" or self.blocked_since is None:
            return None
        return text_of("blocked", last.figures())

    def summary(self, now: float) -> Summary:
        waiting, since = self.waiting_seconds, self.waiting_since
        if since is not None:
            waiting += now - since
        blocked, since = dict(self.blocked_seconds), self.blocked_since
        if since is not None and isinstance(last := self.entries[-1].numbers, Blocked):
            blocked[last.on] = blocked.get(last.on, 0.0) + now - since
        queued = waiting if self.queued_seconds is None else self.queued_seconds
        return Summary(queued, waiting, blocked, self.num_preemptions, self.num_recomputed_tokens)

    def add(self, event: str, step: int, time: float, **numbers: Any) -> None:
        self._append(Entry(event, step, time, numbers))

    def _append(self, entry: Entry) -> None:
        self.entries.append(entry)
        if len(self.entries) > MOST_ENTRIES:
            del self.entries[FIRST_ENTRIES]
            self.num_left_out += 1

    def block(self, blocked: Blocked, step: int, time: float) -> None:
        """It is the head of waiting and was not admitted: one entry as long as it lacks the same thing."""
        last = self.entries[-1]
        if self.blocked_since is not None and isinstance(last.numbers, Blocked):
            if last.numbers.on == blocked.on:
                last.numbers, last.last_step, last.last_time = blocked, step, time
                return
            self.unblock(time)
        self._append(Entry("blocked", step, time, blocked))
        self.blocked_since = time

    def unblock(self, time: float) -> None:
        """It lacks what it lacked no more, or is not the head any more."""
        last, since = self.entries[-1], self.blocked_since
        if since is not None and isinstance(last.numbers, Blocked):
            on = last.numbers.on
            self.blocked_seconds[on] = self.blocked_seconds.get(on, 0.0) + time - since
            self.blocked_since, last.last_time = None, time

    def stop_waiting(self, time: float) -> None:
        """It was admitted, or ended."""
        self.unblock(time)
        if self.waiting_since is not None:
            self.waiting_seconds += time - self.waiting_since
            self.waiting_since = None
        if self.queued_seconds is None:
            self.queued_seconds = self.waiting_seconds

    def compute(self, num_tokens: int, again: bool, step: int, time: float) -> None:
        """A step computed so many of the tokens that it was admitted with: one entry for all steps of an admission."""
        self.computed += num_tokens
        if again:
            self.num_recomputed_tokens += num_tokens
        last = self.entries[-1]
        if last.event == "computed" and not isinstance(last.numbers, Blocked):
            chunks, tokens = last.numbers["chunks"] + 1, last.numbers["tokens"] + num_tokens
            last.numbers, last.last_step, last.last_time = {"tokens": tokens, "chunks": chunks}, step, time
        else:
            self.add("computed", step, time, tokens=num_tokens, chunks=1)
