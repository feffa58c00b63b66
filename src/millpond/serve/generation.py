"""What completions and chat do alike around the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from millpond.core.sampling import SamplingParams
from millpond.engine.call import EngineRequest
from millpond.errors import InvalidRequestError
from millpond.serve.errors import described
from millpond.serve.protocol import GenerationRequest
from millpond.serve.responses import Tally

# What a route that generates may answer with.
GENERATION_RESPONSES = described(400, 401, 404, 413, 429, 503, 504, streams=True)


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Let an InvalidRequestError name the field as the caller wrote it and not as the engine calls it."""
    try:
        yield
    except InvalidRequestError as error:
        param = names.get(error.param or "", error.param)
        raise InvalidRequestError(renamed(str(error), names), param) from error


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A message with fields by their other names; one without an underscore may be a word, but for the first."""
    for name, own in names.items():
        text = re.sub(rf"\b{name}\b" if "_" in name else rf"^{name}\b", own, text)
    return text


def usage_of(body: GenerationRequest, tally: Tally) -> dict[str, Any]:
    """The usage of a chunk that is not the last: where totals were asked for it says that it carries none, or, where
    they were asked for all along, what there is so far."""
    if not body.include_usage:
        return {}
    return {"usage": tally.usage() if body.continuous_usage else None}


def choice_requests(
    stem: str, prompts: Sequence[Sequence[int]], sampling: SamplingParams, terms: Mapping[str, Any]
) -> list[EngineRequest]:
    """The engine's requests for an answer's choices, in the order of their indices: n for each prompt.

    terms are what they share beside their sampling (ServeContext.terms).
    """
    choices = sampling.choices()
    return [
        EngineRequest(f"{stem}-{index}", ids, choice, **terms)
        for index, (ids, choice) in enumerate((ids, choice) for ids in prompts for choice in choices)
    ]
