"""One engine on the real model for the whole session, eight requests, and what each of them gets alone."""

from __future__ import annotations

import pytest

from e2e.real import SETTINGS
from millpond import LLM, SamplingParams
from millpond.engine.engine import Engine
from millpond.lab.asking import Ask, Got, drive
from millpond.lab.fresh_engine import engine_over
from reference import golden


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM("smollm2", **SETTINGS)


@pytest.fixture(scope="session")
def base(llm) -> Engine:
    """The engine whose runner the others borrow with engine_over."""
    return llm.engine


@pytest.fixture(scope="session")
def eight(base) -> dict[str, Ask]:
    """Prompts of 1 to 251 tokens, up to 24 tokens of answer; greedy and sampled, one penalised, some that end early."""
    long = golden.load_prompts()[3].token_ids.tolist()

    def text(prompt: str) -> list[int]:
        return base.tokenizer.encode(prompt)

    def chat(question: str) -> list[int]:
        prompt = base.chat_template.render([{"role": "user", "content": question}])
        return base.tokenizer.encode(prompt, add_special_tokens=False)

    def greedy(max_tokens: int, **settings) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=0, **settings)

    def drawn(max_tokens: int, seed: int, **settings) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=0.8, top_p=0.9, seed=seed, **settings)

    return {
        "one": Ask(text("The"), greedy(24, ignore_eos=True)),
        "chat": Ask(chat("Say hello."), greedy(24)),
        "long": Ask(long, greedy(5)),
        "penalty": Ask(text("1 2 3 1 2 3 1 2 3"), greedy(20, repetition_penalty=1.3)),
        "story": Ask(text("Once upon a time there was a miller"), drawn(24, 1)),
        "story-2": Ask(text("Once upon a time there was a miller"), drawn(20, 2)),
        "long-drawn": Ask(long[:100], drawn(18, -(2**63), top_k=40)),
        "block": Ask(long[:32], drawn(17, 2**64 - 1)),
    }


@pytest.fixture(scope="session")
def alone(base, eight) -> dict[str, Got]:
    """What each of the eight gets from an engine that serves nobody else."""
    return {name: drive(engine_over(base), {name: ask})[name] for name, ask in eight.items()}


@pytest.fixture(scope="session")
def two_threads() -> Engine:
    """Another engine, of two threads and a length that its longest request fills to the last position."""
    return LLM("smollm2", **{**SETTINGS, "threads": 2, "max_model_len": 304}).engine
