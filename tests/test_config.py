"""Every setting of EngineConfig is checked when it is made."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.config import EngineConfig
from millpond.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float16"),
        ("kv_dtype", "float8"),
        ("kv_dtype", None),
        ("quantize", "q5"),
        ("quantize", True),
        ("max_model_len", 0),
        ("max_num_seqs", None),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", 64.0),
        ("itl_target", 0),
        ("itl_target", float("inf")),
        ("itl_target", True),
        ("block_size", None),
        ("num_blocks", -1),
        ("kv_memory", "1G"),
        ("threads", 0),
        ("speculative", "on"),
        ("speculative", None),
        ("speculative_tokens", 0),
        ("speculative_tokens", 2.0),
        ("watermark", 1),
        ("watermark", float("nan")),
        ("watermark", None),
        ("watermark", "0.1"),
        ("watermark", "Auto"),
        ("watermark_blocks", -1),
        ("watermark_blocks", 1.5),
        ("watermark_blocks", "2"),
        ("seed", None),
        ("seed", "x"),
        ("seed", [1]),
        ("audit", "no"),
        ("prefix_cache", "off"),
        ("prefix_cache", None),
        ("policy", "lifo"),
        ("policy", None),
        ("prefix_dir_size", 0),
        ("prefix_dir", 1),
        ("prefix_dir", ""),
    ],
)
def test_a_setting_of_the_wrong_kind_or_size_is_refused_by_name(name: str, value: Any):
    with pytest.raises(ConfigError, match=f"^{name} must be "):
        EngineConfig(**{name: value})


def test_a_reserve_may_choose_itself_unless_it_is_given_in_blocks():
    assert EngineConfig(watermark="auto").chooses_reserve
    assert not EngineConfig(watermark="auto", watermark_blocks=3).chooses_reserve
    assert not EngineConfig().chooses_reserve


def test_a_folder_of_prefixes_without_a_prefix_cache_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="but prefix_cache is off: turn it on, or give no prefix_dir"):
        EngineConfig(prefix_dir=tmp_path, prefix_cache=False)
    assert EngineConfig(prefix_dir=str(tmp_path)).prefix_dir == tmp_path


def test_a_size_of_the_folder_of_prefixes_without_the_folder_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match="prefix_dir_size bounds a folder that is not named: name one with prefix_dir"
    ):
        EngineConfig(prefix_dir_size=4 * 2**30)
    assert EngineConfig(prefix_dir=tmp_path, prefix_dir_size=2**20).prefix_dir_size == 2**20


def test_a_token_budget_that_no_scratch_could_hold_is_refused():
    assert EngineConfig(max_num_batched_tokens=1 << 20).max_num_batched_tokens == 1 << 20
    with pytest.raises(ConfigError, match="max_num_batched_tokens must be at most 1048576, got 1048577"):
        EngineConfig(max_num_batched_tokens=(1 << 20) + 1)


def test_8_bit_keys_and_values_are_refused_beside_float32_for_everything():
    with pytest.raises(ConfigError, match="kv_dtype int8 would round what dtype float32 keeps exact"):
        EngineConfig(dtype="float32", kv_dtype="int8")
    with pytest.raises(ConfigError, match="quantize q8 would round what dtype float32 keeps exact"):
        EngineConfig(dtype="float32", quantize="q8")


@pytest.mark.parametrize(
    ("settings", "kv_type"),
    [({}, "bfloat16"), ({"dtype": "float32"}, "float32"), ({"kv_dtype": "int8"}, "int8")],
)
def test_the_type_of_keys_and_values_follows_from_the_settings(settings: dict[str, Any], kv_type: str):
    assert EngineConfig(**settings).kv_type == kv_type


@pytest.mark.parametrize("weight", [0.0, -1, 1001, float("nan"), True, "2"])
def test_a_weight_out_of_bounds_is_refused_with_its_tenant(weight: Any):
    with pytest.raises(ConfigError, match=r"tenant_weights must be from 0.001 to 1000, got .* for 'key1'"):
        EngineConfig(policy="fair", tenant_weights=(("key1", weight),))


def test_weights_without_the_fair_policy_are_refused():
    assert EngineConfig(policy="fair", tenant_weights=(("a", 2.0),)).tenant_weights == (("a", 2.0),)
    with pytest.raises(
        ConfigError, match="tenant_weights count with the policy fair, and it is priority: set policy to fair"
    ):
        EngineConfig(policy="priority", tenant_weights=(("a", 2.0),))
