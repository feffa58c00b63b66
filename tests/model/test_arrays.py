"""The rotation's tables and the cache's layout, against their formulas."""

from dataclasses import replace

import numpy as np
import pytest

from millpond.kernels.matmul import ADDS
from millpond.load.gguf import open_gguf
from millpond.model.arrays import new_kv_cache, new_weights
from millpond.model.config import ModelConfig
from millpond.model.llama import DOWN, GATE_UP, OUT, QKV
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
        config = ModelConfig.from_metadata(file.metadata, 267)
        return new_weights(config, replace(load_weights(file, config, "auto"), rope_factors=factors), POSITIONS)

    return build


def assert_tables(weights, angles):
    # an angle of 300 radians in float32 is off by 1.5e-5
    np.testing.assert_allclose(weights.cosine, np.cos(angles), rtol=0, atol=5e-5)
    np.testing.assert_allclose(weights.sine, np.sin(angles), rtol=0, atol=5e-5)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_the_angle_of_a_pair_is_its_position_times_its_frequency(tables, theta):
    weights = tables(**{"rope.freq_base": theta})
    assert weights.cosine.shape == weights.sine.shape == (POSITIONS, HEAD_DIM // 2)
    assert_tables(weights, rotation_angles(POSITIONS, HEAD_DIM, theta, 1.0, None))


def test_linear_scaling_divides_the_positions(tables):
    scaled = tables(**{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert_tables(scaled, rotation_angles(POSITIONS, HEAD_DIM, 10000.0, 4.0, None))
    np.testing.assert_allclose(scaled.cosine[4::4], tables().cosine[1:75], atol=1e-6)


def test_the_files_own_factors_divide_the_frequencies(tables):
    factors = np.linspace(1, 32, HEAD_DIM // 2, dtype=np.float32)
    assert_tables(tables(factors), rotation_angles(POSITIONS, HEAD_DIM, 10000.0, 1.0, factors))


def test_only_the_layers_that_close_a_branch_add_to_the_hidden_state(tables):
    adds = tables().layers[:, :, ADDS]
    np.testing.assert_array_equal(adds[:, [OUT, DOWN]], 1)
    np.testing.assert_array_equal(adds[:, [QKV, GATE_UP]], 0)


@pytest.mark.parametrize(("dtype", "element_bytes"), [(np.uint16, 2), (np.float32, 4)])
def test_the_cache_takes_the_memory_that_the_figures_say(tmp_path, dtype, element_bytes):
    write_tiny_llama(tmp_path / "tiny.gguf", head_dim=HEAD_DIM)
    config = ModelConfig.from_metadata(open_gguf(tmp_path / "tiny.gguf").metadata, 267)
    cache = new_kv_cache(config, 5, dtype)
    assert cache.keys.nbytes + cache.values.nbytes == 5 * 16 * config.kv_bytes_per_position(element_bytes)
    assert not cache.keys.any()
