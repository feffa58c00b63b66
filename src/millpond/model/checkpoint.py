"""A model's file, whatever its format: its tensors under a GGUF's names, and its figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from millpond.errors import ModelFileError
from millpond.load.dequantize import Tensor, dequantize
from millpond.load.ggml_types import GGMLType
from millpond.load.gguf import GGUFFile, GGUFTensor, open_gguf
from millpond.load.pickles import refuse_pickle
from millpond.load.quantization_config import KEY, quantised_weights, read_scheme
from millpond.load.safetensors import SafetensorsFile, open_safetensors
from millpond.model.architecture import Architecture
from millpond.model.architectures import ARCHITECTURES
from millpond.model.config import ModelConfig
from millpond.model.figures import architecture_of_config, figures_of_config, figures_of_gguf
from millpond.model.tensors import expected_shapes

ModelFile = GGUFFile | SafetensorsFile
EMBEDDING = "token_embd.weight"
DIVISORS = {"short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}  # of the frequencies, in longrope
LAYER = re.compile(r"(.+?)\.(\d+)\.(.+)\.(weight|bias)")
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


def open_checkpoint(path: Path) -> tuple[ModelFile, ModelConfig]:
    """Open a GGUF file or a part of one, a .safetensors file or its folder. Raises ModelFileError for what cannot be
    run."""
    refuse_pickle(path)
    if path.is_dir() or path.suffix == ".safetensors":
        file = open_safetensors(path)
        architecture = ARCHITECTURES[architecture_of_config(file.metadata)]
        inner = f"{architecture.whole_names['token_embd']}.weight"
        name = inner if inner in file.tensors else architecture.outer + inner
        config = figures_of_config(file.metadata, vocab_size_of(file, name))
        if KEY in file.metadata:
            scheme = read_scheme(file.metadata)
            file = replace(file, tensors=quantised_weights(file.path.name, scheme, file.tensors))
        tensors = renamed(file, architecture)
        return replace(file, tensors=without_idle(tensors, config)), config
    gguf = open_gguf(path)
    return gguf, read_figures(gguf)


def without_idle(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors but for those that do nothing: frequencies that follow from the figures, what the architecture has no
    use for here, and biases of zeros, which some quantisers give to every layer."""
    known, architecture = expected_shapes(config), ARCHITECTURES[config.architecture]

    def is_idle(name: str, tensor: Tensor) -> bool:
        if name.endswith("rotary_emb.inv_freq") or name.removeprefix(architecture.outer).startswith(architecture.idle):
            return True
        return name.endswith(".bias") and name not in known and not dequantize(tensor).any()

    return {name: tensor for name, tensor in tensors.items() if not is_idle(name, tensor)}


def read_figures(file: GGUFFile) -> ModelConfig:
    """A GGUF's figures. Raises ModelFileError where it has no embedding to count the vocabulary by."""
    divisors = {
        name: tuple(dequantize(file.tensors[tensor]).reshape(-1).tolist())
        for name, tensor in DIVISORS.items()
        if tensor in file.tensors
    }
    return figures_of_gguf(file.metadata, vocab_size_of(file, EMBEDDING), divisors)


def vocab_size_of(file: ModelFile, name: str) -> int:
    """The rows of the embedding of that name."""
    embedding = file.tensors.get(name)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{file.path.name}: there is no matrix {name!r}")
    return embedding.shape[0]


def renamed(file: SafetensorsFile, architecture: Architecture) -> dict[str, Tensor]:
    """The tensors under our names, with norms as a GGUF has them. What has no name here keeps its own."""
    whole = {theirs: ours for ours, theirs in architecture.whole_names.items()}
    layer = {theirs: ours for ours, theirs in architecture.hugging_face_names().items()}
    tensors = {}
    for name, tensor in file.tensors.items():
        # Of a model that is made for embeddings a file may have the inner model alone, without the name of the outer.
        theirs = name.removeprefix(architecture.outer)
        part, _, kind = theirs.rpartition(".")
        ours = f"{whole[part]}.{kind}" if part in whole else _layer_name(theirs, architecture.layers, layer) or name
        if architecture.norm_shift and ours.endswith("norm.weight"):
            tensor = shifted(tensor, architecture.norm_shift)
        tensors[ours] = replace(tensor, name=name)  # messages call it what the file does
    return tensors


def _layer_name(name: str, layers: str, names: dict[str, str]) -> str | None:
    if (match := LAYER.fullmatch(name)) is None or match[1] != layers:
        return None
    _, layer, part, kind = match.groups()
    if (expert := EXPERT.fullmatch(part)) is not None:
        return f"blk.{layer}.ffn_{expert[2]}.{expert[1]}.{kind}"
    return f"blk.{layer}.{names[part]}.{kind}" if part in names else None


def shifted(tensor: Tensor, shift: float) -> GGUFTensor:
    """A norm's weights with a number added, in float32."""
    values = dequantize(tensor) + np.float32(shift)
    return GGUFTensor(tensor.name, tensor.shape, GGMLType.F32, values.view(np.uint8).reshape(-1))
