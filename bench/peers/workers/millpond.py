"""millpond's offline interface: the public Engine, stepped by hand. Runs inside millpond's own environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.peers.workers import loop


@dataclass
class Millpond:
    engine: Any
    sampling: Any
    settings: dict[str, Any]
    open_ids: set[str] = field(default_factory=set)
    count: int = 0

    def add(self, prompt: Sequence[int], max_tokens: int) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.engine.add_request(
            name, list(prompt), self.sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        )
        self.open_ids.add(name)

    def step(self) -> int:
        num_tokens = 0
        for output in self.engine.step():
            num_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                self.open_ids.discard(output.request_id)
        return num_tokens

    def unfinished(self) -> bool:
        return self.engine.has_unfinished

    def abort_all(self) -> None:
        self.engine.abort_all()
        while self.engine.has_unfinished:
            self.engine.step()


def build(settings: dict[str, Any]) -> Millpond:
    from millpond import SamplingParams
    from millpond.build import build_engine
    from millpond.config import EngineConfig

    engine = build_engine(settings["model"], EngineConfig(**settings["config"]))
    return Millpond(engine, SamplingParams, settings["config"])


if __name__ == "__main__":
    loop.serve(build)
