"""A config.json's figures: how each architecture reads its own, and what is refused by name and value."""

from typing import Any

import pytest

from millpond.errors import ModelFileError
from millpond.model.architectures import ARCHITECTURES
from millpond.model.config import NO_ROPE, ModelConfig
from millpond.model.figures import figures_of_config, figures_of_gguf
from tiny_bert import CONFIG as BERT
from tiny_bert import CONTEXT, bert_metadata
from tiny_models import TINY, WINDOW, tiny_model


def config_of(name: str, changes: dict[str, Any] | None = None) -> ModelConfig:
    config = {**tiny_model(**TINY[name]).config, **(changes or {})}
    return figures_of_config({key: value for key, value in config.items() if value is not None}, 267)


def test_every_architecture_has_a_tiny_model():
    encoder = figures_of_config(BERT, 267)
    assert encoder.is_encoder
    assert {config_of(name).architecture for name in TINY} | {encoder.architecture} == set(ARCHITECTURES)


def test_every_layer_of_mistral_has_the_window_or_none_has():
    assert config_of("mistral").windows == (WINDOW, WINDOW)
    assert config_of("mistral", {"sliding_window": None}).windows == ()


def test_gemmas_windows_alternate_and_its_rotations_go_with_them():
    assert config_of("gemma2").windows == (WINDOW, 0, WINDOW)
    gemma3 = config_of("gemma3")
    assert gemma3.windows == (WINDOW,) * 5 + (0, WINDOW)
    assert gemma3.rope_of == (1,) * 5 + (0, 1)
    assert [(rope.theta, rope.scaling) for rope in gemma3.ropes] == [(1e6, "linear"), (1e4, "none")]


def test_a_list_of_layer_types_wins_over_the_usual_pattern():
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert config_of("gemma2", {"layer_types": kinds}).windows == (0, WINDOW, 0)


def test_qwen_has_windows_only_on_request_and_in_its_upper_layers():
    window = {"sliding_window": 8, "max_window_layers": 1}
    assert config_of("qwen2", window).windows == ()
    assert config_of("qwen2", {**window, "use_sliding_window": True}).windows == (0, 8)


def test_every_fourth_layer_of_smollm3_turns_nothing():
    assert config_of("smollm3").rope_of == (0, 0, 0, NO_ROPE, 0)
    assert config_of("smollm3", {"no_rope_layers": [1, 0, 1, 1, 1]}).rope_of == (0, NO_ROPE, 0, 0, 0)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"type": "dynamic", "factor": 2.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        ({"type": "default"}, 512),
    ],
)
def test_a_text_may_be_as_long_as_the_scaling_makes_it(scaling, length):
    assert config_of("llama", {"rope_scaling": scaling}).context_length == length


def test_the_largest_gemma_of_a_kind_scales_scores_by_another_width():
    """A GGUF does not say which; 46 layers are Gemma 2 27B."""
    metadata = {
        "general.architecture": "gemma2",
        "gemma2.block_count": 46,
        "gemma2.context_length": 8192,
        "gemma2.embedding_length": 4608,
        "gemma2.feed_forward_length": 36864,
        "gemma2.attention.head_count": 32,
        "gemma2.attention.head_count_kv": 16,
        "gemma2.attention.key_length": 128,
        "gemma2.attention.layer_norm_rms_epsilon": 1e-6,
    }
    assert figures_of_gguf(metadata, 256000).attention_scale == 144**-0.5
    assert figures_of_gguf({**metadata, "gemma2.block_count": 42}, 256000).attention_scale == 128**-0.5


REFUSALS = {
    "an unknown model": (
        "llama",
        {"model_type": "mamba"},
        "model_type 'mamba' is not supported; supported: llama, mis",
    ),
    "no model_type": ("llama", {"model_type": None}, "has no 'model_type'"),
    "biases": ("llama", {"attention_bias": True}, "'attention_bias' is True, which is not supported; supported: False"),
    "another activation": ("qwen3", {"hidden_act": "relu"}, "'hidden_act' is 'relu', which is not supported; supp"),
    "exact gelu": ("gemma2", {"hidden_activation": "gelu"}, "'hidden_activation' is 'gelu', which is not supported"),
    "no layers": ("qwen2", {"num_hidden_layers": 0}, "'num_hidden_layers' must be at least 1, got 0"),
    "no epsilon": ("granite", {"rms_norm_eps": None}, "has no 'rms_norm_eps'"),
    "unknown layers": ("gemma2", {"layer_types": ["full_attention"]}, "'layer_types' is .*; supported: a list of 3"),
    "dense layers among experts": ("qwen3 moe", {"mlp_only_layers": [1]}, r"'mlp_only_layers' is \[1\], which is not"),
    "more experts than there are": ("qwen3 moe", {"num_experts_per_tok": 6}, "must be at most 5, got 6"),
    "more turns than there is": ("phi3", {"partial_rotary_factor": 1.5}, "of 2 to 32 dimensions can turn, got 48"),
    "a rotation for no layer": ("smollm3", {"no_rope_layers": [1]}, "'no_rope_layers' is .*; supported: a list of 5"),
    "windows on request": ("smollm3", {"use_sliding_window": True}, "'use_sliding_window' is True, which is not supp"),
}


@pytest.mark.parametrize(("name", "changes", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_config_that_cannot_be_run_is_refused_by_field_and_value(name, changes, message):
    with pytest.raises(ModelFileError, match=message):
        config_of(name, changes)


def test_a_window_in_a_file_of_olmo2_is_olmo_3s_and_refused():
    tiny = tiny_model(**TINY["olmo2"])
    metadata = {f"olmo2.{key}": value for key, value in {**tiny._common(), "attention.sliding_window": 8}.items()}
    with pytest.raises(ModelFileError, match=r"'olmo2\.attention\.sliding_window' is 8, which is not supported"):
        figures_of_gguf({"general.architecture": "olmo2", **metadata}, 267)


def test_the_figures_of_an_encoder_are_the_same_from_both_files():
    config = figures_of_config(BERT, 267)
    assert config == figures_of_gguf(bert_metadata(), 267)
    assert (config.head_dim, config.context_length, config.token_types) == (32, CONTEXT, 2)
    assert config.rope_of == (NO_ROPE, NO_ROPE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu_new"}, "'hidden_act' is 'gelu_new', which is not supported; supported: 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "'position_embedding_type' is 'relative_key'"),
        ({"is_decoder": True}, "'is_decoder' is True"),
        ({"layer_norm_eps": 0}, "'layer_norm_eps' must be above 0"),
        ({"type_vocab_size": 0}, "'type_vocab_size' must be at least 1"),
        ({"hidden_size": 96}, "head_dim must be a multiple of 16, got 24"),
    ],
    ids=str,
)
def test_another_kind_of_encoder_is_refused(changes, said):
    with pytest.raises(ModelFileError, match=said):
        figures_of_config({**BERT, **changes}, 267)


def test_a_gguf_that_looks_back_alone_is_refused():
    with pytest.raises(ModelFileError, match=r"'bert\.attention\.causal' is True"):
        figures_of_gguf({**bert_metadata(), "bert.attention.causal": True}, 267)
