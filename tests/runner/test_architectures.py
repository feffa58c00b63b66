"""Every architecture: both formats alike, the fast path near the exact one, the same bits alone and in a crowd."""

import numpy as np
import pytest

from millpond.build import build_engine
from millpond.config import EngineConfig
from millpond.errors import ConfigError, ModelFileError
from millpond.runner.bench_kernels import KernelPlan, measure_kernels
from tiny_models import TINY, WINDOW, tiny_model
from tiny_runner import TYPES, assert_same_bits, drive, random_tokens, tiny_runner

# Root mean square error of the logits over their spread, weights, inputs and K/V in bfloat16; measured 0.0072 at most.
MAX_FAST_ERROR = 0.0085
NAMES = [name for name in TINY if not name.startswith("llama")]
PROMPTS = {name: random_tokens(count, seed=count) for name, count in zip("abcd", (33, 5, 16, 47), strict=True)}

every_architecture = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("name", TINY)
def test_a_folder_and_the_gguf_made_of_it_give_the_same_logits(name, tmp_path):
    tiny, tokens = tiny_model(**TINY[name]), random_tokens(75)
    folder, gguf = tiny.write_folder(tmp_path / "folder"), tiny.write_gguf(tmp_path / "tiny.gguf")
    got, expected = (tiny_runner(path, dtype="float32").logits(tokens) for path in (folder, gguf))
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)
    assert np.abs(got).std() > 0.1


@every_architecture
def test_on_the_fast_path_the_logits_stay_near_the_exact_ones(name, tmp_path):
    tiny, tokens = tiny_model(**TINY[name]), random_tokens(75)
    path = tiny.write_gguf(tmp_path / "tiny.gguf", types={"*": "BF16"})
    got, exact = (tiny_runner(path, dtype=dtype).logits(tokens) for dtype in ("auto", "float32"))
    error = np.sqrt(((got - exact) ** 2).mean()) / exact.std()
    assert 0 < error < MAX_FAST_ERROR


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@every_architecture
def test_a_request_gets_the_same_bits_alone_in_a_crowd_and_preempted(name, types, tmp_path):
    path = tiny_model(**{**TINY[name], "hidden": 128}).write_gguf(tmp_path / "tiny.gguf", types={"*": "Q4_1"})
    runner = tiny_runner(path, **types)
    crowd, _ = drive(runner, PROMPTS, max_tokens=2 * WINDOW)
    pressed, scheduler = drive(runner, PROMPTS, max_tokens=2 * WINDOW, num_blocks=8, max_num_batched_tokens=9)
    assert scheduler.counters.preemptions >= 2
    for prompt in PROMPTS:
        alone, _ = drive(runner, {prompt: PROMPTS[prompt]}, max_tokens=2 * WINDOW)
        assert_same_bits(crowd[prompt], alone[prompt])
        assert_same_bits(pressed[prompt], alone[prompt])
        assert len(alone[prompt].token_ids) == 2 * WINDOW
        assert alone[prompt].fault is None


@every_architecture
def test_a_prompt_in_chunks_of_any_size_gives_the_same_bits_on_any_number_of_threads(name, tmp_path):
    path, tokens = tiny_model(**TINY[name]).write_gguf(tmp_path / "tiny.gguf", types={"*": "BF16"}), random_tokens(75)
    whole = tiny_runner(path).logits(tokens, 64)
    two = tiny_runner(path, threads=2)
    for chunk in (1, 7, 16, 63):
        np.testing.assert_array_equal(two.logits(tokens, chunk), whole)


def test_positions_before_a_window_have_no_part_in_it(tmp_path):
    """One layer: a token further back than the window is of no effect; one inside it is."""
    path = tiny_model(**TINY["mistral"], layers=1).write_gguf(tmp_path / "tiny.gguf")
    runner, tokens = tiny_runner(path, dtype="float32"), random_tokens(60)
    before = runner.logits(tokens)[-1]
    for back, counts in ((WINDOW, False), (WINDOW - 1, True)):
        changed = list(tokens)
        changed[-1 - back] = (tokens[-1 - back] + 1) % 267
        assert np.any(runner.logits(changed)[-1] != before) == counts


def test_kernels_of_a_mixture_of_experts_are_not_measured(tmp_path):
    path, plan = tiny_model(**TINY["qwen3 moe"]).write_gguf(tmp_path / "tiny.gguf"), KernelPlan((1,), (16,), (), 1)
    settings = plan.config(dtype="auto", isa="portable", threads=1)
    with pytest.raises(ConfigError, match="mixture of experts"):
        measure_kernels(lambda config: tiny_runner(path), settings, plan, lambda what: None)


def test_an_engine_says_that_a_folder_has_no_tokenizer(tmp_path):
    folder = tiny_model("llama").write_folder(tmp_path / "folder")
    with pytest.raises(ModelFileError, match=r"folder has no tokenizer\.json and no tokenizer\.model"):
        build_engine(str(folder / "model.safetensors"), EngineConfig(num_blocks=8))
