"""The rotation's tables and the cache's layout, against their formulas."""

from dataclasses import replace

import numpy as np
import pytest

from millpond.kernels.matmul import ADDS
from millpond.load.gguf import open_gguf
from millpond.model.arrays import block_places, kv_block_bytes, kv_storage, new_kv_cache, new_weights
from millpond.model.figures import figures_of_gguf
from millpond.model.forward import DOWN, GATE_UP, OUT, QKV
from millpond.model.weights import load_weights
from model.reference_llama import rotation_angles
from tiny_llama import write_tiny_llama

POSITIONS, HEAD_DIM = 300, 32


@pytest.fixture
def tables(tmp_path):
    """A function from metadata and factors to the model's arrays."""

    def build(factors=None, **metadata):
        path = tmp_path / "tiny.gguf"
        write_tiny_llama(path, head_dim=HEAD_DIM, metadata={f"llama.{key}": value for key, value in metadata.items()})
        file = open_gguf(path)
        config = figures_of_gguf(file.metadata, 267)
        return new_weights(
            config, replace(load_weights(file, config, "auto"), rope_factors=factors), POSITIONS, "portable"
        )

    return build


def assert_tables(weights, angles):
    # an angle of 300 radians in float32 is off by 1.5e-5
    np.testing.assert_allclose(weights.cosine[0], np.cos(angles), rtol=0, atol=5e-5)
    np.testing.assert_allclose(weights.sine[0], np.sin(angles), rtol=0, atol=5e-5)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_the_angle_of_a_pair_is_its_position_times_its_frequency(tables, theta):
    weights = tables(**{"rope.freq_base": theta})
    assert weights.cosine.shape == weights.sine.shape == (1, POSITIONS, HEAD_DIM // 2)
    assert_tables(weights, rotation_angles(POSITIONS, HEAD_DIM, theta, 1.0, None))


def test_linear_scaling_divides_the_positions(tables):
    scaled = tables(**{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert_tables(scaled, rotation_angles(POSITIONS, HEAD_DIM, 10000.0, 4.0, None))
    np.testing.assert_allclose(scaled.cosine[0, 4::4], tables().cosine[0, 1:75], atol=1e-6)


def test_the_files_own_factors_divide_the_frequencies(tables):
    factors = np.linspace(1, 32, HEAD_DIM // 2, dtype=np.float32)
    assert_tables(tables(factors), rotation_angles(POSITIONS, HEAD_DIM, 10000.0, 1.0, factors))


def test_only_the_layers_that_close_a_branch_add_to_the_hidden_state(tables):
    adds = tables().layers[:, :, ADDS]
    np.testing.assert_array_equal(adds[:, [OUT, DOWN]], 1)
    np.testing.assert_array_equal(adds[:, [QKV, GATE_UP]], 0)


# Of a key and a value of 32 dimensions: two or four bytes each; or one each, two scales of a key and one of a value.
HEAD_BYTES = {np.uint16: 2 * 32 * 2, np.float32: 2 * 32 * 4, np.uint8: 2 * 32 + 2 * 2 + 4}
every_storage = pytest.mark.parametrize("dtype", HEAD_BYTES)


@pytest.fixture
def figures(tmp_path):
    """Two layers and two K/V heads."""
    write_tiny_llama(tmp_path / "tiny.gguf", head_dim=HEAD_DIM)
    return figures_of_gguf(open_gguf(tmp_path / "tiny.gguf").metadata, 267)


@every_storage
def test_a_block_takes_the_keys_and_values_of_16_positions_of_every_layer_and_head(figures, dtype):
    assert kv_block_bytes(figures, dtype) == 16 * 2 * 2 * HEAD_BYTES[dtype]
    cache = new_kv_cache(figures, 5, dtype)
    assert sum(part[:, :1].nbytes for part in cache) == kv_block_bytes(figures, dtype)
    assert cache.keys.dtype == cache.values.dtype == dtype
    assert not cache.keys.any()
    assert not cache.values.any()


@every_storage
def test_every_byte_of_a_cache_is_one_blocks_in_one_layer_and_head(figures, dtype):
    cache, places = new_kv_cache(figures, 19, dtype), block_places(figures, 19)
    seen = []
    for part in cache:
        for layer, place, head in np.ndindex(part.shape[0], len(places), part.shape[2]):
            own = part[layer, places[place], head]
            assert own.flags.c_contiguous
            seen += range(own.ctypes.data, own.ctypes.data + own.nbytes, 16)
    assert len(seen) == len(set(seen)) == 19 * kv_block_bytes(figures, dtype) // 16


@every_storage
def test_a_head_finds_the_keys_of_8_blocks_in_a_row_and_then_the_values(figures, dtype):
    cache, places = new_kv_cache(figures, 19, dtype), block_places(figures, 19)
    keys, values = cache.keys, cache.values
    for first in (0, 8):
        starts = [keys[1, places[block], 1].ctypes.data for block in range(first, first + 8)]
        starts += [values[1, places[block], 1].ctypes.data for block in range(first, first + 8)]
        assert set(np.diff(starts)) == {keys[0, 0, 0].nbytes}


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "storage"),
    [("auto", "auto", np.uint16), ("float32", "auto", np.float32), ("auto", "int8", np.uint8)],
)
def test_keys_and_values_are_kept_in_the_type_that_the_settings_say(dtype, kv_dtype, storage):
    assert kv_storage(dtype, kv_dtype) is storage
