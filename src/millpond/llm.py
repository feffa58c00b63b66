"""LLM: the offline loop. Prompts in, completions out, in the order of the prompts."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from millpond.config import EngineConfig
from millpond.core.request import FinishReason
from millpond.core.sampling import SamplingParams
from millpond.core.step import TokenScore
from millpond.engine.embeddings import embedding_params, numbers_of, shortened
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.errors import EngineDeadError, EngineError, InvalidRequestError

Message = Mapping[str, Any]
Prompt = str | Sequence[int]
T = TypeVar("T")


@dataclass(slots=True)
class CompletionOutput:
    """One answer. finish_reason is `stop`, `length` or `error`; error says what went wrong, for the last alone.

    logprobs has an entry for each token where sampling_params ask for them.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenScore] | None = None

    def add(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.new_token_ids
        self.finish_reason = output.finish_reason
        self.error = output.error
        if self.logprobs is not None:
            self.logprobs += output.scores


@dataclass(slots=True)
class Completion:
    """What one prompt got: as many outputs as its sampling_params say n. prompt is None where token ids were given.

    prompt_logprobs, where they were asked for, has an entry for each of the prompt's tokens; that of the first is None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenScore | None] | None = None

    def choices(self, sampling: SamplingParams) -> dict[str, SamplingParams]:
        """The requests of the outputs, by id."""
        choices = sampling.choices()
        return {self.request_id if i == 0 else f"{self.request_id}-{i}": each for i, each in enumerate(choices)}

    def open(self, sampling: SamplingParams) -> None:
        """One empty output for each answer to come."""
        logprobs = sampling.logprobs is not None
        self.outputs = [CompletionOutput(index, logprobs=[] if logprobs else None) for index in range(sampling.n)]

    def add(self, index: int, output: RequestOutput) -> None:
        self.outputs[index].add(output)
        if output.prompt_scores is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = [None, *output.prompt_scores]


class Asked(NamedTuple):
    """A prompt, and how it is to be answered."""

    completion: Completion
    sampling: SamplingParams
    priority: int
    tenant: str


class LLM:
    """A model for offline use: `LLM("smollm2").generate(["Once upon a time"], SamplingParams(max_tokens=32))`.

    model is a known name, a file, a folder or a repository; chat_template, a template or its file, takes the place of
    the model's own; the other keyword arguments are those of EngineConfig. Where prefixes are kept on disk
    (prefix_dir), close it at the end, or use it in a `with`: what is not yet written is then.
    """

    def __init__(self, model: str | Path = "smollm2", *, chat_template: str | None = None, **settings: Any) -> None:
        # Here and not above: build.py brings in numba, which the control plane does without.
        from millpond.build import build_engine

        with _packing_bar() as progress:
            engine = build_engine(
                model, EngineConfig(**settings), notify=_tell, progress=progress, chat_template=chat_template
            )
        self._take(engine)

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """An LLM over an engine that exists already, which nobody else may step."""
        llm = cls.__new__(cls)
        llm._take(engine)
        return llm

    def _take(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers = itertools.count()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what prefix_dir still lacks, for some seconds at most. Nothing can be asked afterwards."""
        self._is_closed = True
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Complete each prompt (text or token ids), in order. progress None shows a bar on a terminal only.

        sampling_params is one for all, or one for each prompt; so is priority, of which a smaller one goes first with
        policy="priority", and tenant, which has its share with policy="fair". Raises InvalidRequestError before
        anything runs, EngineDeadError after close(). Ctrl-C aborts everything and leaves the LLM ready for the next
        call.
        """
        completions = [self._completion(prompt) for prompt in _as_list(prompts)]
        return self._run(completions, sampling_params, priority, tenant, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Answer one conversation (a list of messages) or several, through the model's chat template.

        The rest is as in generate. Raises InvalidRequestError as that does, for a model without a template, and for
        what the template refuses.
        """
        self.engine.limits.check_generates()
        completions = []
        for conversation in _as_conversations(messages):
            text = self.engine.chat_template.render(conversation)
            token_ids = self.engine.tokenizer.encode_chat(text)
            completions.append(Completion(self._next_id(), text, token_ids))
        return self._run(completions, sampling_params, priority, tenant, progress)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, progress: bool | None = None
    ) -> list[list[float]]:
        """The vector of each prompt (text or token ids), in order, of a model that is made for embeddings.

        Each has length 1; with dimensions it is so many of the first numbers, of length 1 again. progress and Ctrl-C
        are as in generate. Raises InvalidRequestError before anything runs, for a language model too; EngineError
        where a prompt fails, EngineDeadError after close().
        """
        completions = [self._completion(prompt) for prompt in _as_list(prompts)]
        self.engine.limits.check_dimensions(dimensions)
        found: dict[str, bytes] = {}

        def take(output: RequestOutput) -> None:
            if output.embedding is None:
                raise EngineError(f"no embedding came of {output.request_id}: {output.error}")
            found[output.request_id] = output.embedding

        asked = [Asked(each, embedding_params(), 0, "") for each in completions]
        self._answer(asked, lambda completion, index: take, "embedding", progress)
        return [numbers_of(shortened(found[each.request_id], dimensions)) for each in completions]

    def _next_id(self) -> str:
        return f"llm-{next(self._numbers)}"

    def _completion(self, prompt: Prompt) -> Completion:
        if isinstance(prompt, str):
            return Completion(self._next_id(), prompt, self.engine.tokenizer.encode(prompt))
        return Completion(self._next_id(), None, _token_ids(prompt))

    def _run(
        self,
        completions: list[Completion],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        tenant: str | Sequence[str] | None,
        progress: bool | None,
    ) -> list[Completion]:
        count = len(completions)
        samplings = _one_for_each("sampling_params", sampling_params, count, SamplingParams())
        priorities, tenants = _one_for_each("priority", priority, count, 0), _one_for_each("tenant", tenant, count, "")
        if any(sampling.embedding for sampling in samplings):
            raise InvalidRequestError("a completion has no place for an embedding: ask LLM.embed for it", "embedding")
        asked = list(map(Asked, completions, samplings, priorities, tenants))
        self._answer(asked, lambda completion, index: partial(completion.add, index), "generating", progress)
        return completions

    def _answer(
        self,
        asked: Sequence[Asked],
        taker: Callable[[Completion, int], Callable[[RequestOutput], None]],
        what: str,
        progress: bool | None,
    ) -> None:
        """Have it all answered; taker says who takes the outputs of a completion's answer of that index."""
        if self._is_closed:
            raise EngineDeadError("this LLM has been closed: make another one")
        limits = self.engine.limits
        for completion, sampling, of_priority, of_tenant in asked:
            limits.check(completion.prompt_token_ids, sampling)
            limits.check_priority(of_priority)
            limits.check_tenant(of_tenant)
        takers: dict[str, Callable[[RequestOutput], None]] = {}
        try:
            for completion, sampling, of_priority, of_tenant in asked:
                completion.open(sampling)
                for index, (request_id, choice) in enumerate(completion.choices(sampling).items()):
                    prompt = completion.prompt_token_ids
                    self.engine.add_request(request_id, prompt, choice, priority=of_priority, tenant=of_tenant)
                    takers[request_id] = taker(completion, index)
            self._turn(takers, what, progress)
        except BaseException:
            self.engine.abort_all()
            raise

    def _turn(self, takers: Mapping[str, Callable[[RequestOutput], None]], what: str, progress: bool | None) -> None:
        with _progress_bar(len(takers), what, progress) as advance:
            while self.engine.has_unfinished:
                for output in self.engine.step():
                    takers[output.request_id](output)
                    advance(output)


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    return [items] if items and all(map(_is_id, items)) else items


def _token_ids(prompt: Any) -> list[int]:
    """The ids of one prompt, numpy's integers too."""
    token_ids = _items(prompt)
    if not all(map(_is_id, token_ids)):
        raise _neither_text_nor_ids(prompt)
    return list(map(int, token_ids))


def _is_id(given: object) -> bool:
    return isinstance(given, Integral) and not isinstance(given, bool)


def _items(listed: Any) -> list[Any]:
    # Bytes and mappings have items too, but none that was meant.
    if isinstance(listed, bytes | bytearray | Mapping) or not isinstance(listed, Iterable):
        raise _neither_text_nor_ids(listed)
    return list(listed)


def _neither_text_nor_ids(given: object) -> InvalidRequestError:
    return InvalidRequestError(f"a prompt must be text or token ids, got {given!r:.100}", "prompt")


def _as_conversations(messages: Any) -> list[Any]:
    if not isinstance(messages, list | tuple) or (messages and isinstance(messages[0], Mapping)):
        return [messages]
    return list(messages)


def _one_for_each(name: str, given: T | Sequence[T] | None, count: int, default: T) -> list[T]:
    """What was given for all, or for each of so many prompts; its type is that of the default."""
    kind = type(default)
    if given is None or isinstance(given, kind):
        return [default if given is None else given] * count
    if not isinstance(given, list | tuple) or not all(isinstance(each, kind) for each in given):
        raise InvalidRequestError(
            f"{name} must be {kind.__name__}, or a list with one for each prompt; got {given!r:.100}", name
        )
    if len(given) != count:
        raise InvalidRequestError(f"{count} prompts but {len(given)} {name}", name)
    return list(given)


@contextmanager
def _progress_bar(num_prompts: int, what: str, wanted: bool | None) -> Iterator[Callable[[RequestOutput], None]]:
    """A bar of prompts done and, where some are, tokens generated, on standard error; None means on a terminal only."""
    console = Console(stderr=True)
    shown = console.is_terminal if wanted is None else wanted
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    counted = (TextColumn("{task.fields[tokens]} tokens"),) if what == "generating" else ()
    with Progress(*columns, *counted, console=console, disable=not shown) as bar:
        task = bar.add_task("", total=num_prompts, tokens=0)
        tokens = 0

        def advance(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += len(output.new_token_ids)
            bar.update(task, advance=output.finish_reason is not None, tokens=tokens)

        yield advance


@contextmanager
def _packing_bar() -> Iterator[Callable[..., None]]:
    """A bar over the bytes of weights that are packed, on a terminal only."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)

        def report(done_bytes: int, total_bytes: int | None, what: str) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes, description=what, visible=True)

        yield report


def _tell(line: str) -> None:
    """What takes its time while an engine is built: fetching a model, compiling kernels."""
    print(line, file=sys.stderr)
