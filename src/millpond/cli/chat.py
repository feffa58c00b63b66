"""`millpond chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from millpond.cli import loading
from millpond.cli.options import (
    DEFAULT_MODEL,
    DEFAULTS,
    ChatTemplate,
    Dtype,
    Isa,
    KVDtype,
    MaxModelLen,
    ModelArgument,
    PrefixCache,
    Quantize,
    Speculative,
    SpeculativeTokens,
    Threads,
    examples,
)
from millpond.cli.settings import Settings
from millpond.cli.streaming import answer, chat_prompt, interrupt_flag, write_out
from millpond.config import EngineConfig
from millpond.core.request import FinishReason
from millpond.core.sampling import SamplingParams
from millpond.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

HELP = """Talk with a model in the terminal.

/help lists the commands of the conversation. Ctrl-C stops an answer, Ctrl-D leaves. Lines may also come from a pipe:
each is one message."""

EXAMPLES = examples(
    "millpond chat",
    'millpond chat smollm2 --system "Answer in one sentence."',
    'echo "Name the capital of France." | millpond chat --temperature 0',
)

COMMANDS = """/help   this list
/clear  forget the conversation so far
/exit   leave (so does Ctrl-D)
Ctrl-C stops an answer and keeps the conversation."""

PROMPT = "> "
ROOM_FOR_ANSWER = 256


def register(app: typer.Typer) -> None:
    app.command("chat", help=HELP, epilog=EXAMPLES)(chat)


@dataclass(slots=True)
class Conversation:
    """The messages so far, and how each answer is made. The oldest turns go when the model's length is reached."""

    engine: Engine
    sampling: SamplingParams
    write: Callable[[str], None]
    notice: Callable[[str], None]
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    num_asked: int = 0

    def clear(self) -> None:
        self.turns.clear()

    def ask(self, text: str) -> None:
        """Answer one message. A message that cannot be served changes nothing, and InvalidRequestError says why."""
        before = list(self.turns)
        self.turns.append({"role": "user", "content": text})
        try:
            prompt = self._prompt_that_fits()
            with interrupt_flag() as stopped:
                self.num_asked += 1
                result = answer(self.engine, f"chat-{self.num_asked}", prompt, self.sampling, self.write, stopped)
        except InvalidRequestError:
            self.turns = before
            raise
        self.turns.append({"role": "assistant", "content": result.text})
        self.write("\n")
        if result.finish_reason is FinishReason.ABORT:
            self.notice("(stopped)")
        elif result.finish_reason is FinishReason.LENGTH:
            self.notice(f"(cut off after {len(result.token_ids)} tokens)")

    def _prompt_that_fits(self) -> list[int]:
        """Token ids of the conversation with room for an answer: the oldest turns are dropped until they fit."""
        most = self.engine.limits.max_total_tokens
        room = min(self.sampling.max_tokens or ROOM_FOR_ANSWER, most // 2)
        num_dropped = 0
        prompt = self._render()
        while len(prompt) + room > most and len(self.turns) > 1:
            del self.turns[:2]
            num_dropped += 1
            prompt = self._render()
        if num_dropped and len(prompt) < most:  # a longer one is refused, and then nothing is forgotten
            self.notice(
                f"(the conversation is longer than {most} tokens: its {num_dropped} oldest turns are forgotten)"
            )
        return prompt

    def _render(self) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return chat_prompt(self.engine, system + self.turns)


def lines_from(stdin: TextIO, notice: Callable[[str], None]) -> Iterator[str]:
    """The lines that a person types, with a prompt and line editing on a terminal, until the end of the input.

    On a terminal Ctrl-C drops the line that is being typed.
    """
    if not stdin.isatty():
        yield from (line.rstrip("\n") for line in stdin)
        return
    import readline  # noqa: F401  # input() edits lines and remembers them once this is loaded

    while True:
        try:
            yield input(PROMPT)
        except KeyboardInterrupt:
            notice("\n(Ctrl-D leaves)")
        except EOFError:
            notice("")
            return


def converse(conversation: Conversation, lines: Iterator[str]) -> None:
    """Answer line after line until /exit or the end of the input."""
    for line in lines:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/clear":
            conversation.clear()
            conversation.notice("(forgotten)")
        elif text == "/help":
            conversation.notice(COMMANDS)
        elif text.startswith("/") and " " not in text:
            conversation.notice(f"{text} is not a command; /help lists them")
        elif text:
            try:
                conversation.ask(text)
            except InvalidRequestError as error:
                conversation.notice(f"error: {error}")


def chat(
    context: typer.Context,
    model: ModelArgument = DEFAULT_MODEL,
    chat_template: ChatTemplate = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message that stays in front.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of one answer.")] = 1024,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.3,
    top_p: Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens up to this share.")] = 0.95,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Key of the random draws [default: the same one every time]")
    ] = None,
    dtype: Dtype = DEFAULTS.dtype,
    kv_dtype: KVDtype = DEFAULTS.kv_dtype,
    quantize: Quantize = DEFAULTS.quantize,
    max_model_len: MaxModelLen = None,
    threads: Threads = None,
    isa: Isa = DEFAULTS.isa,
    prefix_cache: PrefixCache = DEFAULTS.prefix_cache,
    speculative: Speculative = DEFAULTS.speculative,
    speculative_tokens: SpeculativeTokens = DEFAULTS.speculative_tokens,
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    config = EngineConfig(
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantize=quantize,
        max_model_len=max_model_len,
        threads=threads,
        isa=isa,
        prefix_cache=prefix_cache,
        speculative=speculative,
        speculative_tokens=speculative_tokens,
    )
    engine = loading.open_engine(model, config, context.ensure_object(Settings), chat_template)
    engine.limits.check_generates()
    if engine.chat_template.is_missing:
        raise ConfigError(
            f"{engine.model_name} has no chat template, so it cannot chat: `millpond generate` continues texts "
            "with a base model like this; or give a template with --chat-template"
        )
    conversation = Conversation(engine, sampling, write_out, loading.notify, system)
    if sys.stdin.isatty():
        loading.notify(f"{engine.model_name}; /help lists the commands, Ctrl-D leaves")
    converse(conversation, lines_from(sys.stdin, loading.notify))
