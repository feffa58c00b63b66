"""Run in a process of its own: an engine just made ready, and what its first requests cause or cost, as JSON.

python after_ready.py compiled MODEL [SETTING=VALUE ...]   which compiled functions the requests still asked for
python after_ready.py ttft MODEL SEQUENCES                  seconds to the last of so many first tokens, twice
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from numba.core.dispatcher import Dispatcher

from millpond.build import build_engine
from millpond.config import EngineConfig
from millpond.core.request import SamplingParams
from millpond.engine.engine import Engine

SLOTS = 64
BATCH_SIZES = range(1, SLOTS + 1)
PREFILLS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129, 200)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 300},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 7},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3},
)
TTFT_PROMPT_TOKENS = 32
BOUND_SECONDS = 280.0


def versions() -> dict[str, int]:
    """For each jitted function, how many versions of it this process has compiled or loaded."""
    every = (each for each in gc.get_objects() if isinstance(each, Dispatcher))
    return {f"{each.py_func.__module__}.{each.py_func.__qualname__}": len(each.overloads) for each in every}


def drive(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


def add(engine: Engine, name: str, length: int, **sampling: Any) -> None:
    prompt = random.Random(name).choices(range(10, 250), k=length)
    engine.add_request(name, prompt, SamplingParams(ignore_eos=True, **sampling))


def all_kinds_of_steps(engine: Engine) -> None:
    """Every batch size as one decode step, every way to sample, prompts of many lengths alone and together."""
    for count in BATCH_SIZES:
        for i in range(count):
            add(engine, f"{count}-{i}", 1, max_tokens=2, **SAMPLINGS[i % len(SAMPLINGS)])
        drive(engine)
    for length in PREFILLS:
        add(engine, f"prefill-{length}", length, max_tokens=2, temperature=0.0)
        drive(engine)
    for length, (i, sampling) in zip(itertools.cycle(PREFILLS), enumerate(SAMPLINGS), strict=False):
        add(engine, f"mixed-{i}", length, max_tokens=5, **sampling)
    drive(engine)


def compiled(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    sizes = {"max_num_seqs": SLOTS, "max_num_batched_tokens": 96, "max_model_len": 256}
    engine = build_engine(model, EngineConfig(**sizes, **settings))
    before = versions()
    all_kinds_of_steps(engine)
    after = versions()
    return {"ready": before, "new": {name: count for name, count in after.items() if count != before.get(name)}}


def first_tokens(engine: Engine, sequences: int, name: str) -> float:
    start = time.perf_counter()
    for i in range(sequences):
        add(engine, f"{name}-{i}", TTFT_PROMPT_TOKENS, max_tokens=1, temperature=0.0)
    drive(engine)
    return time.perf_counter() - start


def ttft(model: str, sequences: int) -> dict[str, float]:
    engine = build_engine(model, EngineConfig(max_num_seqs=SLOTS, max_model_len=512))
    return {name: first_tokens(engine, sequences, name) for name in ("first", "second")}


def in_a_process(what: str, model: object, *arguments: object) -> dict[str, Any]:
    """One such run, from a test."""
    command = [sys.executable, __file__, what, str(model), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_SECONDS)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    what, model, *rest = sys.argv[1:]
    commands: dict[str, Callable[[], dict[str, Any]]] = {
        "compiled": lambda: compiled(model, dict(each.split("=") for each in rest)),
        "ttft": lambda: ttft(model, int(rest[0])),
    }
    print(json.dumps(commands[what]()))
