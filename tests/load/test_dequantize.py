import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_writer import write_gguf
from load.random_blocks import HALVES, OTHERS, random_tensor
from millpond.errors import ModelFileError
from millpond.load.dequantize import (
    AFFINE,
    FLOATS,
    FOUR_BITS,
    LAYOUTS,
    code_bits,
    dequantize,
    dequantize_channels,
    has_affine,
    take_rows,
    to_affine,
)
from millpond.load.ggml_types import BLOCKS, SUPPORTED, GGMLType
from millpond.load.gguf import GGUFTensor, open_gguf
from tiny_llama import write_tiny_llama

QUANTISED = sorted(LAYOUTS)
WITH_ZERO = {GGMLType.Q4_0: 8, GGMLType.Q5_0: 16, GGMLType.Q8_0: 128}


def by_gguf_package(tensor: GGUFTensor) -> np.ndarray:
    kind = GGMLQuantizationType(tensor.type)
    own = {GGMLType.F32: np.float32, GGMLType.F16: np.float16}.get(tensor.type, np.uint8)
    return quants.dequantize(tensor.data.view(own).reshape(tensor.shape[0], -1), kind).astype(np.float32)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_random_blocks_mean_what_the_gguf_package_says(kind):
    tensor = random_tensor(kind, 7, 96)
    values = dequantize(tensor)
    assert values.dtype == np.float32
    assert values.shape == tensor.shape
    assert np.array_equal(values, by_gguf_package(tensor))
    assert len(np.unique(values)) > 2


def test_every_type_that_the_gguf_package_can_dequantise_is_supported():
    theirs = {int(kind) for kind in quants._type_traits} | {int(kind) for kind in (GGMLType.F32, GGMLType.F16)}
    assert {int(kind) for kind in SUPPORTED} == theirs


@pytest.mark.parametrize("kind", AFFINE)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_affine_form_is_exactly_the_dequantised_weight(kind, seed):
    tensor = random_tensor(kind, 5, 64, seed)
    affine = to_affine(tensor)
    scale, offset = (np.repeat(part.astype(np.float32), 32, axis=1) for part in (affine.scale, affine.offset))
    assert np.array_equal(scale * affine.codes + offset, dequantize(tensor))


@pytest.mark.parametrize("kind", QUANTISED)
def test_the_affine_form_has_the_shapes_and_bits_it_promises(kind):
    tensor = random_tensor(kind, 3, 128)
    affine = to_affine(tensor)
    assert affine.codes.shape == (3, 128)
    assert affine.codes.dtype == np.uint8
    assert affine.scale.shape == affine.offset.shape == (3, 4)
    assert affine.scale.dtype == affine.offset.dtype == np.float16
    assert affine.bits == code_bits(tensor) == (4 if kind in (GGMLType.Q4_0, GGMLType.Q4_1) else 8)
    assert affine.codes.max() < 2**affine.bits
    assert all(part.flags.c_contiguous for part in (affine.codes, affine.scale, affine.offset))


@pytest.mark.parametrize("kind", [kind for kind in GGMLType if kind in AFFINE and kind not in LAYOUTS])
def test_super_blocks_that_are_affine_are_so_with_4_bits_and_scales_of_groups_of_32(kind):
    tensor = random_tensor(kind, 3, 512)
    affine = to_affine(tensor)
    assert (affine.codes.shape, affine.scale.shape, affine.offset.shape) == ((3, 512), (3, 16), (3, 16))
    assert affine.bits == code_bits(tensor) == 4
    assert affine.codes.max() == {GGMLType.Q4_K: 15, GGMLType.TQ1_0: 2, GGMLType.TQ2_0: 3}[kind]


@pytest.mark.parametrize("kind", OTHERS)
def test_types_that_are_not_affine_in_4_bits_want_8(kind):
    tensor = random_tensor(kind, 2, 256)
    assert has_affine(tensor) == (to_affine(tensor) is not None) == (kind in AFFINE)
    assert code_bits(tensor) == (4 if kind in FOUR_BITS else 8)


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("rows", [[], [2], [3, 4, 5], [6, 0, 0, 3]], ids=str)
def test_some_rows_are_those_of_the_whole_matrix_in_the_order_asked_for(kind, rows):
    tensor, rows = random_tensor(kind, 7, 64), np.array(rows, np.int64)
    some = take_rows(tensor, rows)
    assert some.shape == (rows.size, tensor.shape[1])
    assert np.array_equal(dequantize(some), dequantize(tensor)[rows])


def test_rows_that_follow_each_other_are_not_copied():
    tensor = random_tensor(GGMLType.Q4_1, 7, 64)
    assert np.shares_memory(take_rows(tensor, np.arange(2, 5)).data, tensor.data)


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("channels", [[], [31], [95, 0, 32, 33, 64, 63]], ids=str)
def test_some_channels_are_the_columns_of_the_whole_matrix_in_the_order_asked_for(kind, channels):
    tensor, channels = random_tensor(kind, 7, 96), np.array(channels, np.int64)
    values = dequantize_channels(tensor, channels)
    assert values.dtype == np.float32
    assert np.array_equal(values, dequantize(tensor)[:, channels])


def test_channels_are_read_without_a_look_at_the_others():
    tensor = random_tensor(GGMLType.Q4_1, 4, 96)
    whole = dequantize(tensor)
    tensor.data.view(LAYOUTS[tensor.type])["d"][1::3] = np.nan  # of columns 32 to 63
    assert np.array_equal(dequantize_channels(tensor, np.array([0, 95])), whole[:, [0, 95]])
    with pytest.raises(ModelFileError, match="has a scale that is not finite"):
        dequantize_channels(tensor, np.array([40]))


@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.F16, GGMLType.BF16])
def test_unquantised_types_have_no_affine_form(kind):
    assert to_affine(random_tensor(kind, 2, 32)) is None


def test_a_quantised_vector_has_no_affine_form():
    vector = random_tensor(GGMLType.Q8_0, 1, 64)
    with pytest.raises(ModelFileError, match=r"tensor 'w' has shape \(64,\)"):
        to_affine(GGUFTensor("w", (64,), vector.type, vector.data))


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("read", [dequantize, to_affine])
def test_a_scale_that_is_not_finite_is_refused_by_tensor_and_place(kind, bad, read):
    tensor = random_tensor(kind, 4, 96)
    tensor.data.view(LAYOUTS[kind])["d"][7] = bad  # three blocks a row: the second of row 2
    place = rf"tensor 'w' \({kind.name}\) has a scale that is not finite at row 2, column 32; 1 of 12 are not"
    with pytest.raises(ModelFileError, match=place):
        read(tensor)


@pytest.mark.parametrize("kind", HALVES.keys() & set(SUPPORTED))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_super_block_that_is_not_finite_is_refused_by_tensor_and_place(kind, bad):
    tensor = random_tensor(kind, 4, 512)
    tensor.data.reshape(-1, BLOCKS[kind][1])[5 * 512 // BLOCKS[kind][0] // 2, HALVES[kind][0] :][:2] = np.array(
        [bad], np.float16
    ).view(np.uint8)
    with pytest.raises(ModelFileError, match=rf"tensor 'w' \({kind.name}\) has a .* not finite at row 2, column 256;"):
        dequantize(tensor)
    if has_affine(tensor):
        with pytest.raises(ModelFileError, match="not finite at row 2"):
            to_affine(tensor)


@pytest.mark.parametrize("kind", [GGMLType.Q4_1, GGMLType.Q5_1])
@pytest.mark.parametrize("read", [dequantize, to_affine])
def test_a_minimum_that_is_not_finite_is_refused(kind, read):
    tensor = random_tensor(kind, 4, 96)
    tensor.data.view(LAYOUTS[kind])["m"][0] = np.nan
    with pytest.raises(ModelFileError, match="has a minimum that is not finite at row 0, column 0"):
        read(tensor)


@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.F16, GGMLType.BF16])
def test_an_unquantised_value_that_is_not_finite_is_refused(kind):
    tensor = random_tensor(kind, 4, 32)
    tensor.data.view(np.uint32 if kind is GGMLType.F32 else np.uint16)[33] = -1 & (
        0xFFFFFFFF if kind is GGMLType.F32 else 0xFFFF
    )
    with pytest.raises(ModelFileError, match="has a value that is not finite at row 1, column 1"):
        dequantize(tensor)


@pytest.mark.parametrize(("kind", "zero"), WITH_ZERO.items())
def test_a_scale_whose_offset_leaves_float16_is_refused_with_the_limit(kind, zero):
    tensor = random_tensor(kind, 2, 32)
    scales = tensor.data.view(LAYOUTS[kind])["d"]
    scales[:] = np.nextafter(np.float16(65536 / zero), np.float16(0))
    assert np.abs(to_affine(tensor).offset).max() == 65504
    scales[1] = 65536 / zero
    with pytest.raises(
        ModelFileError, match=rf"tensor 'w' \({kind.name}\) has a scale of {65536 // zero}; {zero} times"
    ):
        to_affine(tensor)


@pytest.mark.parametrize("kind", [kind.name for kind in (*FLOATS, *LAYOUTS)])
def test_each_type_in_a_file_is_read_by_its_id_whatever_the_file_is_called(tmp_path, kind):
    path = tmp_path / "model.Q4_0.gguf"
    reference = write_tiny_llama(path, layers=1, types={"*": kind})
    tensors = open_gguf(path).tensors
    assert tensors["blk.0.ffn_up.weight"].type.name == kind
    up = dequantize(tensors["blk.0.ffn_up.weight"])
    assert np.array_equal(up, reference["model.layers.0.mlp.up_proj.weight"])


def test_q_and_k_rows_of_a_file_are_permuted_with_their_own_head_counts(tmp_path):
    path = tmp_path / "tiny.gguf"
    reference = write_tiny_llama(path, heads=4, kv_heads=2, head_dim=16, layers=1, types={"*": "Q8_0"})
    tensors = open_gguf(path).tensors
    for part, heads in (("q", 4), ("k", 2)):
        in_file = dequantize(tensors[f"blk.0.attn_{part}.weight"])
        pairs = in_file.reshape(heads, 8, 2, 64)  # rope pairs side by side in the file, half a head apart outside
        outside = reference[f"model.layers.0.self_attn.{part}_proj.weight"].reshape(heads, 2, 8, 64)
        assert np.array_equal(pairs[:, :, 0], outside[:, 0])
        assert np.array_equal(pairs[:, :, 1], outside[:, 1])


def test_a_file_written_from_packed_blocks_gives_the_same_blocks_back(tmp_path):
    from gguf_writer import TensorData

    tensor = random_tensor(GGMLType.Q5_1, 3, 64)
    write_gguf(tmp_path / "m.gguf", {}, {"w": TensorData(tensor.shape, int(tensor.type), tensor.data.tobytes())})
    assert np.array_equal(dequantize(open_gguf(tmp_path / "m.gguf").tensors["w"]), dequantize(tensor))
