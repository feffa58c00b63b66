"""`millpond generate`: one prompt, continued."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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
    ModelOption,
    Quantize,
    Speculative,
    SpeculativeTokens,
    Threads,
    examples,
)
from millpond.cli.settings import Settings
from millpond.cli.streaming import answer, chat_prompt, write_out
from millpond.config import EngineConfig
from millpond.core.sampling import SamplingParams
from millpond.errors import ConfigError

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

HELP = """Continue one prompt.

The prompt is the text itself, without a chat template (`millpond chat` applies one); --chat sends it as one user
message. The temperature is 0 unless you say otherwise: greedy, the same answer every time."""

EXAMPLES = examples(
    'millpond generate "The capital of France is"',
    'millpond generate --chat "Name the capital of France." --max-tokens 64',
    "millpond generate --temperature 0.8 --top-p 0.95 --seed 7 < prompt.txt",
    'millpond generate "1 2 3" --max-tokens 4 --json',
)

Prompt = Annotated[
    str | None,
    typer.Argument(help="The prompt; if absent, standard input less its last newline; for -, standard input exactly."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one object: text, prompt_token_ids, token_ids, finish_reason.")
]

Seed = Annotated[int | None, typer.Option("--seed", help="Key of the random draws [default: the same one every time]")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the answer; may be repeated.")]


def register(app: typer.Typer) -> None:
    app.command("generate", help=HELP, epilog=EXAMPLES)(generate)


def read_prompt(argument: str | None, stdin: TextIO) -> str:
    """The prompt as given; standard input exactly for "-"; without the newline that ends it where there is neither."""
    if argument is None:
        return stdin.read().removesuffix("\n")
    return stdin.read() if argument == "-" else argument


def prompt_tokens(engine: Engine, prompt: str, as_chat: bool) -> list[int]:
    """Token ids of the raw prompt, or of the prompt as one user message through the model's chat template."""
    if as_chat:
        return chat_prompt(engine, [{"role": "user", "content": prompt}])
    return engine.tokenizer.encode(prompt)


def check_template(chat_template: str | None, as_chat: bool) -> None:
    """Raise ConfigError for a template that would be of no effect."""
    if chat_template is not None and not as_chat:
        raise ConfigError("--chat-template is for a prompt that is sent as a message; add --chat")


def complete(
    engine: Engine, prompt_token_ids: list[int], sampling: SamplingParams, as_json: bool, out: Callable[[str], None]
) -> None:
    """Run the request; write its text as it comes, or one JSON object at the end."""
    result = answer(engine, "generate", prompt_token_ids, sampling, (lambda text: None) if as_json else out)
    if not as_json:
        out("\n")
        return
    fields = {
        "text": result.text,
        "prompt_token_ids": list(prompt_token_ids),
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason.value,
    }
    out(json.dumps(fields) + "\n")


def generate(
    context: typer.Context,
    prompt: Prompt = None,
    model: ModelOption = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens up to this share.")] = 1.0,
    min_p: Annotated[float, typer.Option("--min-p", help="Drop tokens below this share of the likeliest.")] = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    dtype: Dtype = DEFAULTS.dtype,
    kv_dtype: KVDtype = DEFAULTS.kv_dtype,
    quantize: Quantize = DEFAULTS.quantize,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")] = False,
    threads: Threads = None,
    isa: Isa = DEFAULTS.isa,
    speculative: Speculative = DEFAULTS.speculative,
    speculative_tokens: SpeculativeTokens = DEFAULTS.speculative_tokens,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as one user message.")] = False,
    chat_template: ChatTemplate = None,
    as_json: AsJson = False,
) -> None:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    config = EngineConfig(
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantize=quantize,
        threads=threads,
        isa=isa,
        speculative=speculative,
        speculative_tokens=speculative_tokens,
    )
    text = read_prompt(prompt, sys.stdin)
    check_template(chat_template, chat)
    engine = loading.open_engine(model, config, context.ensure_object(Settings), chat_template)
    engine.limits.check_generates()
    complete(engine, prompt_tokens(engine, text, chat), sampling, as_json, write_out)
