"""Makes the model's variants from one GGUF file: Q4_0 and Q8_0 files, and a bf16 folder for Hugging Face's readers.

Runs inside the reference environment (torch, transformers, gguf): python -m bench.peers.workers.variants MODEL FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
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
    model = load_reference(source, torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 2, "bos_token_id": 1}, indent=2))


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
    if not (folder / "bf16" / "config.json").exists():
        print("making bf16/", flush=True)
        write_bf16(source, folder / "bf16")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
