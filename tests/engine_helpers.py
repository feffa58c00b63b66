"""Driving a tiny engine to the end of its requests."""

from __future__ import annotations

from millpond.core.request import SamplingParams
from tiny_engine import ids, make_engine


def drive(engine, *, until=200):
    """Step until nothing is left; outputs by request id."""
    outputs = {}
    for _ in range(until):
        if not engine.has_unfinished:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"still unfinished after {until} steps")


def text_of(outputs):
    return "".join(output.text for output in outputs)


def answer(script, prompt="hi", **sampling):
    """The outputs of one request whose tokens are scripted."""
    engine = make_engine(script={"a": script})
    engine.add_request("a", ids(prompt), SamplingParams(**{"max_tokens": 50, **sampling}))
    return drive(engine)["a"]
