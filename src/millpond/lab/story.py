"""A trace of lab/explorer.py in words, one line for each action."""

from __future__ import annotations

from collections.abc import Iterable

from millpond.core.step import SchedulerOutput
from millpond.errors import InvariantError
from millpond.lab.explorer import Finding
from millpond.lab.world import Action, World, counted


def tell(finding: Finding) -> tuple[str, ...]:
    """The trace once more, action by action, and last the rule that breaks."""
    world = World.empty(finding.case, finding.kind)
    lines: list[str] = []
    for action in finding.trace:
        before, step = world.in_flight, world.scheduler.counters.iterations
        try:
            world.do(action)
        except InvariantError as broken:
            return (*lines, f"{_attempt(action, step)}: {broken}")
        lines.append(_deed(action, before, world))
    return (*lines, finding.message)


def _attempt(action: Action, step: int) -> str:
    if action.verb == "schedule":
        return f"step {step}"
    return {"update": "its result", "fail": "its failure"}.get(action.verb, f"{action.verb} {action.request_id}")


def _deed(action: Action, before: SchedulerOutput | None, world: World) -> str:
    if action.verb == "add":
        length, is_twin, choice = (*action.numbers, 0, 0)[:3]
        kind = {"priority": f", priority {choice}", "fair": f", of tenant {choice}"}.get(world.case.policy, "")
        text = f"add {action.request_id} with a prompt of {counted(length, 'token')}"
        return text + " of the twins" * is_twin + kind
    if action.verb == "schedule" and world.in_flight is not None:
        return "; ".join([*_decision(world.in_flight), f"{counted(world.scheduler.pool.num_free, 'block')} free"])
    if action.verb == "update" and before is not None:
        return f"its result: {', '.join(_results(action, before)) or 'nothing'}"
    return "its failure, and the end of who was in it" if action.verb == "fail" else f"abort {action.request_id}"


def _decision(output: SchedulerOutput) -> Iterable[str]:
    yield f"step {output.step}"
    for verb, names in (("releases", output.released), ("preempts", output.preempted), ("admits", output.admitted)):
        if names:
            yield f"{verb} {', '.join(names)}"
    if output.loads:
        yield f"loads {counted(len(output.loads), 'block')}"
    for each in output.scheduled:
        guesses = f", the last {each.num_drafts} guessed" * (each.num_drafts > 0)
        yield f"{each.request_id} runs {counted(len(each.token_ids), 'token')}{guesses}, holds {len(each.block_ids)}"


def _results(action: Action, output: SchedulerOutput) -> Iterable[str]:
    for each, (accepted, ending) in zip(output.scheduled, action.outcomes, strict=True):
        yield f"{each.request_id} {ending}" + f" behind {counted(accepted, 'right guess')}" * (accepted > 0)
