"""From a file to an engine: the pool's size and what decided it, what is told on the way, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

import millpond.build as build
from millpond.build import PoolPlan, build_engine, build_model_runner, plan_pool
from millpond.config import EngineConfig
from millpond.core.request import FinishReason, SamplingParams
from millpond.core.reserve import AutoReserve, FixedReserve
from millpond.errors import ConfigError, ModelFileError, ModelNotFoundError
from millpond.kernels.isa import choose
from millpond.load.gguf import open_gguf
from millpond.model.checkpoint import read_figures
from millpond.model.config import ModelConfig
from tiny_llama import write_tiny_llama

GIGABYTE = 10**9
FIGURES = ModelConfig(
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
)
BLOCK_BYTES = 2 * 30 * 3 * 64 * 2 * 16  # keys and values, layers, heads, head_dim, bfloat16, positions
SMALL = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=8, threads=1)


def plan(available: int = 100 * GIGABYTE, **settings) -> PoolPlan:
    return plan_pool(FIGURES, EngineConfig(**settings), available)


# ---- the pool -----------------------------------------------------------------------------------------


def test_a_pool_that_is_asked_for_is_what_there_is():
    got = plan(available=5 * BLOCK_BYTES, num_blocks=5)
    assert (got.num_blocks, got.reason) == (5, "asked for")
    assert (got.num_tokens, got.num_bytes) == (80, 5 * BLOCK_BYTES)


def test_memory_that_is_asked_for_is_filled_with_whole_blocks():
    got = plan(available=3 * BLOCK_BYTES, kv_memory=3 * BLOCK_BYTES - 1)
    assert (got.num_blocks, got.reason) == (2, "kv_memory")
    assert plan(kv_memory=BLOCK_BYTES).num_blocks == 1


def test_blocks_that_are_asked_for_win_over_memory():
    assert plan(num_blocks=5, kv_memory=100 * BLOCK_BYTES).num_blocks == 5


def test_memory_for_less_than_one_block_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=f"kv_memory is 1000 bytes, but one block takes {BLOCK_BYTES}"):
        plan(kv_memory=1000)


def test_otherwise_the_pool_takes_a_share_of_the_memory_that_is_available():
    got = plan(available=GIGABYTE)
    assert got.num_blocks == GIGABYTE // 4 // BLOCK_BYTES
    assert got.reason == "25% of the available memory"


def test_the_pool_takes_no_more_than_all_requests_at_their_longest_could_use():
    got = plan(max_num_seqs=3, max_model_len=100)
    assert (got.num_blocks, got.reason) == (3 * 7, "3 requests of 100 tokens")


def test_the_share_is_what_decides_up_to_the_last_block():
    most = 3 * 7 * BLOCK_BYTES * 4
    sizes = {"max_num_seqs": 3, "max_model_len": 100}
    assert plan(available=most, **sizes).reason == "3 requests of 100 tokens"
    assert plan(available=most - 4, **sizes).num_blocks == 20


def test_memory_too_small_for_one_block_is_refused_with_both_numbers():
    with pytest.raises(
        ConfigError, match=f"5000 bytes of memory are available, too few for one block of {BLOCK_BYTES}"
    ):
        plan(available=5000)


def test_a_block_takes_twice_the_memory_in_float32_and_at_twice_the_size():
    assert plan(num_blocks=5).block_bytes == BLOCK_BYTES
    assert plan(num_blocks=5, dtype="float32").block_bytes == 2 * BLOCK_BYTES
    assert plan(num_blocks=5, block_size=32).block_bytes == 2 * BLOCK_BYTES


def test_8_bit_keys_and_values_take_their_bytes_and_their_scales():
    head = 2 * (64 + 4 * 2)  # a key's scale for every 16 dimensions, in bfloat16, and as much room for a value's
    got = plan(num_blocks=5, kv_dtype="int8", block_size=32)
    assert got.block_bytes == 30 * 3 * head * 32
    assert got.position_bytes == 30 * 3 * head
    assert plan(num_blocks=5).position_bytes == BLOCK_BYTES // 16


def test_the_same_memory_holds_nearly_twice_as_many_tokens_in_8_bits():
    plain, small = (plan(kv_memory=GIGABYTE, kv_dtype=kv_dtype) for kv_dtype in ("auto", "int8"))
    assert 1.75 < small.num_tokens / plain.num_tokens < 2


@pytest.mark.parametrize("block_size", [1, 8, 15, 24, 100])
def test_blocks_that_are_not_made_of_the_kernels_blocks_are_refused(block_size):
    with pytest.raises(ConfigError, match=f"block_size must be a multiple of 16, got {block_size}"):
        plan(block_size=block_size)


def test_the_models_own_length_is_what_counts_where_none_is_given():
    assert plan(num_blocks=5).max_model_len == 8192
    assert plan(num_blocks=5, max_model_len=8192).max_model_len == 8192
    assert plan(num_blocks=5, max_model_len=100).max_model_len == 100


def test_more_tokens_than_the_model_was_made_for_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="max_model_len is 8193, but the model was made for at most 8192 tokens"):
        plan(max_model_len=8193)


@pytest.mark.parametrize(
    ("settings", "reserve"),
    [
        ({"num_blocks": 99}, 0),
        ({"num_blocks": 100}, 1),
        ({"num_blocks": 1000, "watermark": 0.1}, 100),
        ({"num_blocks": 100, "watermark": 0.0}, 0),
        ({"num_blocks": 100, "watermark_blocks": 7}, 7),
        ({"num_blocks": 100, "watermark_blocks": 0, "watermark": 0.5}, 0),
        ({"num_blocks": 1000, "watermark": "auto"}, 0),
        ({"num_blocks": 100, "watermark": "auto", "watermark_blocks": 7}, 7),
    ],
)
def test_the_reserve_is_in_whole_blocks_of_the_pool_that_was_planned(settings, reserve):
    assert plan(**settings).watermark_blocks == reserve


def test_a_reserve_of_the_whole_pool_is_refused():
    with pytest.raises(ConfigError, match="watermark_blocks must be at least 0 and below the 5 blocks of the pool"):
        plan(num_blocks=5, watermark_blocks=5)


# ---- the engine ---------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    write_tiny_llama(tmp_path / "tiny.gguf", types={"*": "Q4_1"}, head_dim=32)
    return tmp_path / "tiny.gguf"


@pytest.fixture
def build_small(path):
    return lambda config=SMALL, **options: build_engine(str(path), config, **options)


def test_an_engine_says_what_its_open_settings_became(build_small):
    config = build_small(EngineConfig(max_num_seqs=2, max_num_batched_tokens=16)).config
    assert config.max_model_len == 512
    assert config.num_blocks == 2 * 32
    assert config.kv_memory == 2 * 32 * 16 * (2 * 2 * 2 * 32 * 2)  # layers, K/V heads, keys and values, head_dim, bytes
    assert config.isa == choose("auto")
    assert config.threads >= 1


def test_the_schedulers_reserve_is_fixed_unless_it_is_to_choose_itself(build_small):
    sizes = {"watermark": 0.25, "num_blocks": 8}
    assert isinstance(build_small(replace(SMALL, **sizes)).scheduler.reserve, FixedReserve)
    scheduler = build_small(replace(SMALL, **{**sizes, "watermark": "auto"})).scheduler
    assert isinstance(scheduler.reserve, AutoReserve)
    assert (scheduler.reserve.num_blocks, scheduler.reserve.block_size) == (8, scheduler.block_size)
    given = build_small(replace(SMALL, **{**sizes, "watermark": "auto"}, watermark_blocks=3)).scheduler
    assert isinstance(given.reserve, FixedReserve)
    assert given.watermark_blocks == 3


@pytest.mark.parametrize(("size", "most_bytes"), [(None, 4 * 2**30), (2**20, 2**20)])
def test_the_folder_of_prefixes_holds_what_the_config_says(build_small, tmp_path, size, most_bytes):
    engine = build_small(replace(SMALL, prefix_dir=tmp_path / "prefixes", prefix_dir_size=size))
    assert engine.scheduler.disk.store._folder.most_bytes == most_bytes
    engine.close()


def test_the_schedulers_pool_and_the_runners_cache_have_the_same_size(build_small):
    engine = build_small(replace(SMALL, block_size=32, max_model_len=64))
    assert engine.scheduler.pool.num_blocks == 8
    assert engine.scheduler.block_size == 32
    assert engine.runner._num_blocks == 8 * 2


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_memory_that_an_engine_names_is_that_of_its_cache(build_small, kv_dtype):
    engine = build_small(replace(SMALL, kv_dtype=kv_dtype))
    assert sum(part.nbytes for part in engine.runner._cache) == engine.config.kv_memory
    assert engine.runner._cache.keys.dtype == (np.uint8 if kv_dtype == "int8" else np.uint16)


def test_an_engine_answers(build_small):
    engine = build_small(replace(SMALL, audit=True))
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert sum(len(output.new_token_ids) for output in outputs) == 4
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_an_engine_guesses_where_it_is_told_to_and_its_answers_stay_the_same(build_small):
    answers, accepted = [], []
    for speculative in ("off", "ngram"):
        engine = build_small(replace(SMALL, audit=True, speculative=speculative, speculative_tokens=6))
        for index in range(6):
            prompt = [5 + index, 6, 7] * 3
            sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
            engine.add_request(str(index), prompt, sampling)
        tokens = {}
        while engine.has_unfinished:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        answers.append(tokens)
        accepted.append(engine.scheduler.counters.accepted_tokens)
    assert answers[0] == answers[1]
    assert accepted[0] == 0
    assert accepted[1] > 20


def test_a_model_given_by_its_path_is_called_by_the_files_name_alone(path, build_small):
    assert build_small().model_name == "tiny"
    assert build_engine(str(path.parent), SMALL).model_name == "tiny"


def test_a_model_given_by_a_known_name_keeps_it(monkeypatch, path):
    monkeypatch.setattr(build, "resolve", lambda model: path)
    assert build_engine("smollm2", SMALL).model_name == "smollm2"
    assert build_engine("org/repo:file.gguf", SMALL).model_name == "org/repo:file.gguf"


def test_a_model_that_is_not_there_is_not_found():
    with pytest.raises(ModelNotFoundError, match="no model 'nowhere'"):
        build_engine("nowhere", SMALL)


def test_more_threads_than_may_run_are_refused(build_small):
    with pytest.raises(ConfigError, match="threads is 5000, but this process may start at most"):
        build_small(replace(SMALL, threads=5000))


def test_kernels_that_the_processor_lacks_or_nobody_knows_are_refused(build_small):
    with pytest.raises(ConfigError, match="isa must be one of auto, amx, avx512, vnni256, avx2, portable; got 'sse'"):
        build_small(replace(SMALL, isa="sse"))


def test_nothing_is_told_of_compilation_when_everything_is_there_already(build_small):
    build_small()
    told = []
    build_small(notify=told.append)
    assert told == []


def test_a_file_without_an_embedding_is_refused(path):
    file = open_gguf(path)
    tensors = {name: tensor for name, tensor in file.tensors.items() if name != "token_embd.weight"}
    with pytest.raises(ModelFileError, match=r"tiny\.gguf: there is no matrix 'token_embd\.weight'"):
        read_figures(replace(file, tensors=tensors))
    flat = replace(file.tensors["token_embd.weight"], shape=(100,))
    with pytest.raises(ModelFileError, match="there is no matrix"):
        read_figures(replace(file, tensors={**tensors, "token_embd.weight": flat}))


def test_the_vocabulary_is_counted_by_the_embedding_and_not_by_what_the_metadata_says(tmp_path):
    write_tiny_llama(tmp_path / "m.gguf", padding_rows=5, metadata={"llama.vocab_size": 7})
    assert read_figures(open_gguf(tmp_path / "m.gguf")).vocab_size == 272


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(tmp_path):
    write_tiny_llama(tmp_path / "m.gguf", padding_rows=-3)
    with pytest.raises(ModelFileError, match=r"the tokenizer has 267 tokens, but the embedding only 264 rows"):
        build_engine(str(tmp_path / "m.gguf"), SMALL)


def test_token_ids_beyond_the_tokenizer_are_refused_at_the_door(tmp_path):
    write_tiny_llama(tmp_path / "m.gguf", padding_rows=5)
    assert build_engine(str(tmp_path / "m.gguf"), SMALL).limits.vocab_size == 267


def test_a_runner_on_its_own_has_room_for_one_sequence_of_the_longest_length(path):
    runner = build_model_runner(path, EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=100))
    assert runner._num_blocks == 7
    assert runner.logits([1, 2, 3]).shape == (3, 267)


def test_the_same_file_and_settings_give_an_engine_of_the_same_bits(build_small):
    tokens = list(range(3, 40))
    first, second = (build_small().runner.logits(tokens) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_pool_larger_than_the_available_memory_is_refused_with_both_numbers():
    config = EngineConfig(num_blocks=1000)
    block_bytes = plan_pool(FIGURES, config, 1 << 40).block_bytes
    with pytest.raises(ConfigError, match=f"1000 blocks takes {1000 * block_bytes} bytes, but {999 * block_bytes} are"):
        plan_pool(FIGURES, config, 999 * block_bytes)
    assert plan_pool(FIGURES, config, 1000 * block_bytes).num_blocks == 1000


# ---- prefixes on disk ---------------------------------------------------------------------------------


def test_the_identity_of_prefixes_is_that_of_all_that_their_bits_depend_on(tmp_path, monkeypatch):
    model, copy, other = tmp_path / "a.gguf", tmp_path / "copy.gguf", tmp_path / "b.gguf"
    for path, content in ((model, b"weights"), (copy, b"weights"), (other, b"weightz")):
        path.write_bytes(content)
    config = EngineConfig(isa="portable")
    own = build._identity((model,), FIGURES, config)
    assert build._identity((copy,), FIGURES, replace(config, threads=1, max_num_seqs=2, num_blocks=9)) == own
    changes = ({"isa": "avx2"}, {"dtype": "float32"}, {"kv_dtype": "int8"}, {"block_size": 32}, {"quantize": "q8"})
    identities = {
        own,
        build._identity((other,), FIGURES, config),
        build._identity((model, other), FIGURES, config),
        build._identity((model,), replace(FIGURES, norm_epsilon=1e-3), config),
        *(build._identity((model,), FIGURES, replace(config, **it)) for it in changes),
    }
    for name in ("get_host_cpu_name", "source_hash"):
        with monkeypatch.context() as changed:
            changed.setattr(build if name == "source_hash" else build.binding, name, lambda *args: "another")
            identities.add(build._identity((model,), FIGURES, config))
    assert len(identities) == 1 + 3 + len(changes) + 2


def test_a_folder_that_cannot_hold_prefixes_is_refused_before_anything_is_packed(tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path)
    monkeypatch.setattr(build, "_build_runner", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match="prefixes cannot be kept in"):
        build_engine(str(path), replace(SMALL, prefix_dir=path))


@pytest.mark.parametrize("model", [None, 5, b"smollm2", ["smollm2"]])
def test_a_model_that_is_neither_a_name_nor_a_path_is_refused(model):
    with pytest.raises(ConfigError, match="model must be a name or a path, got"):
        build_engine(model)


def test_a_model_may_be_a_path(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"has no \.gguf file"):
        build_engine(tmp_path)
