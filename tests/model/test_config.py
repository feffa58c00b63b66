"""A model's figures: read from metadata, and refused with what is wrong where they cannot be run."""

import pytest

from millpond.errors import ModelFileError
from millpond.model.config import ModelConfig
from millpond.model.figures import figures_of_gguf
from millpond.model.rope import Rope

SMOLLM2 = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 64,
}


def config_of(changes=None, vocab_size=49152, **named) -> ModelConfig:
    metadata = {**SMOLLM2, **{f"llama.{key}": value for key, value in (changes or {}).items()}, **named}
    return figures_of_gguf({key: value for key, value in metadata.items() if value is not None}, vocab_size)


def test_figures_are_read_from_the_metadata():
    assert config_of() == ModelConfig(
        architecture="llama",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn_size=1536,
        vocab_size=49152,
        context_length=8192,
        norm_epsilon=1e-5,
        ropes=(Rope(100000.0),),
        interleaved=True,
    )
    assert config_of().heads_per_kv == 3


def test_what_a_file_may_leave_out_has_its_usual_value():
    config = config_of({"attention.head_count_kv": None, "rope.freq_base": None, "rope.dimension_count": None})
    assert (config.num_kv_heads, config.ropes[0].theta, config.head_dim) == (9, 10000.0, 64)


def test_a_head_dim_of_its_own_need_not_divide_the_hidden_size():
    config = config_of({"attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 128})
    assert (config.head_dim, config.hidden_size) == (128, 576)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 1.0),
        ({"rope.scaling.type": "none"}, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 2.0}, 2.0),
    ],
)
def test_linear_scaling_of_positions_is_read_in_both_spellings(changes, scale):
    rope = config_of(changes).ropes[0]
    assert (rope.scaling, rope.factor) == (("none", 1.0) if scale == 1 else ("linear", scale))


@pytest.mark.parametrize("kind", ["llama3", "dynamic", "LINEAR"])
def test_a_scaling_of_positions_that_is_not_known_is_refused_by_name(kind):
    with pytest.raises(
        ModelFileError, match=f"rope scaling '{kind}' is not supported; supported: none, linear, yarn, longrope"
    ):
        config_of({"rope.scaling.type": kind, "rope.scaling.factor": 4.0})


def test_linear_scaling_without_its_factor_is_refused():
    with pytest.raises(ModelFileError, match=r"the metadata has no 'llama\.rope\.scaling\.factor'"):
        config_of({"rope.scaling.type": "linear"})


REFUSALS = {
    "another architecture": (
        {},
        {"general.architecture": "gpt2"},
        r"architecture 'gpt2' is not supported; supported: llama",
    ),
    "no architecture": ({}, {"general.architecture": None}, r"the metadata has no 'general\.architecture'"),
    "no layers": ({"block_count": 0}, {}, r"'llama\.block_count' must be at least 1, got 0"),
    "too many layers": ({"block_count": 5000}, {}, r"'llama\.block_count' must be at most 1024, got 5000"),
    "no heads": ({"attention.head_count": 0}, {}, r"'llama\.attention\.head_count' must be at least 1, got 0"),
    "heads for each layer": ({"attention.head_count": [9] * 30}, {}, r"must be an integer, got an array of 30"),
    "K/V heads for each layer": ({"attention.head_count_kv": [3] * 30}, {}, r"must be an integer, got an array of 30"),
    "heads that cannot be shared": ({"attention.head_count_kv": 2}, {}, r"9 heads cannot share 2 K/V heads"),
    "no K/V heads": ({"attention.head_count_kv": 0}, {}, r"9 heads cannot share 0 K/V heads"),
    "more K/V heads than heads": ({"attention.head_count_kv": 18}, {}, r"9 heads cannot share 18 K/V heads"),
    "a head_dim that is no multiple of 16": (
        {"attention.key_length": 72},
        {},
        r"head_dim must be a multiple of 16, got 72",
    ),
    "a head_dim of 8": ({"attention.key_length": 8}, {}, r"head_dim must be a multiple of 16, got 8"),
    "no head_dim": ({"attention.key_length": 0}, {}, r"head_dim must be a multiple of 16, got 0"),
    "a negative head_dim": ({"attention.key_length": -64}, {}, r"head_dim must be a multiple of 16, got -64"),
    "a hidden size that is no multiple of 32": (
        {"embedding_length": 592, "attention.key_length": 64},
        {},
        r"hidden_size must be a multiple of 32, got 592",
    ),
    "an ffn size that is no multiple of 32": (
        {"feed_forward_length": 1540},
        {},
        r"ffn_size must be a multiple of 32, got 1540",
    ),
    "an odd number of heads of 16": (
        {"attention.key_length": 16, "rope.dimension_count": 16},
        {},
        r"heads \* head_dim must be a multiple of 32, got 144",
    ),
    "a partial rotation": ({"rope.dimension_count": 32}, {}, r"llama\.rope\.dimension_count is 32; only 64"),
    "values of another size": (
        {"attention.value_length": 128},
        {},
        r"llama\.attention\.value_length is 128; only 64",
    ),
    "a mixture of experts": ({"expert_count": 8}, {}, r"a mixture of experts is not supported in architecture llama"),
    "no epsilon": (
        {"attention.layer_norm_rms_epsilon": None},
        {},
        r"the metadata has no 'llama\.attention\.layer_norm_rms_epsilon'",
    ),
    "an epsilon of 0": ({"attention.layer_norm_rms_epsilon": 0.0}, {}, r"must be above 0, got 0"),
    "a rope base of 0": ({"rope.freq_base": 0.0}, {}, r"'llama\.rope\.freq_base' must be above 0, got 0"),
    "a scale of 0": ({"rope.scale_linear": 0.0}, {}, r"'llama\.rope\.scale_linear' must be above 0, got 0"),
    "no context": ({"context_length": 0}, {}, r"'llama\.context_length' must be at least 1, got 0"),
}


@pytest.mark.parametrize(("changes", "named", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_model_that_cannot_be_run_is_refused_with_what_is_wrong(changes, named, message):
    with pytest.raises(ModelFileError, match=message):
        config_of(changes, **named)


def test_no_experts_is_as_good_as_not_saying():
    assert config_of({"expert_count": 0}) == config_of()
