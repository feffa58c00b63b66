"""OpenVINO GenAI's offline interface: its continuous-batching pipeline, stepped by hand, over a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.peers.workers import loop

END_TOKEN = 2  # the pipeline wants one, though every request ignores it


@dataclass
class OpenVino:
    pipeline: Any
    settings: dict[str, Any]
    handles: list[Any] = field(default_factory=list)
    count: int = 0

    def add(self, prompt: Sequence[int], max_tokens: int) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        config.set_eos_token_id(END_TOKEN)
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self.count += 1
        self.handles.append(self.pipeline.add_request(self.count, ids, config))

    def step(self) -> int:
        from openvino_genai import GenerationStatus

        self.pipeline.step()
        num_tokens = 0
        for handle in self.handles:
            while handle.can_read():
                num_tokens += sum(len(output.generated_ids) for output in handle.read().values())
        self.handles = [each for each in self.handles if each.get_status() == GenerationStatus.RUNNING]
        return num_tokens

    def unfinished(self) -> bool:
        return self.pipeline.has_non_finished_requests()

    def abort_all(self) -> None:
        for handle in self.handles:
            handle.cancel()
        self.handles = []
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()


def build(settings: dict[str, Any]) -> OpenVino:
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    for name, value in settings["scheduler"].items():
        setattr(scheduler, name, value)
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", settings["properties"])
    return OpenVino(pipeline, {"scheduler": settings["scheduler"], "properties": settings["properties"]})


if __name__ == "__main__":
    loop.serve(build)
