import struct
import tracemalloc
from math import prod
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gguf_writer as writer
from gguf_writer import Typed, assemble, pair, tensor_info
from millpond.errors import ModelFileError
from millpond.load.ggml_types import BLOCKS, GGMLType
from millpond.load.gguf import open_gguf
from tiny_llama import write_tiny_llama

F32 = 0
FOUR_FLOATS = struct.pack("<4f", 1.0, 2.0, 3.0, 4.0)


def put(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def refusal(folder: Path, content: bytes) -> str:
    """The message with which a file of this content is refused."""
    with pytest.raises(ModelFileError) as caught:
        open_gguf(put(folder, content))
    message = str(caught.value)
    assert message.startswith("model.gguf: ")
    assert str(folder) not in message
    return message


def with_tensor(name: str = "t", shape=(4,), type_id: int = F32, offset: int = 0, data: bytes = FOUR_FLOATS) -> bytes:
    return assemble([], [tensor_info(name, shape, type_id, offset)], data)


def test_a_tiny_model_is_read_as_the_gguf_package_reads_it(tmp_path):
    path = tmp_path / "tiny.gguf"
    types = {"*attn_q*": "Q4_0", "*attn*": "Q4_1", "*gate*": "Q5_0", "*up*": "Q5_1", "*down*": "BF16", "token*": "Q8_0"}
    write_tiny_llama(path, types=types, tied=False)
    ours, theirs = open_gguf(path), GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.type == tensor.tensor_type
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.data.tobytes() == tensor.data.tobytes()
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert dict(ours.metadata) == fields


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_metadata_value_comes_back_as_written(tmp_path, version):
    values = {
        "u8": Typed(writer.UINT8, 255),
        "i8": Typed(writer.INT8, -128),
        "u16": Typed(writer.UINT16, 65535),
        "i16": Typed(writer.INT16, -32768),
        "u32": Typed(writer.UINT32, 2**32 - 1),
        "i32": Typed(writer.INT32, -(2**31)),
        "u64": Typed(writer.UINT64, 2**64 - 1),
        "i64": Typed(writer.INT64, -(2**63)),
        "f32": Typed(writer.FLOAT32, 0.5),
        "f64": Typed(writer.FLOAT64, 0.1),
        "yes": True,
        "no": False,
        "text": "Ġtö \U0001f41f",
        "empty": "",
        "strings": ["a", "", "bcd"],
        "numbers": [1, -2, 3],
        "floats": [0.5, -0.25],
        "bools": [True, False],
        "nothing": [],
        "nested": [["a"], ["b", "c"], []],
    }
    path = put(tmp_path, assemble([pair(key, value) for key, value in values.items()], version=version))
    expected = {key: value.value if isinstance(value, Typed) else value for key, value in values.items()}
    got = open_gguf(path).metadata
    assert dict(got) == expected
    assert type(got["yes"]) is bool


def test_the_sizes_of_all_types_agree_with_the_gguf_package():
    from gguf import GGML_QUANT_SIZES

    theirs = {int(kind): tuple(size) for kind, size in GGML_QUANT_SIZES.items()}
    assert {int(kind): BLOCKS[kind] for kind in GGMLType if int(kind) in theirs} == theirs
    assert set(BLOCKS) == set(GGMLType)


def test_tensor_data_is_a_read_only_view_of_the_file(tmp_path):
    path = put(tmp_path, with_tensor(shape=(2**20,), data=bytes(2**22)))
    tracemalloc.start()
    tensor = open_gguf(path).tensors["t"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert not tensor.data.flags.writeable
    assert tensor.data.nbytes == 2**22


def test_another_alignment_moves_the_data(tmp_path):
    path = tmp_path / "model.gguf"
    values = np.arange(8, dtype=np.float32)
    writer.write_gguf(
        path, {}, {"a": writer.quantize(values, "F32"), "b": writer.quantize(values, "F32")}, alignment=256
    )
    tensors = open_gguf(path).tensors
    assert np.array_equal(tensors["b"].data.view(np.float32), values)


@pytest.mark.parametrize("kept", [0, 3, 23])
def test_a_file_cut_in_its_header_is_incomplete(tmp_path, kept):
    message = refusal(tmp_path, with_tensor()[:kept])
    assert message == f"model.gguf: incomplete file: the header needs bytes 0..24, the file has {kept}"


def test_a_tiny_model_cut_anywhere_is_refused(tmp_path):
    write_tiny_llama(tmp_path / "whole.gguf", layers=1, heads=2, kv_heads=1, types={"*": "Q8_0"})
    whole = (tmp_path / "whole.gguf").read_bytes()
    for kept in [*range(0, len(whole), 997), len(whole) - 1]:
        assert "needs" in refusal(tmp_path, whole[:kept])


def test_a_file_one_byte_short_names_the_tensor_and_both_numbers(tmp_path):
    whole = with_tensor("blk.0.attn_q.weight")
    message = refusal(tmp_path, whole[:-1])
    needs = f"needs bytes {len(whole) - 16}..{len(whole)}, the file has {len(whole) - 1}"
    assert message == f"model.gguf: incomplete file: tensor 'blk.0.attn_q.weight' of shape (4,) {needs}"


def test_a_file_cut_in_its_metadata_names_the_key(tmp_path):
    head = assemble([pair("general.name", "a long enough name")])
    assert "incomplete file: metadata 'general.name' needs bytes" in refusal(tmp_path, head[:60])


@pytest.mark.parametrize("magic", [b"GGUG", b"GGML", b"PK\x03\x04", b"\x00\x00\x00\x00"])
def test_another_magic_is_not_a_gguf_file(tmp_path, magic):
    assert f"not a GGUF file: it begins with {magic!r}" in refusal(tmp_path, assemble([], magic=magic))


@pytest.mark.parametrize("version", [0, 1, 4, 99])
def test_other_versions_are_refused_with_theirs_and_ours(tmp_path, version):
    assert f"GGUF version {version}; versions 2 and 3" in refusal(tmp_path, assemble([], version=version))


def test_a_big_endian_file_is_named_as_such(tmp_path):
    assert "big-endian" in refusal(tmp_path, assemble([], version=3 << 24))


@pytest.mark.parametrize("count", [2**60, 2**64 - 1, 2**16, 100])
def test_counts_beyond_the_file_are_refused_at_once(tmp_path, count):
    assert f"{count} metadata pairs" in refusal(tmp_path, assemble([], num_pairs=count))
    assert f"{count} tensors" in refusal(tmp_path, assemble([], num_tensors=count))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**32, 1000])
def test_a_string_longer_than_the_file_is_refused(tmp_path, length):
    lie = writer.string("key") + struct.pack("<IQ", writer.STRING, length) + b"abc"
    assert f"metadata 'key' needs bytes 39..{47 + length}" in refusal(tmp_path, assemble([lie]))


def test_a_long_string_inside_an_array_is_refused_by_its_place(tmp_path):
    lie = writer.string("key") + struct.pack("<IIQ", writer.ARRAY, writer.STRING, 2) + writer.string("a")
    message = refusal(tmp_path, assemble([lie + struct.pack("<Q", 2**63)]))
    assert "metadata 'key', string 1 of 2, needs bytes" in message


@pytest.mark.parametrize("item_type", [writer.UINT8, writer.FLOAT64, writer.STRING, writer.ARRAY, writer.BOOL])
@pytest.mark.parametrize("count", [2**64 - 1, 2**60, 2**23 + 1, 2**20])
def test_an_array_longer_than_the_file_is_refused_before_room_is_made(tmp_path, item_type, count):
    lie = writer.string("key") + struct.pack("<IIQ", writer.ARRAY, item_type, count)
    tracemalloc.start()
    assert "metadata 'key'" in refusal(tmp_path, assemble([lie]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_arrays_of_more_items_than_any_vocabulary_has_are_refused_though_the_file_holds_them(tmp_path):
    half = struct.pack("<IIQ", writer.ARRAY, writer.UINT8, 2**22 + 1) + bytes(2**22 + 1)
    content = assemble([writer.string("a") + half, writer.string("b") + half])
    assert f"metadata 'b' is an array of {2**22 + 1} items" in refusal(tmp_path, content)


def test_a_header_of_a_size_that_no_model_has_is_refused_though_the_file_holds_it(tmp_path):
    path = put(tmp_path, assemble([writer.string("key") + struct.pack("<IQ", writer.STRING, 2**29)]))
    with path.open("r+b") as file:
        file.truncate(2**30)  # a hole: it takes no room
    with pytest.raises(
        ModelFileError, match=f"metadata 'key' ends at byte {47 + 2**29}, and a header may have {2**28}"
    ):
        open_gguf(path)


def test_arrays_nested_too_deep_are_refused(tmp_path):
    level = struct.pack("<IQ", writer.ARRAY, 1)
    message = refusal(tmp_path, assemble([writer.string("key") + struct.pack("<I", writer.ARRAY) + level * 10_000]))
    assert "metadata 'key' has arrays nested deeper than 4" in message


@pytest.mark.parametrize("type_id", [13, 99, 2**32 - 1])
def test_an_undefined_value_type_is_refused(tmp_path, type_id):
    lie = writer.string("key") + struct.pack("<IQ", type_id, 0)
    assert f"metadata 'key' has value type {type_id}" in refusal(tmp_path, assemble([lie]))


def test_a_bool_that_is_neither_is_refused(tmp_path):
    lie = writer.string("key") + struct.pack("<IB", writer.BOOL, 2)
    assert "metadata 'key' is a bool of value 2" in refusal(tmp_path, assemble([lie]))


def test_text_that_is_not_utf8_is_refused_by_key(tmp_path):
    assert "metadata 'key' is not UTF-8" in refusal(tmp_path, assemble([pair("key", b"a\xff")]))
    assert "the key of metadata pair 0 of 1 is not UTF-8" in refusal(tmp_path, assemble([pair(b"\xff", 1)]))


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    assert "metadata 'key' is there twice" in refusal(tmp_path, assemble([pair("key", 1), pair("key", 1)]))


def test_a_tensor_that_is_there_twice_is_refused(tmp_path):
    infos = [tensor_info("t", (4,), F32, 0), tensor_info("t", (4,), F32, 32)]
    assert "tensor 't' is there twice" in refusal(tmp_path, assemble([], infos, bytes(64)))


@pytest.mark.parametrize("alignment", [0, 1, 3, 4, 24, 2**31])
def test_an_alignment_that_is_no_power_of_two_from_eight_is_refused(tmp_path, alignment):
    content = assemble([pair("general.alignment", alignment)])
    assert f"general.alignment must be a power of two from 8 to 65536, got {alignment}" in refusal(tmp_path, content)


def test_an_alignment_that_is_no_number_is_refused(tmp_path):
    assert "general.alignment must be" in refusal(tmp_path, assemble([pair("general.alignment", "32")]))


def test_a_tensor_offset_off_the_alignment_is_refused(tmp_path):
    assert "tensor 't' is at offset 8, not a multiple of the alignment 32" in refusal(tmp_path, with_tensor(offset=8))


@pytest.mark.parametrize("offset", [2**64 - 32, 2**63, 32])
def test_a_tensor_beyond_the_end_is_incomplete(tmp_path, offset):
    assert "incomplete file: tensor 't' of shape (4,) needs bytes" in refusal(tmp_path, with_tensor(offset=offset))


@pytest.mark.parametrize(
    "shape", [(2**32, 2**32), (2**62, 4), (2**63, 2, 2), (2**64 - 1,), (2**31, 2**31, 2**31, 2**31)]
)
def test_dimensions_whose_product_overflows_are_refused_with_the_true_size(tmp_path, shape):
    content = with_tensor(shape=shape)
    begin = len(content) - len(FOUR_FLOATS)
    end = begin + 4 * prod(shape)
    assert f"needs bytes {begin}..{end}, the file has {len(content)}" in refusal(tmp_path, content)


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 4)])
def test_a_tensor_without_values_is_refused(tmp_path, shape):
    assert "has no values" in refusal(tmp_path, with_tensor(shape=shape))


@pytest.mark.parametrize("shape", [(), (1, 1, 1, 1, 4)])
def test_a_number_of_dimensions_out_of_range_is_refused(tmp_path, shape):
    assert f"tensor 't' has {len(shape)} dimensions; 1 to 4" in refusal(tmp_path, with_tensor(shape=shape))


def test_a_row_that_ends_inside_a_block_is_refused(tmp_path):
    message = refusal(tmp_path, with_tensor(shape=(2, 48), type_id=GGMLType.Q4_1, data=bytes(60)))
    assert "tensor 't' has rows of 48 values, not a multiple of the 32 in a block of Q4_1" in message


@pytest.mark.parametrize("kind", [GGMLType.Q8_1, GGMLType.Q8_K, GGMLType.I64, GGMLType.F64, GGMLType.Q4_0_4_4])
def test_a_type_that_cannot_run_is_refused_by_tensor_and_type_name(tmp_path, kind):
    message = refusal(tmp_path, with_tensor("blk.7.ffn_up.weight", shape=(256,), type_id=kind, data=bytes(4096)))
    assert f"tensor 'blk.7.ffn_up.weight' is of type {kind.name}, which is not supported; supported are F32" in message


def test_a_type_id_that_nobody_defined_is_refused(tmp_path):
    assert "tensor 't' has type id 4711, which is not known" in refusal(tmp_path, with_tensor(type_id=4711))


def test_tensors_that_overlap_are_refused_with_both_names(tmp_path):
    infos = [tensor_info("late", (4,), F32, 32), tensor_info("early", (16,), F32, 0)]
    message = refusal(tmp_path, assemble([], infos, bytes(64)))
    assert "tensor 'late' begins at byte" in message
    assert "inside tensor 'early', which ends at" in message


def test_a_long_name_is_cut_and_escaped_in_the_message(tmp_path):
    message = refusal(tmp_path, with_tensor("\x1b[31m\n" + "x" * 5000, offset=8))
    assert len(message) < 250
    assert "\x1b" not in message
    assert "\n" not in message


def test_a_folder_and_a_missing_file_are_model_file_errors(tmp_path):
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelFileError, match=f"^{path.name}: not a file"):
            open_gguf(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_a_file_raises_anything_but_a_model_file_error(tmp_path, data):
    path = tmp_path / "whole.gguf"
    if not path.exists():
        write_tiny_llama(path, layers=1, heads=2, kv_heads=1, types={"*": "Q4_1"}, metadata={"nested": [["a"], [1, 2]]})
    damaged = bytearray(path.read_bytes())
    end_of_head = 8192
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end_of_head))
        replacement = data.draw(st.binary(min_size=1, max_size=8))
        damaged[at : at + len(replacement)] = replacement
    cut = data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))
    try:
        opened = open_gguf(put(tmp_path, bytes(damaged[:cut])))
    except ModelFileError:
        return
    assert all(tensor.data.nbytes > 0 for tensor in opened.tensors.values())
