"""An engine made of a script, for commands that need one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from millpond.cli import loading
from millpond.core.request import FinishReason
from millpond.engine.outputs import RequestOutput
from millpond.errors import InvalidRequestError


class LetterTokenizer:
    """A token is the code point of a letter."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, text: str) -> list[int]:
        return self.encode(text)


class PlainTemplate:
    """Messages as "role:content|", in order."""

    is_missing = False

    def render(self, messages, *, add_generation_prompt=True):
        return "".join(f"{each['role']}:{each['content']}|" for each in messages)


@dataclass
class FakeEngine:
    """Answers every prompt with the same pieces of text, one a step; on_step is called at the top of each."""

    pieces: tuple[str, ...] = ("Par", "is", ".")
    reason: FinishReason = FinishReason.STOP
    error: str | None = None
    max_total_tokens: int = 1000
    prompts: list[str] = field(default_factory=list)
    samplings: list = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    active: dict[str, list[str]] = field(default_factory=dict)
    on_step: object = None
    model_name: str = "fake"
    generates: bool = True

    def __post_init__(self):
        self.tokenizer = LetterTokenizer()
        self.chat_template = PlainTemplate()
        self.limits = SimpleNamespace(
            max_total_tokens=self.max_total_tokens,
            vocab_size=0x110000,
            generates=True,
            check_generates=self._check_generates,
        )

    def _check_generates(self) -> None:
        if not self.generates:
            raise InvalidRequestError("this model makes embeddings", "model")

    @property
    def has_unfinished(self) -> bool:
        return bool(self.active)

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], sampling) -> None:
        if len(prompt_token_ids) >= self.max_total_tokens:
            raise InvalidRequestError("the prompt is too long", "prompt")
        assert request_id not in self.active
        self.prompts.append("".join(map(chr, prompt_token_ids)))
        self.samplings.append(sampling)
        self.active[request_id] = list(self.pieces)

    def abort(self, request_id: str) -> None:
        if self.active.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def step(self) -> list[RequestOutput]:
        if self.on_step is not None:
            self.on_step()
        outputs = []
        for request_id, pieces in list(self.active.items()):
            text = pieces.pop(0)
            reason = None if pieces else self.reason
            if reason:
                del self.active[request_id]
            error = self.error if reason is FinishReason.ERROR else None
            outputs.append(RequestOutput(request_id, (ord(text[0]),), text, reason, 1, 1, error))
        return outputs


@pytest.fixture
def engine(monkeypatch) -> FakeEngine:
    """A fake engine that every command opens; its `opened` holds the (model, config) it was asked for."""
    fake = FakeEngine()
    fake.opened = []

    def open_engine(model, config, settings, chat_template=None, compiler=None):
        fake.opened.append((model, config))
        fake.given_template = chat_template
        return fake

    monkeypatch.setattr(loading, "open_engine", open_engine)
    return fake


@pytest.fixture(autouse=True)
def no_first_start(monkeypatch):
    """Whether these folders hold compiled code or not, no process is started to compile."""
    monkeypatch.setattr(loading, "compiler_for_first_start", lambda settings: nullcontext())
