"""Makes the model's variants from one GGUF file: Q4_0 and Q8_0 files, and a bf16 folder for Hugging Face's readers.

Runs inside the reference environment (torch, transformers, gguf): python -m bench.peers.workers.variants MODEL FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from transformers import AutoTokenizer

from reference.transformers_llama import load_reference

EMBEDDINGS = ("token_embd.weight", "output.weight")


def requantize(source: Path, target: Path, layer_type: GGMLQuantizationType, file_type: LlamaFileType) -> None:
    """Write source again with its layers as layer_type: matrices dequantised to float32, then quantised as llama.cpp's
    reference does. The embedding, which is the head as well, is Q8_0 in every variant; norms stay as they are."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, "llama")
    _copy_metadata(reader, writer)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        kind = GGMLQuantizationType.Q8_0 if tensor.name in EMBEDDINGS else layer_type
        if len(tensor.shape) < 2 or tensor.tensor_type == kind:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        weights = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        writer.add_tensor(tensor.name, quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter) -> None:
    own = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in own:
            continue
        is_list = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_list else None)


def write_bf16(source: Path, folder: Path) -> None:
    """A folder with config.json, the weights in bfloat16 and the tokenizer, as transformers and vLLM read them."""
    load_reference(source, torch.bfloat16).save_pretrained(folder)
    _write_beside(source, folder, {})


def _write_beside(source: Path, folder: Path, more: dict[str, Any]) -> None:
    """The tokenizer, and what the configuration lacks."""
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 2, "bos_token_id": 1, **more}, indent=2))


def write_w8a8(source: Path, folder: Path) -> None:
    """Layers in 8 bits with a scale for each output, activations quantised token by token, in vLLM's format for it."""
    model = load_reference(source, torch.float32)
    tensors = {}
    for name, weights in model.state_dict().items():
        if name.endswith("_proj.weight"):
            scale = weights.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            tensors[name] = (weights / scale).round().clamp(-127, 127).to(torch.int8)
            tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
        elif name != "lm_head.weight":  # the embedding once more
            tensors[name] = weights.to(torch.bfloat16)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.dtype = torch.bfloat16
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    layers = {
        "targets": ["Linear"],
        "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": layers},
        "ignore": ["lm_head"],
    }
    _write_beside(source, folder, {"quantization_config": quantization})


def main(source: Path, folder: Path) -> None:
    kinds = {
        "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
        "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    }
    for name, (layer_type, file_type) in kinds.items():
        target = folder / f"{name}.gguf"
        if not target.exists():
            print(f"making {name}.gguf", flush=True)
            requantize(source, target.with_suffix(".part"), layer_type, file_type)
            target.with_suffix(".part").rename(target)
    for name, write in {"bf16": write_bf16, "w8a8": write_w8a8}.items():
        if not (folder / name / "tokenizer.json").exists():
            print(f"making {name}/", flush=True)
            write(source, folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
