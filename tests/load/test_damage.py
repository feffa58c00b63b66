"""Models damaged at random, through all that reads them: a clear error or a model, in bounded time and memory."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import random
import time
import tracemalloc
import zipfile

import numpy as np
import pytest

import quantised_folders
from gguf_writer import string
from millpond.build import read_tokenizer
from millpond.errors import InvalidRequestError, ModelFileError
from millpond.load.gguf import GGUFFile, open_gguf
from millpond.model.checkpoint import open_checkpoint
from millpond.model.figures import figures_of_gguf
from millpond.model.weights import load_weights
from millpond.text.charsmap import is_whole
from millpond.text.tokenizer import Tokenizer
from protobuf_writer import field
from tiny_llama import write_tiny_llama
from tiny_models import tiny_model, write_safetensors
from tiny_tokenizers import write_tiny_tokenizer

NUM_DAMAGES = 300  # of each kind of model
MOST_BYTES = 8 << 20  # beside what the whole model takes
MOST_SECONDS = 20  # of one damaged model; the whole one takes 20 ms
AWKWARD = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 63, 2**31, 2**63, 10**30, -(2**63), 0.5, -0.0, 1e308, 1e-308),
    *(math.nan, math.inf, -math.inf, "", "x", "../x.safetensors", "/etc/passwd", "llama", "gptq", "\0"),
    *([], [[]], [1, 2], [-1, 0], [0, 10**30], {}, {"type": "linear"}, {"rope_type": "yarn", "factor": 0}),
)


def load(path):
    """The weights and, where there is a tokenizer, a conversation through it and its template."""
    file, config = open_checkpoint(path)
    if isinstance(file, GGUFFile) or (path / "tokenizer_config.json").is_file():
        tokenizer = read_tokenizer(file)
        assert isinstance(tokenizer.decode(tokenizer.encode("hi there")), str)
        if tokenizer.chat_template is not None:
            with contextlib.suppress(InvalidRequestError):  # whoever asks is told what the template cannot do
                tokenizer.make_chat_template().render([{"role": "user", "content": "hi there"}])
    return load_weights(file, config, "auto")


def write_sharded(folder):
    model = tiny_model("qwen3", layers=1)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    names = list(model.arrays)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in halves.items():
        write_safetensors(folder / file, {name: model.arrays[name] for name in part}, "BF16")
    places = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def write_gguf(folder):
    folder.mkdir(parents=True)
    kinds = {"*attn*weight": "Q4_1", "*ffn_down*": "Q5_0", "token_embd.weight": "Q8_0", "*": "BF16"}
    write_tiny_llama(folder / "model.gguf", layers=1, heads=4, kv_heads=2, head_dim=64, ffn=256, types=kinds)
    return folder / "model.gguf"


def write_plain(folder):
    return tiny_model("gemma3_text", layers=1).write_folder(folder, "F16")


def write_with_json(folder):
    (write_plain(folder) / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    return write_tiny_tokenizer(folder, bos_token="<|endoftext|>", eos_token="<|im_end|>", add_bos_token=True)


def write_with_pieces(folder):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefgh", "\u2581he"]
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    model = b"".join(
        field(1, field(1, piece.encode()) + field(2, -float(i)) + field(3, kinds.get(piece, 6 if i < 259 else 1)))
        for i, piece in enumerate(pieces)
    )
    write_plain(folder)
    (folder / "tokenizer.model").write_bytes(model + field(2, field(3, 2) + field(35, 1)))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    return folder


def write_gptq(folder):
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
    return quantised_folders.Checkpoint(config, quantised_folders.gptq).write(folder)


def write_compressed(folder):
    config = quantised_folders.compressed_config("int-quantized", 8, 0)
    return quantised_folders.Checkpoint(config, quantised_folders.int8, bits=8, group=0, symmetric=True).write(folder)


WRITERS = {
    "gguf": write_gguf,
    "safetensors": write_plain,
    "sharded": write_sharded,
    "gptq": write_gptq,
    "compressed": write_compressed,
    "tokenizer.json": write_with_json,
    "tokenizer.model": write_with_pieces,
}


class Vandal:
    """Damages one file of a model and puts it right again: bytes anywhere, its end, or values of JSON in it."""

    def __init__(self, path, seed):
        self.files = [path] if path.is_file() else sorted(path.iterdir())
        self.whole = {file: file.read_bytes() for file in self.files}
        self.random = random.Random(seed)

    def damage(self):
        draw = self.random
        file = draw.choice(self.files)
        data = bytearray(self.whole[file])
        if file.suffix == ".json" and draw.random() < 0.8:
            data = self.changed(data)
        elif file.suffix == ".safetensors" and draw.random() < 0.5:
            begin = 8 + int.from_bytes(data[:8], "little")
            header = self.changed(data[8:begin])
            data = bytearray(len(header).to_bytes(8, "little")) + header + data[begin:]
        else:
            head = min(len(data), draw.choice((16, 4096, len(data))))
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(head)
                data[at : at + draw.choice((0, 1, 1, 8))] = draw.randbytes(draw.choice((0, 1, 1, 8)))
            del data[draw.choice((len(data), len(data), draw.randrange(len(data)))) :]
        file.write_bytes(data)

    def changed(self, text):
        value = json.loads(text)
        for _ in range(self.random.randint(1, 2)):
            self.change(value)
        return bytearray(json.dumps(value).encode())

    def change(self, value):
        """One place of a JSON value, some steps inside."""
        draw = self.random
        while value:
            key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
            if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.8:
                value = value[key]
                continue
            if draw.random() < 0.2:
                del value[key]
            else:
                value[key] = draw.choice(AWKWARD)
            return

    def repair(self):
        for file, data in self.whole.items():
            file.write_bytes(data)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_damaged_model_is_an_error_that_names_a_file_or_it_is_a_model(tmp_path, kind):
    path = WRITERS[kind](tmp_path / "tiny")
    tracemalloc.start()
    whole = load(path)
    most = tracemalloc.get_traced_memory()[1] + MOST_BYTES
    vandal, messages, loaded = Vandal(path, seed=0), [], 0
    try:
        for number in range(NUM_DAMAGES):
            vandal.damage()
            tracemalloc.reset_peak()
            started = time.process_time()
            try:
                loaded += load(path).room.nbytes > 0
            except ModelFileError as error:
                messages.append(str(error))
            assert time.process_time() - started < MOST_SECONDS, number
            assert tracemalloc.get_traced_memory()[1] < most, number
            vandal.repair()
    finally:
        tracemalloc.stop()
    assert len(messages) + loaded == NUM_DAMAGES
    assert len(set(messages)) > NUM_DAMAGES // 4
    assert all(len(message) < 400 and message.isprintable() for message in messages)
    assert np.array_equal(load(path).room, whole.room)


NOT_WRITTEN = (  # by write_tiny_llama
    *("add_bos_token", "eot_token_id", "scores", "add_space_prefix", "precompiled_charsmap", "unknown_token_id"),
    *("remove_extra_whitespaces", "merges", "token_type", "pre"),
)


@pytest.mark.parametrize("model", ["gpt2", "llama", "t5"])
def test_a_gguf_whose_metadata_is_anything_at_all_is_an_error_or_a_tokenizer_and_figures(tmp_path, model):
    write_tiny_llama(tmp_path / "tiny.gguf", layers=1)
    known = dict(open_gguf(tmp_path / "tiny.gguf").metadata)
    size = len(known["tokenizer.ggml.tokens"])
    known |= {"tokenizer.ggml.model": model, "tokenizer.ggml.scores": [0.0] * size}
    refused = set()
    for key in dict.fromkeys([*known, *(f"tokenizer.ggml.{name}" for name in NOT_WRITTEN)]):
        for value in AWKWARD:
            for metadata in ({**known, key: given} for given in (value, [value] * 3, [value] * size)):
                try:
                    figures_of_gguf(metadata, size, {})
                    tokenizer = Tokenizer.from_gguf(metadata)
                    assert isinstance(tokenizer.decode(tokenizer.encode("hi there")), str)
                except ModelFileError:
                    refused.add(key)
    assert len(refused) > 20


@pytest.mark.parametrize(
    ("at", "value"), [(0, b"\0\0"), (4, b"\xff\xff\xff\x7f"), (4100, b"\xff"), (4, b"\0\5\0\0\x09\0\0\x80")]
)
def test_a_table_of_characters_that_leads_out_of_itself_is_refused(at, value):
    whole = (4096).to_bytes(4, "little") + bytes(4096) + b"a\0"
    assert is_whole(whole)
    assert not is_whole(whole[:at] + value + whole[at + len(value) :])
    assert not any(is_whole(whole[:size]) for size in range(0, 4100, 7))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_number_is_an_error_that_names_its_tensor(tmp_path, dtype, value):
    model = tiny_model("llama", layers=1)
    model.arrays["model.layers.0.mlp.down_proj.weight"][3, 5] = value
    folder = model.write_folder(tmp_path / "tiny", dtype)
    with pytest.raises(ModelFileError, match=r"model\.layers\.0\.mlp\.down_proj\.weight"):
        load(folder)


def test_a_norm_that_is_no_number_is_an_error_that_names_its_tensor(tmp_path):
    model = tiny_model("llama", layers=1)
    model.arrays["model.norm.weight"][7] = math.nan
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight"):
        load(model.write_folder(tmp_path / "tiny"))


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("the pickle was opened",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "model.safetensors", "model.pt"])
@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_is_refused_by_its_first_bytes_whatever_it_is_called_and_never_opened(tmp_path, name, protocol):
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(), protocol))
    with pytest.raises(ModelFileError, match=rf"^{name}: this is a pickle file.*take the model as safetensors or GGUF"):
        load(tmp_path / name)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_safetensors_whose_headers_length_looks_like_a_pickle_are_read(tmp_path, protocol):
    model = tiny_model("llama", layers=1)
    path = model.write_folder(tmp_path / "tiny") / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    wanted = next(each for each in range(size, size + 70_000) if each % 65536 == 0x80 + 256 * protocol)
    header = data[8 : 8 + size].ljust(wanted)
    path.write_bytes(wanted.to_bytes(8, "little") + header + data[8 + size :])
    assert path.read_bytes()[:2] == bytes((0x80, protocol))
    assert load(path).room.nbytes > 0


def test_an_archive_of_torch_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pth", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))
    with pytest.raises(ModelFileError, match=r"^model\.pth: this is a pickle file, or an archive"):
        load(tmp_path / "model.pth")


def test_a_folder_of_pickles_is_refused_and_one_with_safetensors_beside_them_is_read(tmp_path):
    folder = tmp_path / "tiny"
    model = tiny_model("llama", layers=1)
    model.write_folder(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert load(folder).room.nbytes > 0
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"^tiny: its weights, such as pytorch_model\.bin, are pickle files"):
        load(folder)


def test_a_file_whose_first_bytes_are_none_of_these_is_no_pickle(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGML" + string("x"))
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        load(tmp_path / "model.gguf")
