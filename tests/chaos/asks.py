"""What the clients ask for: prompts that share beginnings, ways to sample, and the one answer each has to get."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chaos.wire import Answer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LETTERS = "abcdefghijklmnopqrstuvwxyz      "


@dataclass(frozen=True, slots=True)
class Ask:
    """number tells asks apart; body is what goes out unless a client adds to it."""

    number: int
    path: str
    body: dict[str, Any]

    def streamed(self) -> dict[str, Any]:
        return {**self.body, "stream": True, "stream_options": {"include_usage": True}}


def make_asks(count: int, seed: int, longest: int) -> list[Ask]:
    """So many different asks whose prompts and answers have at most `longest` tokens together."""
    draw = random.Random(seed)
    beginnings = ["".join(draw.choices(LETTERS, k=48)) for _ in range(3)]
    return [_ask(draw, number, beginnings, longest) for number in range(count)]


def _ask(draw: random.Random, number: int, beginnings: list[str], longest: int) -> Ask:
    text = draw.choice(["", *beginnings]) + "".join(draw.choices(LETTERS, k=draw.randint(4, 60)))
    if draw.random() < 0.1:
        text += "".join(draw.choices(LETTERS, k=longest // 2))
    body: dict[str, Any] = {"max_tokens": draw.randint(1, 48), "seed": number}
    if draw.random() < 0.3:
        body["temperature"] = 0
    else:
        body |= {"temperature": draw.choice([0.7, 1.0]), "top_p": draw.choice([0.9, 1.0])}
    extras: list[dict[str, Any]] = [
        {"ignore_eos": True},
        {"stop": ["e", "th"], "stop_token_ids": list(range(60, 90))},
        {"logit_bias": {"2": 6}},
        {"repetition_penalty": 1.2},
        {"logit_bias": {"104": 4, "105": -100}},
        {"min_tokens": 1, "bad_words": ["a"]},
        {"allowed_token_ids": list(range(100, 130)), "ignore_eos": True},
        {"n": draw.randint(2, 3)},
        {"prompt_logprobs": 1},
    ]
    for extra in draw.sample(extras, draw.randint(0, 2)):
        body |= extra
    is_scored = draw.random() < 0.5
    if draw.random() < 0.4:
        body["messages"] = [{"role": "user", "content": text}]
        return Ask(number, CHAT, {**body, "logprobs": True, "top_logprobs": 2} if is_scored else body)
    body["prompt"] = [text, text[::-1]] if draw.random() < 0.1 else text
    return Ask(number, COMPLETIONS, {**body, "logprobs": 2} if is_scored else body)


def can_stream(ask: Ask) -> bool:
    return "prompt_logprobs" not in ask.body


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    """Of a whole answer what must be the same for everyone who asks the same."""
    choices = {}
    for choice in answer["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        rest = {key: choice[key] for key in ("finish_reason", "prompt_logprobs") if key in choice}
        choices[choice["index"]] = {"text": text, "logprobs": choice["logprobs"], **rest}
    prompt_scores = {key: answer[key] for key in ("prompt_logprobs",) if key in answer}
    return {"choices": choices, "usage": counted(answer["usage"]), **prompt_scores}


def counted(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """The totals; what of the prompt was found depends on who came before."""
    return usage and {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def events(body: bytes) -> Iterator[Any]:
    """The payloads of a stream as far as it came; the text of what is no JSON. Raises ValueError for a stray line."""
    for block in body.split(b"\n\n")[:-1]:
        if block == b":":  # to see whether a client that has half closed is there
            continue
        if not block.startswith(b"data: ") or b"\n" in block:
            raise ValueError(f"not one data line: {block[:100]!r}")
        data = block.removeprefix(b"data: ")
        yield "[DONE]" if data == b"[DONE]" else json.loads(data)


@dataclass(slots=True)
class Streamed:
    """What a stream came to: the same essence, its error if it had one, and whether it ended as a good one does."""

    essence: dict[str, Any]
    error: dict[str, Any] | None = None
    is_done: bool = False


def join(answer: Answer) -> Streamed:
    """Put the pieces of a stream together again. Raises ValueError for anything behind its end."""
    got = Streamed({"choices": {}, "usage": None})
    for event in events(answer.body):
        if got.is_done or got.error is not None:
            raise ValueError(f"an event behind the last: {event!r:.100}")
        if event == "[DONE]":
            got.is_done = True
        elif "error" in event:
            got.error = event["error"]
        else:
            got.essence["usage"] = counted(event["usage"])
            for choice in event["choices"]:
                _add(got.essence["choices"], choice)
    return got


def _add(choices: dict[int, dict[str, Any]], choice: dict[str, Any]) -> None:
    known = choices.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
    if known["finish_reason"] is not None:
        raise ValueError(f"choice {choice['index']} goes on behind its end")
    known["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    known["finish_reason"] = choice["finish_reason"]
    if (scores := choice["logprobs"]) is not None:
        before = known["logprobs"] or dict.fromkeys(scores)
        known["logprobs"] = {name: values and (before[name] or []) + values for name, values in scores.items()}


def is_beginning(part: Streamed, whole: dict[str, Any]) -> bool:
    """Whether a stream that was broken off had gone the right way until then."""
    return all(
        whole["choices"][index]["text"].startswith(choice["text"]) for index, choice in part.essence["choices"].items()
    )
