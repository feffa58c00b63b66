"""The bodies of the API's answers, whole and in chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from millpond.core.request import FinishReason
from millpond.core.step import TokenScore
from millpond.engine.outputs import RequestOutput
from millpond.errors import EngineError, InvalidRequestError


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk of one answer repeats."""

    id: str
    kind: str
    created: int
    model: str

    def wrap(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(slots=True)
class Tally:
    """Tokens of the choices of one answer, from the latest output of each; n choices of one prompt share its tokens."""

    n: int = 1
    _prompt: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)
    _completion: dict[int, int] = field(default_factory=dict)

    def note(self, index: int, output: RequestOutput) -> None:
        """The choice with this index has come so far."""
        if index not in self._completion:
            place, found = index // self.n, output.num_cached_tokens
            self._prompt[place] = output.num_prompt_tokens
            # Of choices of one prompt the others find what the first computes, which saved the caller nothing.
            self._cached[place] = min(found, self._cached.get(place, found))
        self._completion[index] = output.num_output_tokens

    def usage(self) -> dict[str, Any]:
        prompt, completion = sum(self._prompt.values()), sum(self._completion.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


@dataclass(slots=True)
class ChoiceText:
    """One choice of a whole answer while it grows."""

    pieces: list[str] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: tuple[TokenScore, ...] = ()
    finish_reason: str | None = None

    def add(self, output: RequestOutput) -> None:
        self.pieces.append(output.text)
        self.scores += output.scores
        self.prompt_scores = output.prompt_scores or self.prompt_scores
        self.finish_reason = reason_of(output)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def num_scores(self) -> int:
        """The log probabilities that there are to tell."""
        return sum(1 + len(score.top) for score in (*self.scores, *self.prompt_scores))


def reason_of(output: RequestOutput) -> str | None:
    """`stop`, `length` or None. Raises EngineError for an answer that ended in any other way, and InvalidRequestError
    where that is the request's own doing."""
    reason = output.finish_reason
    if reason is None or reason in (FinishReason.STOP, FinishReason.LENGTH):
        return reason and reason.value
    if output.error_param is not None:
        raise InvalidRequestError(output.error or "", output.error_param)
    raise EngineError(output.error or f"the answer ended with {reason.value}")


def completion_choice(
    index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def chat_choice(
    index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}


def chat_delta(
    index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def model_card(model_id: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {
        "id": model_id,
        "object": "model",
        "created": created,
        "owned_by": "millpond",
        "max_model_len": max_model_len,
    }
