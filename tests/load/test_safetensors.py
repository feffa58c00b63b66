"""A safetensors file: what is read, and that each thing wrong with one is an error that names it."""

import json

import numpy as np
import pytest

from gguf_writer import quantize
from millpond.errors import ModelFileError
from millpond.load.dequantize import dequantize
from millpond.load.ggml_types import GGMLType
from millpond.load.safetensors import open_safetensors
from tiny_models import write_safetensors

ARRAYS = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "head_dim": null}')
    return tmp_path


def write(folder, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + data)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_tensors_and_the_config_are_read(folder, dtype, name):
    write_safetensors(folder / "model.safetensors", ARRAYS, dtype)
    file = open_safetensors(folder / name)
    assert dict(file.metadata) == {"model_type": "llama"}
    assert list(file.tensors) == list(ARRAYS)
    for key, values in ARRAYS.items():
        assert file.tensors[key].type is GGMLType[dtype]
        assert file.tensors[key].data.tobytes() == quantize(values, dtype).data
        np.testing.assert_array_equal(dequantize(file.tensors[key]), values)


def test_a_file_cut_anywhere_is_said_to_be_incomplete(folder):
    write_safetensors(folder / "model.safetensors", ARRAYS)
    whole = (folder / "model.safetensors").read_bytes()
    for size in range(len(whole)):
        (folder / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=r"model\.safetensors: incomplete file"):
            open_safetensors(folder)


BAD = {
    "a header longer than the file": ({}, 10**15, "a header of 1000000000000000 bytes in a file of 10"),
    "not JSON": (b"{nonsense", None, "the header is not JSON"),
    "a list": ([], None, "the header must be an object"),
    "another type": (
        {"a": entry("F8_E5M2")},
        None,
        "'a' is of type 'F8_E5M2', which is not supported; supported are F32",
    ),
    "a size that is not the shape's": ({"a": entry(shape=(3,))}, None, r"'a' of shape \(3,\) takes 12 bytes.* span 8"),
    "beyond the end": ({"a": entry(offsets=(8, 16))}, None, "tensor 'a' ends at byte 16 of 8"),
    "backwards": ({"a": entry(offsets=(8, 0))}, None, "takes 8 bytes, its offsets span -8"),
    "one over another": ({"a": entry(), "b": entry(shape=(1,), offsets=(4, 8))}, None, "'b' begins at 4, inside 'a'"),
    "twice": (b'{"a": {}, "a": {}}', None, "'a' is there twice"),
    "no shape": ({"a": {"dtype": "F32"}}, None, "tensor 'a' must have a shape and two data_offsets"),
    "a negative shape": ({"a": entry(shape=(-1, -2))}, None, "tensor 'a' must have a shape"),
    "too many dimensions": ({"a": entry(shape=(1,) * 5)}, None, "tensor 'a' must have a shape"),
}


@pytest.mark.parametrize(("header", "length", "message"), BAD.values(), ids=BAD)
def test_a_bad_header_is_refused_with_what_is_wrong(folder, header, length, message):
    write(folder, header, bytes(8) if header else b"", length)
    with pytest.raises(ModelFileError, match=message):
        open_safetensors(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "config.json cannot be read"), ("{", "config.json is not JSON"), ("[]", "config.json must be an object")],
)
def test_a_config_that_is_none_is_refused(folder, text, message):
    write_safetensors(folder / "model.safetensors", ARRAYS)
    (folder / "config.json").unlink() if text is None else (folder / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=message):
        open_safetensors(folder)


def test_a_folder_with_neither_a_file_nor_an_index_is_refused(folder):
    with pytest.raises(ModelFileError, match=r"has no model\.safetensors, and no model\.safetensors\.index\.json"):
        open_safetensors(folder)


SHARDS = {"model-00001-of-00002.safetensors": ["a.weight"], "model-00002-of-00002.safetensors": ["b"]}


@pytest.fixture
def sharded(folder):
    for file, names in SHARDS.items():
        write_safetensors(folder / file, {name: ARRAYS[name] for name in names})
    write_index(folder, {name: file for file, names in SHARDS.items() for name in names})
    return folder


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", ["", *SHARDS])
def test_the_files_that_an_index_names_are_read_as_one(sharded, name):
    file = open_safetensors(sharded / name)
    assert file.path.name == "model.safetensors.index.json"
    assert [each.name for each in file.paths] == list(SHARDS)
    for key, values in ARRAYS.items():
        np.testing.assert_array_equal(dequantize(file.tensors[key]), values)


def test_a_whole_file_is_taken_before_an_index(sharded):
    write_safetensors(sharded / "model.safetensors", {"c": np.ones(3, np.float32)})
    assert list(open_safetensors(sharded).tensors) == ["c"]


FIRST, SECOND = SHARDS
BAD_INDEX = {
    "no map": (None, "weight_map must be an object of 1 to"),
    "an empty map": ({}, "weight_map must be an object of 1 to"),
    "a file outside": ({"a.weight": "../x.safetensors"}, "'a.weight' is said to be in '../x.safetensors', which is no"),
    "an absolute file": ({"a.weight": "/x.safetensors"}, "which is no .safetensors file of the same folder"),
    "no name": ({"a.weight": 3}, "'a.weight' is said to be in '3'"),
    "a pickle": ({"a.weight": "pytorch_model.bin"}, "which is no .safetensors file"),
    "a missing file": ({"a.weight": FIRST, "b": "x.safetensors"}, "names 2 files, and 1 are missing, the first x.saf"),
    "a missing tensor": ({"a.weight": FIRST, "b": SECOND, "c": SECOND}, f"{SECOND}: tensor 'c' is missing"),
    "another's tensor": ({"a.weight": SECOND, "b": SECOND}, f"{SECOND}: tensor 'a.weight' is missing"),
    "a wrong place": ({"a.weight": FIRST, "b": FIRST, "c": SECOND}, f"tensor 'b' is here, and by .* it is in {FIRST}"),
    "a tensor too many": ({"a.weight": FIRST, "c": SECOND}, f"{SECOND}: tensor 'b' is here, and by .* it is nowhere"),
}


@pytest.mark.parametrize(("weight_map", "message"), BAD_INDEX.values(), ids=BAD_INDEX)
def test_an_index_that_does_not_fit_its_files_is_refused(sharded, weight_map, message):
    write_index(sharded, weight_map)
    with pytest.raises(ModelFileError, match=message):
        open_safetensors(sharded)
