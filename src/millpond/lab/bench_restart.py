"""What prefixes on disk save after a restart: the time to a first token, computed, loaded, and still in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import NamedTuple

from millpond.core.disk_prefixes import DiskPrefixes
from millpond.core.sampling import SamplingParams
from millpond.core.step import Clock
from millpond.engine.engine import Engine
from millpond.errors import ConfigError, EngineError
from millpond.lab.fresh_engine import engine_over
from millpond.lab.workload import random_prompt

MAX_TOKENS = 8


class Asked(NamedTuple):
    """One request: seconds to its first token, its answer, and the tokens that it did not compute."""

    ttft: float
    answer: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RestartRow:
    """A prompt's TTFT in seconds, each the median of the rounds: computed whole, loaded after a restart, and found in
    the pool. gain is the median of cold over loaded; loaded_tokens came from disk, out of disk_bytes of files."""

    prompt_tokens: int
    loaded_tokens: int
    disk_bytes: int
    cold_ttft: float
    loaded_ttft: float
    pool_ttft: float
    gain: float

    def as_json(self) -> dict[str, object]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


@dataclass(slots=True)
class RestartBench:
    """Measures the runner of one idle engine. open_disk opens the same folder each time, as after a restart."""

    engine: Engine
    open_disk: Callable[[], DiskPrefixes]
    clock: Clock
    seed: int = 0

    def run(self, lengths: Sequence[int], rounds: int, notify: Callable[[str], None]) -> list[RestartRow]:
        """A row for each length of prompt, the median of the rounds after one that is not counted.

        Raises ConfigError for a prompt that has no room, EngineError where an answer differs.
        """
        most = self.engine.limits.door.max_tokens_that_fit(0) - MAX_TOKENS
        for length in lengths:
            if length > most:
                raise ConfigError(f"a prompt of {length} tokens and {MAX_TOKENS} of output have no room; {most} do")
        random, rows = Random(self.seed), []
        for length in lengths:
            notify(f"{length} tokens")
            rows.append(self._row(length, rounds, random))
        return rows

    def _row(self, length: int, rounds: int, random: Random) -> RestartRow:
        colds, loadeds, pools, num_bytes = [], [], [], 0
        for _ in range(rounds + 1):
            prompt = random_prompt(random, length, self.engine.limits.vocab_size)
            first = self._engine(self.open_disk())
            colds.append(self._ask(first, "cold", prompt))
            pools.append(self._ask(first, "pool", prompt))
            first.close()
            disk = self.open_disk()
            second = self._engine(disk)
            loadeds.append(self._ask(second, "loaded", prompt))
            num_bytes = disk.counters.read_bytes
            second.close()
            if not colds[-1].answer == pools[-1].answer == loadeds[-1].answer:
                raise EngineError(f"{length} tokens: an answer from what was on disk differs; a bug")
        return RestartRow(
            prompt_tokens=length,
            loaded_tokens=loadeds[-1].num_cached_tokens,
            disk_bytes=num_bytes,
            cold_ttft=median(each.ttft for each in colds[1:]),
            loaded_ttft=median(each.ttft for each in loadeds[1:]),
            pool_ttft=median(each.ttft for each in pools[1:]),
            gain=median(one.ttft / other.ttft for one, other in zip(colds[1:], loadeds[1:], strict=True)),
        )

    def _engine(self, disk: DiskPrefixes) -> Engine:
        reserve = self.engine.config.watermark_blocks
        return engine_over(self.engine, prefix_cache=True, disk=disk, watermark_blocks=reserve)

    def _ask(self, engine: Engine, name: str, prompt: Sequence[int]) -> Asked:
        answer: tuple[int, ...] = ()
        began, first, num_cached = self.clock(), 0.0, 0
        engine.add_request(name, prompt, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True))
        while engine.has_unfinished:
            for output in engine.step():
                first = first or self.clock() - began
                answer += tuple(output.new_token_ids)
                num_cached = output.num_cached_tokens
        return Asked(first, answer, num_cached)
