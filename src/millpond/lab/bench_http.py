"""What HTTP costs: streamed completions of a server in a process of its own, beside the same load in this process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from millpond.core.sampling import SamplingParams
from millpond.core.step import Clock
from millpond.engine.engine import Engine
from millpond.errors import EngineError
from millpond.lab.workload import random_prompt

STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLoad:
    """num_streams completions at once, each of prompt_tokens random token ids, of exactly max_tokens tokens."""

    num_streams: int = 64
    prompt_tokens: int = 64
    max_tokens: int = 128

    @property
    def num_output_tokens(self) -> int:
        return self.num_streams * self.max_tokens

    def prompts(self, random: Random, vocab_size: int) -> list[tuple[int, ...]]:
        return [random_prompt(random, self.prompt_tokens, vocab_size) for _ in range(self.num_streams)]

    def body(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The completion as it goes over the wire."""
        fields = {"prompt": list(prompt), "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}
        return {**fields, "stream": True}


@dataclass(frozen=True, slots=True)
class HttpRow:
    """Output tokens per second, median of rounds; ratio is that of HTTP over in-process, round by round.

    client_cpu is the processor time that the client took, as a share of one core.
    """

    num_streams: int
    in_process_tok_s: float
    http_tok_s: float
    ratio: float
    ratios: tuple[float, ...]
    client_cpu: float

    def as_json(self) -> dict[str, object]:
        return {
            "streams": self.num_streams,
            "in_process_tok_s": round(self.in_process_tok_s, 1),
            "http_tok_s": round(self.http_tok_s, 1),
            "ratio": round(self.ratio, 3),
            "ratios": [round(each, 3) for each in self.ratios],
            "client_cpu_share": round(self.client_cpu, 4),
        }


@contextmanager
def serving(command: Sequence[str]) -> Iterator[str]:
    """Run the command, a `millpond serve`, until it says where it serves; stopped at the end. Gives the URL.

    Raises EngineError, with what the command said, when it ends before that.
    """
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield _url(process.stderr)
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


def _url(lines: Iterator[str]) -> str:
    said = []
    for line in lines:
        said.append(line)
        if found := re.search(r" serves .* at (http://\S+)", line):
            return found[1]
    raise EngineError(f"the server did not start: {''.join(said).strip()}")


def over_http(url: str, load: StreamLoad, prompts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Output tokens per second of the load, and the client's processor time as a share of one core."""
    address = urlsplit(url)
    order = {"host": address.hostname, "port": address.port, "bodies": [load.body(prompt) for prompt in prompts]}
    command = [sys.executable, "-m", "millpond.lab.stream_client"]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"the client failed: {done.stderr.strip()}")
    report = json.loads(done.stdout)
    return load.num_output_tokens / report["seconds"], report["cpu_seconds"] / report["seconds"]


def in_process(engine: Engine, load: StreamLoad, prompts: Sequence[Sequence[int]], clock: Clock) -> float:
    """Output tokens per second of the load through Engine.step()."""
    sampling = SamplingParams(max_tokens=load.max_tokens, temperature=0.0, ignore_eos=True)
    started = clock()
    for index, prompt in enumerate(prompts):
        engine.add_request(f"stream-{index}", prompt, sampling)
    num_tokens = 0
    while engine.has_unfinished:
        num_tokens += sum(len(output.new_token_ids) for output in engine.step())
    if num_tokens != load.num_output_tokens:
        raise EngineError(f"the load gave {num_tokens} tokens where {load.num_output_tokens} were asked for")
    return num_tokens / (clock() - started)


def measure_http(
    engine: Engine, url: str, load: StreamLoad, rounds: int, clock: Clock, notify: Callable[[str], None]
) -> HttpRow:
    """Both sides in turns, each first in every other round, after one round that is not counted."""
    random, figures = Random(0), []
    for index in range(rounds + 1):
        notify(f"{load.num_streams} streams, round {index} of {rounds}" if index else "warm-up of the streams")
        prompts = load.prompts(random, engine.limits.vocab_size)
        if index % 2:
            direct = in_process(engine, load, prompts, clock)
            served, client_cpu = over_http(url, load, prompts)
        else:
            served, client_cpu = over_http(url, load, prompts)
            direct = in_process(engine, load, prompts, clock)
        if index:
            figures.append((direct, served, client_cpu))
    ratios = tuple(served / direct for direct, served, _ in figures)
    direct, served, client_cpu = (median(column) for column in zip(*figures, strict=True))
    return HttpRow(load.num_streams, direct, served, median(ratios), ratios, client_cpu)
