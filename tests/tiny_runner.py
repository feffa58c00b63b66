"""Model runners on small random files, and requests driven through `execute` by the real scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.build import build_model_runner
from millpond.config import EngineConfig
from millpond.core.masks import TokenMask
from millpond.core.request import Request, SamplingParams
from millpond.core.scheduler import Scheduler
from millpond.runner.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0)
MAX_MODEL_LEN = 512
# Every pair of types that a model can be computed in, as settings.
TYPES: dict[str, dict[str, str]] = {"auto": {}, "float32": {"dtype": "float32"}, "int8 K/V": {"kv_dtype": "int8"}}
NOT_NUMBERS = {"float32": np.nan, "uint16": 0x7FC0, "uint8": 0xFF}  # of K/V by the type of its arrays


def tiny_runner(path: Path, **changes: Any) -> ModelRunner:
    """A runner with small sizes and one thread, but for what the test changes."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 16, "threads": 1}
    return build_model_runner(path, EngineConfig(**{**sizes, **changes}))


def fill_with_leftovers(runner: ModelRunner) -> None:
    """Nothing in the cache is a number any more."""
    for part in runner._cache:
        part[:] = NOT_NUMBERS[part.dtype.name]


def random_tokens(count: int, seed: int = 0, vocab: int = 267) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


class Sampled:
    """A runner's sampler that keeps the logits it is given."""

    def __init__(self, sampler) -> None:
        self._sampler = sampler
        self.logits: NDArray[np.float32] = np.empty((0, 0), np.float32)

    def __getattr__(self, name):
        return getattr(self._sampler, name)

    def sample(self, logits, *arguments):
        self.logits = logits.copy()
        return self._sampler.sample(logits, *arguments)


class Answer:
    """What one request got: its tokens, the logits that each was chosen from, and the fault that ended it."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logits: list[NDArray[np.float32]] = []
        self.fault: str | None = None


def drive(
    runner: ModelRunner,
    prompts: Mapping[str, Sequence[int]],
    *,
    max_tokens: int = 12,
    sampling: SamplingParams = GREEDY,
    mask: TokenMask | None = None,
    **sizes: Any,
) -> tuple[dict[str, Answer], Scheduler]:
    """Run all the requests to their end. sizes are the scheduler's, and must be within the runner's."""
    defaults = {"num_blocks": 16, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    scheduler = Scheduler(**{**defaults, "max_model_len": MAX_MODEL_LEN, "watermark_blocks": 0, **sizes})
    for seed, (request_id, prompt) in enumerate(prompts.items()):
        scheduler.add_request(Request(request_id, tuple(prompt), max_tokens, sampling, seed=seed, mask=mask))
    answers = {request_id: Answer() for request_id in prompts}
    runner.sampler, plain = Sampled(runner.sampler), runner.sampler
    while scheduler.has_work:
        output = scheduler.schedule()
        if not output.scheduled:
            continue
        result = runner.execute(output)
        num_tokens = {each.request_id: len(each.token_ids) for each in result.sampled}
        rows = iter(runner.sampler.logits)
        for each in output.scheduled:
            own = list(islice(rows, 1 + each.num_drafts)) if each.samples else []
            answers[each.request_id].logits += own[: max(1, num_tokens.get(each.request_id, 0))]
        for update in scheduler.update(result):
            answer = answers[update.request.request_id]
            answer.fault = update.fault
            answer.token_ids += update.token_ids
    runner.sampler = plain
    return answers, scheduler


def assert_same_bits(got: Answer, expected: Answer) -> None:
    assert got.token_ids == expected.token_ids
    np.testing.assert_array_equal(np.array(got.logits), np.array(expected.logits))
