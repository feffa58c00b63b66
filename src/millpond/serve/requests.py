"""Why is my request waiting? GET /v1/requests has all that are unfinished, GET /v1/requests/{request_id} a timeline.

No text of a prompt or an answer is in them. With API keys, who asks sees the requests of its own key, and of the
others how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response

from millpond.core.step import StepStats
from millpond.engine.timeline import Entry, Timeline, text_of
from millpond.engine.timelines import Timelines
from millpond.errors import RequestNotFoundError
from millpond.serve.context import ServeContext
from millpond.serve.errors import described
from millpond.serve.tenants import API_KEY

DEFAULT_ROWS = 100
MOST_ROWS = 2000
HIDDEN = "another key's request"


def requests_router(context: ServeContext) -> APIRouter:
    router = APIRouter()
    timelines = context.engine.timelines
    offset = context.now() - timelines.clock()  # of the time of day, once: a moment is to have one date

    @router.get("/v1/requests", response_model=None, responses=described(400, 401))
    async def list_requests(limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = DEFAULT_ROWS) -> Response:
        now, places = timelines.clock(), timelines.places()
        # Those that run come first; those that wait follow in the order of the queue.
        own = [each for each in timelines.unfinished if each.origin.key == API_KEY.get()]
        own.sort(key=lambda each: places.get(each.request_id, -1))
        rows = [_row(each, now, places) for each in own[:limit]]
        engine = _engine(context, places, now)
        return JSONResponse({"object": "list", **engine, "unfinished": len(own), "data": rows})

    @router.get("/v1/requests/{request_id}", response_model=None, responses=described(401, 404))
    async def get_request(request_id: str) -> Response:
        found = [each for each in timelines.find(request_id) if each.origin.key == API_KEY.get()]
        if not found:
            raise RequestNotFoundError(
                f"there is no request {request_id[:200]!r} of yours here, neither unfinished nor among the last "
                f"{timelines.most_finished} that have ended"
            )
        now, places = timelines.clock(), timelines.places()
        whole = [{**_row(each, now, places), **_timeline(timelines, each, offset)} for each in found]
        return JSONResponse({"object": "request", "id": request_id, "requests": whole})

    return router


def _engine(context: ServeContext, places: Mapping[str, int], now: float) -> dict[str, Any]:
    """What all requests share. clock and the counters of tokens are for whoever looks twice and divides."""
    metrics, timelines, last = context.engine.metrics, context.engine.timelines, context.engine.last_step
    scheduler, blocked = timelines.scheduler, timelines.scheduler.notes.blocked
    head = timelines.get(next(iter(places), "") if blocked is None else blocked.request_id)
    return {
        "model": context.model_names[0],
        "clock": round(now, 6),
        "steps": scheduler.counters.iterations,
        "generated_tokens": metrics.generation_tokens,
        "forward_tokens": scheduler.counters.forward_tokens,
        "preemptions": scheduler.counters.preemptions,
        "running": scheduler.num_running,
        "waiting": len(places),
        "head_waits_for": None if head is None else _waiting_for(head, places),
        "slots": {"total": scheduler.max_num_seqs, "free": len(scheduler.free_slots)},
        "blocks": {
            "total": scheduler.pool.num_blocks,
            "free": scheduler.pool.num_free,
            "held_back": scheduler.watermark_blocks,
            "size": scheduler.block_size,
        },
        "last_step": None if last is None else _step(last),
    }


def _step(last: StepStats) -> dict[str, Any]:
    seconds = last.schedule_seconds + last.execute_seconds + last.update_seconds + last.text_seconds
    return {"tokens": last.num_tokens, "generated_tokens": last.num_sampled, "seconds": round(seconds, 6)}


def _row(timeline: Timeline, now: float, places: Mapping[str, int]) -> dict[str, Any]:
    """One request as it is now."""
    state, counts = timeline.state, timeline.counts
    last = timeline.entries[-1].time if state == "finished" else now
    return {
        "id": timeline.request_id,
        "state": state,
        "seconds": round(last - timeline.arrived, 6),
        "prompt_tokens": counts.prompt_tokens,
        "max_tokens": counts.max_tokens,
        "output_tokens": counts.output_tokens,
        "computed_tokens": counts.computed_tokens,
        "blocks": counts.blocks,
        "preemptions": timeline.num_preemptions,
        "waiting_for": _waiting_for(timeline, places),
    }


def _waiting_for(timeline: Timeline, places: Mapping[str, int]) -> str | None:
    """Only the head of the queue lacks anything but its place in it."""
    place = places.get(timeline.request_id)
    if place is None or timeline.state not in ("queued", "waiting"):
        return None
    if place:
        return "behind 1 other" if place == 1 else f"behind {place} others"
    return timeline.lack or "the next step"


def _timeline(timelines: Timelines, timeline: Timeline, offset: float) -> dict[str, Any]:
    """What has happened; offset is what the time of day is ahead of the engine's clock."""
    summary = timeline.summary(timelines.clock())
    entries = list(timeline.entries)
    return {
        "created": round(offset + timeline.arrived, 3),
        "finish_reason": timeline.finish_reason,
        "entries": [_entry(timelines, timeline, each) for each in entries],
        "entries_left_out": timeline.num_left_out,
        "summary": {**summary.rounded(), "text": summary.text},
    }


def _entry(timelines: Timelines, timeline: Timeline, entry: Entry) -> dict[str, Any]:
    figures = entry.figures()
    if by := figures.get("by"):
        other = timelines.get(by)
        if other is None or other.origin.key != timeline.origin.key:
            figures["by"] = HIDDEN
    span: dict[str, Any] = {"step": entry.step, "seconds": round(entry.time - timeline.arrived, 6)}
    if entry.last_step > entry.step or entry.last_time > entry.time:
        span |= {"last_step": entry.last_step, "last_seconds": round(entry.last_time - timeline.arrived, 6)}
    return {"event": entry.event, **span, **figures, "text": text_of(entry.event, {**span, **figures})}
