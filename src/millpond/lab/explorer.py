"""Every state that a scheduler can reach from empty, breadth first, so that the way to a broken rule is a shortest one.

States that differ in names alone count once (World.key), so requests may come and go for ever and there are still
finitely many. From each of them, steps alone must lead to an empty scheduler, whatever the steps give.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from millpond.core.scheduler import Scheduler
from millpond.errors import ConfigError, InvariantError
from millpond.lab.world import Action, Case, World

MOST_STATES = 500_000  # of a search: some kilobytes each while they wait to be looked at
STEP_VERBS = ("schedule", "update", "fail")


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule and a shortest trace to it from the empty scheduler of a case."""

    case: Case
    kind: type[Scheduler]
    trace: tuple[Action, ...]
    message: str


@dataclass(frozen=True, slots=True)
class Explored:
    """How much was seen: states, transitions between them, and the most steps that any state takes to drain."""

    num_states: int
    num_transitions: int
    longest_drain: int
    finding: Finding | None = None


@dataclass(slots=True)
class Explorer:
    """Explores the schedulers of all the cases at once, so that a finding is the shortest in any of them.

    kind is Scheduler, or a subclass of it with a fault. most_actions bounds the length of a trace where it is given;
    what a bounded search has not reached it does not ask to drain.
    """

    cases: Sequence[Case]
    kind: type[Scheduler] = Scheduler
    most_actions: int | None = None
    _ids: dict[tuple[int, bytes], int] = field(default_factory=dict)
    _parents: list[tuple[int, Action | None]] = field(default_factory=list)  # how each state was reached first
    _case_of: list[int] = field(default_factory=list)
    _steps: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # (state, 1 if a step begins) behind a step
    _num_transitions: int = 0

    def run(self) -> Explored:
        """Explore to the end, or to the first broken rule. Raises ConfigError for more than MOST_STATES."""
        queue: deque[tuple[int, World, int]] = deque()
        for index, case in enumerate(self.cases):
            world = World.empty(case, self.kind)
            queue.append((self._number(index, world, -1, None), world, 0))
        while queue:
            state, world, depth = queue.popleft()
            if self.most_actions is not None and depth == self.most_actions:
                continue
            actions = list(world.actions())
            for action in actions:
                # Behind its last action the state itself is wanted no more.
                after = world if action is actions[-1] else world.copy()
                try:
                    after.do(action)
                except InvariantError as broken:
                    return self._explored(0, self._finding(state, (action,), str(broken)))
                self._num_transitions += 1
                known = len(self._ids)
                number = self._number(self._case_of[state], after, state, action)
                if number == MOST_STATES:
                    raise ConfigError(
                        f"a scheduler of {self.cases[self._case_of[state]]} has more than {MOST_STATES} states, which "
                        f"takes gigabytes: ask for smaller bounds (--positions, --requests, --guesses)"
                    )
                if action.verb in STEP_VERBS:
                    self._steps.setdefault(state, []).append((number, action.verb == "schedule"))
                if number == known:
                    queue.append((number, after, depth + 1))
        return self._check_that_all_drain()

    def keys(self) -> set[tuple[int, bytes]]:
        """The states found so far: the index of their case, and World.key()."""
        return set(self._ids)

    def _number(self, case: int, world: World, parent: int, action: Action | None) -> int:
        """The number of a state, a new one for a state that was not seen yet."""
        number = self._ids.setdefault((case, world.key()), len(self._ids))
        if number == len(self._parents):
            self._parents.append((parent, action))
            self._case_of.append(case)
        return number

    def _trace_to(self, state: int) -> tuple[Action, ...]:
        trace: list[Action] = []
        while True:
            state, action = self._parents[state]
            if action is None:
                return tuple(reversed(trace))
            trace.append(action)

    def _finding(self, state: int, actions: tuple[Action, ...], message: str) -> Finding:
        case = self.cases[self._case_of[state]]
        return Finding(case, self.kind, (*self._trace_to(state), *actions), message)

    def _explored(self, longest_drain: int, finding: Finding | None = None) -> Explored:
        return Explored(len(self._ids), self._num_transitions, longest_drain, finding)

    def _check_that_all_drain(self) -> Explored:
        """Depth first through the steps: the longest way to the end, or a circle, which would be a way without one."""
        drain: dict[int, int] = {}
        for start in range(len(self._ids)):
            path = [(start, iter(self._steps.get(start, ())))]
            on_path = {start}
            while path and start not in drain:
                state, steps = path[-1]
                following = next((after for after, _ in steps if after not in drain), None)
                if following is None:
                    drain[state] = max(
                        (drain[after] + begins for after, begins in self._steps.get(state, ())), default=0
                    )
                    on_path.discard(state)
                    path.pop()
                elif following in on_path:
                    return self._explored(0, self._finding(following, (), "INV-7: steps alone come back to this state"))
                else:
                    on_path.add(following)
                    path.append((following, iter(self._steps.get(following, ()))))
        return self._explored(max(drain.values()))
