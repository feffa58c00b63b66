"""vLLM's offline interface: its LLM class, whose engine is stepped by hand. Runs inside vLLM's own environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.peers.workers import loop


@dataclass
class Vllm:
    engine: Any
    settings: dict[str, Any]
    open_ids: set[str] = field(default_factory=set)
    count: int = 0

    def add(self, prompt: Sequence[int], max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.count += 1
        name = f"r{self.count}"
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        self.open_ids.add(name)

    def step(self) -> int:
        num_tokens = 0
        for output in self.engine.step():
            num_tokens += sum(len(each.token_ids) for each in output.outputs)
            if output.finished:
                self.open_ids.discard(output.request_id)
        return num_tokens

    def unfinished(self) -> bool:
        return self.engine.has_unfinished_requests()

    def abort_all(self) -> None:
        self.engine.abort_request(list(self.open_ids))
        self.open_ids.clear()
        while self.engine.has_unfinished_requests():
            self.engine.step()


def build(settings: dict[str, Any]) -> Vllm:
    from vllm import LLM

    llm = LLM(model=settings["model"], **settings["arguments"])
    return Vllm(llm.llm_engine, settings["arguments"])


if __name__ == "__main__":
    loop.serve(build)
