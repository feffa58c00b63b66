"""The runner's logits against a plain forward pass, and their bits the same however the work is cut up."""

import os
import subprocess
import sys
import threading

import numba
import numpy as np
import pytest
from numba.core import event

import tiny_llama
from kernels.emit import NARROW_ISAS, RUNNABLE_ISAS
from millpond.build import build_engine
from millpond.config import EngineConfig
from millpond.core.request import SamplingParams
from millpond.core.step import RunnerTimes, ScheduledRequest, SchedulerOutput, StepResult
from millpond.kernels.matmul import F32_WEIGHTS, U4
from millpond.runner import model_runner
from model import reference_llama
from tiny_llama import write_tiny_llama
from tiny_runner import TYPES, assert_same_bits, drive, fill_with_leftovers, random_tokens, tiny_runner

# Every layer's weights and input are rounded to 8 bits or bfloat16, K/V to bfloat16. Root mean square error of the
# logits over their spread; measured 0.0199 at most.
MAX_FAST_ERROR = 0.0225
# Weights and inputs in bfloat16, K/V in 8 bits: measured 0.0054 at most.
MAX_INT8_KV_ERROR = 0.0062
MIXED_TYPES = {
    "*attn_q*": "Q4_1",
    "*attn_k*": "Q4_0",
    "*attn_v*": "Q8_0",
    "*attn_output*": "BF16",
    "*ffn_gate*": "Q5_1",
    "*ffn_up*": "Q5_0",
    "*ffn_down*": "Q4_1",
    "token_embd.weight": "Q8_0",
}
SHAPES = {
    "grouped heads of 16": {"heads": 4, "kv_heads": 2, "head_dim": 16},
    "a K/V head for each head of 32": {"heads": 4, "kv_heads": 4, "head_dim": 32},
    "three heads to a K/V head of 64": {"heads": 9, "kv_heads": 3, "head_dim": 64, "ffn": 160},
    "one K/V head of 80": {"heads": 4, "kv_heads": 1, "head_dim": 80},
    "a head of its own": {"head_dim": 32, "tied": False},
    "other base and epsilon": {"head_dim": 32, "rope_theta": 500000.0, "rms_norm_eps": 1e-2},
}

every_type = pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)


@pytest.fixture(autouse=True)
def checked_forward(monkeypatch):
    """Every index of every step is inside what it indexes: compiled code would read and write whatever lies there."""
    forward = model_runner.forward

    def checked(entry, tiles, weights, cache, batch, scratch):
        step, room, blocks = batch.fields, scratch.fields, cache.fields.keys.shape[1]
        assert len(step.tokens) <= len(room.hidden)
        assert step.sampled.size <= len(room.logits)
        if len(step.tokens):
            assert 0 <= step.tokens.min() <= step.tokens.max() < room.logits.shape[1]
            assert 0 <= step.positions.min() <= step.positions.max() < weights.fields.cosine.shape[1]
            assert 0 <= step.slots.min() <= step.slots.max() < 16 * blocks
            assert 0 <= step.tables.min() <= step.tables.max() < blocks
        forward(entry, tiles, weights, cache, batch, scratch)

    monkeypatch.setattr(model_runner, "forward", checked)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


@pytest.fixture
def mixed(path):
    """A file with a type for each part, and long enough prompts for it."""
    write_tiny_llama(path, heads=6, kv_heads=2, head_dim=32, types=MIXED_TYPES)
    return path


def expected_logits(weights, tokens, shape):
    return reference_llama.logits(
        weights,
        tokens,
        heads=shape.get("heads", 4),
        kv_heads=shape.get("kv_heads", 2),
        layers=shape.get("layers", 2),
        epsilon=shape.get("rms_norm_eps", 1e-5),
        rope_theta=shape.get("rope_theta", 10000.0),
    )


def assert_float32_close(got, expected):
    # A random model with a tied head gives a token itself a logit of several hundred, where float32 is no finer.
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_in_float32_the_logits_are_those_of_the_plain_forward_pass(path, shape, isa):
    weights, tokens = write_tiny_llama(path, **shape), random_tokens(75)
    got = tiny_runner(path, dtype="float32", isa=isa).logits(tokens)
    assert_float32_close(got, expected_logits(weights, tokens, shape))


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_on_the_fast_path_the_logits_stay_near_those_of_the_plain_forward_pass(path, kind, isa):
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "tied": False}
    weights, tokens = write_tiny_llama(path, types={"*": kind}, **shape), random_tokens(75)
    expected = expected_logits(weights, tokens, shape)
    got = tiny_runner(path, isa=isa).logits(tokens)
    assert (got - expected).std() < MAX_FAST_ERROR * expected.std()
    assert (got.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.9


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_with_8_bit_keys_and_values_the_logits_stay_near_those_of_the_plain_forward_pass(path, head_dim, isa):
    shape = {"heads": 4, "kv_heads": 2, "head_dim": head_dim, "tied": False}
    weights, tokens = write_tiny_llama(path, types={"*": "BF16"}, **shape), random_tokens(75)
    expected = expected_logits(weights, tokens, shape)
    got = tiny_runner(path, isa=isa, kv_dtype="int8").logits(tokens)
    assert (got - expected).std() < MAX_INT8_KV_ERROR * expected.std()


def test_layers_of_many_types_in_one_model_stay_near_the_plain_forward_pass(path):
    weights, tokens = write_tiny_llama(path, heads=6, kv_heads=2, head_dim=32, types=MIXED_TYPES), random_tokens(75)
    expected = expected_logits(weights, tokens, {"heads": 6, "kv_heads": 2})
    got = tiny_runner(path).logits(tokens)
    assert (got - expected).std() < MAX_FAST_ERROR * expected.std()


@pytest.mark.parametrize("shape", [{"ffn": 96, "heads": 4}, {"heads": 3, "kv_heads": 1}], ids=str)
def test_layers_whose_rows_are_no_whole_groups_run_among_those_of_integers(path, shape):
    shape = {"kv_heads": 2, **shape}
    weights, tokens = write_tiny_llama(path, head_dim=32, types={"*": "Q4_1"}, **shape), random_tokens(75)
    runner, expected = tiny_runner(path), expected_logits(weights, tokens, shape)
    assert {U4, F32_WEIGHTS} <= {each.kind for each in runner._packed.packed}
    assert (runner.logits(tokens) - expected).std() < MAX_FAST_ERROR * expected.std()


@pytest.mark.parametrize("isa", NARROW_ISAS)
def test_a_model_gives_the_bits_of_the_portable_kernels_but_where_avx512_multiplies_bfloat16(mixed, isa):
    tokens = random_tokens(75)
    got, portable = (tiny_runner(mixed, isa=each).logits(tokens) for each in (isa, "portable"))
    np.testing.assert_array_equal(got, portable)


@every_type
@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 63])
def test_a_prompt_in_chunks_of_any_size_gives_the_same_bits(mixed, types, chunk):
    runner, tokens = tiny_runner(mixed, **types), random_tokens(75)
    np.testing.assert_array_equal(runner.logits(tokens, chunk), runner.logits(tokens, 64))


@every_type
def test_blocks_of_32_positions_give_the_bits_of_blocks_of_16(mixed, types):
    tokens = random_tokens(75)
    small, large = (tiny_runner(mixed, **types, block_size=size).logits(tokens, 23) for size in (16, 32))
    np.testing.assert_array_equal(large, small)


@every_type
def test_two_threads_give_the_bits_of_one(mixed, types):
    tokens = random_tokens(75)
    threads = [1, min(2, numba.config.NUMBA_NUM_THREADS)]
    one, two = (tiny_runner(mixed, **types, threads=count) for count in threads)
    for chunk in (64, 5, 1):
        np.testing.assert_array_equal(two.logits(tokens, chunk), one.logits(tokens, chunk))


PROMPTS = {name: random_tokens(count, seed=count) for name, count in zip("abcdef", (33, 5, 16, 1, 47, 17), strict=True)}


@every_type
def test_a_request_gets_the_same_bits_alone_and_in_a_crowd(mixed, types):
    runner = tiny_runner(mixed, **types)
    crowd, _ = drive(runner, PROMPTS)
    for name, prompt in PROMPTS.items():
        alone, _ = drive(runner, {name: prompt})
        assert_same_bits(crowd[name], alone[name])
        assert len(alone[name].token_ids) == 12


@every_type
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_request_gets_the_same_bits_in_small_chunks_and_preempted_and_resumed(mixed, types, block_size):
    runner = tiny_runner(mixed, **types, block_size=block_size)
    plain, _ = drive(runner, PROMPTS, block_size=block_size, max_tokens=40)
    sizes = {"num_blocks": 112 // block_size, "block_size": block_size, "max_num_batched_tokens": 9}
    pressed, scheduler = drive(runner, PROMPTS, max_tokens=40, **sizes)
    assert scheduler.counters.preemptions >= 3
    for name in PROMPTS:
        assert_same_bits(pressed[name], plain[name])


def test_a_drawn_token_is_the_same_alone_and_in_a_crowd(mixed):
    runner, sampling = tiny_runner(mixed), SamplingParams(temperature=3.0, seed=5)
    crowd, _ = drive(runner, PROMPTS, sampling=sampling)
    alone, _ = drive(runner, {"a": PROMPTS["a"]}, sampling=sampling)
    assert crowd["a"].token_ids == alone["a"].token_ids
    assert len({tuple(answer.token_ids) for answer in crowd.values()}) == len(PROMPTS)


@every_type
def test_what_earlier_requests_left_in_the_cache_changes_no_bit(mixed, types):
    """Between a sequence's end and the end of its last block lies what others left there, here not even numbers."""
    runner = tiny_runner(mixed, **types)
    fresh, _ = drive(runner, PROMPTS, max_num_batched_tokens=7)
    fill_with_leftovers(runner)
    after, _ = drive(runner, PROMPTS, max_num_batched_tokens=7)
    for name in PROMPTS:
        assert_same_bits(after[name], fresh[name])


@every_type
def test_a_request_whose_logits_are_not_finite_is_the_only_one_that_fails(path, types):
    sick = 7
    write_sick_llama(path, sick, factor=1e30)
    runner = tiny_runner(path, **types)
    prompts = {name: [token for token in prompt if token != sick] for name, prompt in PROMPTS.items()}
    healthy, _ = drive(runner, prompts)
    answers, _ = drive(runner, {**prompts, "b": [3, sick, 4]})
    assert answers["b"].fault == "the model's logits are not finite numbers"
    assert answers["b"].token_ids == []
    for name in "acdef":
        assert answers[name].fault is None
        assert_same_bits(answers[name], healthy[name])


@every_type
def test_a_request_after_one_that_failed_runs_in_the_same_blocks_without_harm(path, types):
    write_sick_llama(path, 7, factor=1e30)
    runner = tiny_runner(path, **types)
    expected, _ = drive(runner, {"a": [3, 4, 5]})
    failed, _ = drive(runner, {"b": [3, 7, 4, 7, 7]})
    again, _ = drive(runner, {"a": [3, 4, 5]})
    assert failed["b"].fault
    assert_same_bits(again["a"], expected["a"])


def write_sick_llama(path, token, factor):
    """A model with one token whose embedding is so large that the forward pass overflows; a head of its own."""
    weights = tiny_llama.random_weights

    def with_sick_token(*shape):
        tensors = weights(*shape)
        tensors["token_embd.weight"][token] *= np.float32(factor)
        return tensors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_llama, "random_weights", with_sick_token)
        write_tiny_llama(path, head_dim=32, tied=False)


def test_rows_of_the_embedding_beyond_the_tokenizer_are_never_sampled(path, monkeypatch):
    weights = tiny_llama.random_weights

    def with_loud_padding(*shape):
        tensors = weights(*shape)
        tensors["output.weight"][-5:] = 50 * tensors["output.weight"][:5]
        return tensors

    monkeypatch.setattr(tiny_llama, "random_weights", with_loud_padding)
    write_tiny_llama(path, head_dim=32, tied=False, padding_rows=5)
    engine = build_engine(str(path), EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=8, threads=1))
    logits = tiny_runner(path).logits(random_tokens(20))
    assert logits.shape == (20, 272)
    assert (logits.argmax(axis=1) >= 267).mean() > 0.5
    for temperature in (0.0, 5.0):
        engine.add_request(
            "r", random_tokens(5), SamplingParams(max_tokens=50, temperature=temperature, seed=1, ignore_eos=True)
        )
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        token_ids = [token_id for output in outputs for token_id in output.new_token_ids]
        assert len(token_ids) == 50
        assert max(token_ids) < 267


def test_no_step_compiles_anything_once_the_runner_is_warm(mixed):
    runner, compiled = tiny_runner(mixed), []

    class Listener(event.Listener):
        def on_start(self, event):
            compiled.append(event.data)

        def on_end(self, event):
            """What has started is what counts."""

    with event.install_listener("numba:compile", Listener()):
        drive(runner, PROMPTS, max_num_batched_tokens=11)
        drive(runner, {"a": random_tokens(200)}, sampling=SamplingParams(temperature=1.0, top_p=0.9, seed=1))
    assert compiled == []


@pytest.mark.parametrize("threads", [1, min(2, numba.config.NUMBA_NUM_THREADS)])
@every_type
def test_a_step_notes_the_largest_logit_of_every_tile_of_its_rows_and_of_no_other(mixed, types, threads):
    runner = tiny_runner(mixed, **types, threads=threads)
    scratch = runner._scratch
    for count in (1, 5, 8):
        scratch.tops[:] = 7
        step = [ScheduledRequest(f"{i}", i, 0, (i + 1, 9), (i,), True, 0) for i in range(count)]
        runner._forward(runner._batch(step), scratch)
        rows = scratch.logits[:count].reshape(count, -1, 48)
        np.testing.assert_array_equal(scratch.tops[:count], rows.max(axis=2))
        np.testing.assert_array_equal(scratch.tops[count:], 7)


def test_the_sampler_is_given_what_the_step_noted(mixed):
    runner, given = tiny_runner(mixed), []
    sample = runner.sampler.sample
    runner.sampler.sample = lambda *arguments: given.append(arguments) or sample(*arguments)
    step = [ScheduledRequest(f"{i}", i, 0, (i + 1, 9), (i,), True, 0) for i in range(3)]
    runner.execute(SchedulerOutput(0, tuple(step)))
    ((logits, *_, tops),) = given
    assert np.shares_memory(tops, runner._scratch.tops)
    assert len(tops) == len(logits) == 3


def test_a_step_without_a_sample_gives_no_token(mixed):
    part = ScheduledRequest("a", 0, 0, (1, 2, 3), (4,), False, 0)
    assert tiny_runner(mixed).execute(SchedulerOutput(0, (part,))) == StepResult(())


@pytest.mark.parametrize("per_block", [1, 2])
def test_the_arrays_of_a_step_are_those_that_their_descriptions_give(mixed, per_block):
    runner = tiny_runner(mixed, block_size=16 * per_block, max_num_batched_tokens=128)
    chunk = ScheduledRequest("chunk", 0, 30, tuple(range(35)), (7, 3, 5, 9, 1)[: 6 // per_block], False, 0)
    decode = ScheduledRequest("decode", 1, 16 * per_block, (8,), (2, 4), True, 3)
    drafts = ScheduledRequest("drafts", 2, 5, (6, 7, 8), (6,), True, 1, None, 2)
    batch, step = runner._batch([chunk, decode, drafts]), [chunk, decode, drafts]
    rows = [
        (sequence, each.first_position + i) for sequence, each in enumerate(step) for i in range(len(each.token_ids))
    ]
    blocks = [[b * per_block + part for b in each.block_ids for part in range(per_block)] for each in step]
    assert batch.tokens.tolist() == [token for each in step for token in each.token_ids]
    assert batch.positions.tolist() == [position for _, position in rows]
    places = [[runner._places[block] for block in table] for table in blocks]
    assert batch.slots.tolist() == [places[s][position // 16] * 16 + position % 16 for s, position in rows]
    # The chunk begins block 4 with its last token, at position 64; the decoded token begins a block too.
    assert {row: cleared for row, cleared in enumerate(batch.cleared.tolist()) if cleared} == {34: 15, 35: 15}
    groups = [[0, 16, 0, 31], [16, 16, 0, 47], [32, 3, 0, 63]]
    assert batch.groups.tolist() == [*groups, [35, 1, 1, 16 * per_block + 1], [36, 3, 2, 6]]
    widest = max(map(len, blocks))
    assert batch.tables.tolist() == [table + [0] * (widest - len(table)) for table in places]
    assert batch.sampled.tolist() == [35, 36, 37, 38]


def test_a_step_says_how_long_its_parts_took(mixed):
    runner = tiny_runner(mixed)
    ticks = iter((1.0, 2.0, 4.0, 8.0))
    runner._clock = lambda: next(ticks)
    part = ScheduledRequest("a", 0, 0, (1, 2, 3), (4,), False, 0)
    assert runner.execute(SchedulerOutput(0, (part,))).times == RunnerTimes(1.0, 2.0, 4.0)


def test_logits_of_every_position_are_for_the_positions_asked_and_no_more(mixed):
    runner, tokens = tiny_runner(mixed), random_tokens(40)
    whole = runner.logits(tokens)
    assert whole.shape == (40, 267)
    np.testing.assert_array_equal(runner.logits(tokens[:9]), whole[:9])


@pytest.mark.parametrize(
    "tokens", [random_tokens(257), [1, 2, 267], [-1], []], ids=["too long", "unknown", "negative", "none"]
)
def test_logits_of_what_the_cache_or_the_vocabulary_does_not_hold_are_refused(mixed, tokens):
    with pytest.raises(ValueError, match="token"):
        tiny_runner(mixed).logits(tokens)


SIZES = {
    "few tokens a step": {"max_num_batched_tokens": 8},
    "one sequence": {"max_num_seqs": 1},
    "a pool of one block": {"num_blocks": 1},
    "a short model": {"max_model_len": 16},
    "large blocks": {"block_size": 64, "num_blocks": 1},
    "two threads": {"threads": min(2, numba.config.NUMBA_NUM_THREADS)},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_sizes_that_an_engine_is_built_with_change_no_bit(path, sizes):
    """They must not decide either which channels are outliers."""
    write_tiny_llama(path, heads=6, kv_heads=2, head_dim=32, tied=False, types=MIXED_TYPES | {"output.weight": "Q8_0"})
    tokens = random_tokens(16)
    np.testing.assert_array_equal(tiny_runner(path, **sizes).logits(tokens), tiny_runner(path).logits(tokens))


def test_an_engines_runner_gives_the_bits_of_the_runner_alone_where_the_embedding_is_padded(path):
    """The tokenizer's size must not decide either."""
    write_tiny_llama(path, head_dim=32, padding_rows=37, types=MIXED_TYPES)
    tokens = random_tokens(16)
    engine = build_engine(str(path), EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=16, threads=1))
    np.testing.assert_array_equal(engine.runner.logits(tokens), tiny_runner(path).logits(tokens)[:, :267])


@pytest.mark.parametrize("count", [1, numba.config.NUMBA_NUM_THREADS])
def test_the_thread_that_runs_a_step_starts_no_more_threads_than_were_asked_for(mixed, count):
    """Numba keeps it for each thread, and a server steps in a thread that did not build the runner."""
    runner, seen = tiny_runner(mixed, threads=count), []

    def step():
        runner.logits(random_tokens(4))
        seen.append(numba.get_num_threads())

    other = threading.Thread(target=step)
    other.start()
    other.join()
    assert seen == [count]


TWO_THREADS = """
import sys, threading
from millpond.build import build_model_runner
from millpond.config import EngineConfig
runners = [build_model_runner(sys.argv[1], EngineConfig(max_model_len=64, max_num_seqs=8)) for _ in range(2)]
threads = [threading.Thread(target=lambda r=r: [r.logits([1, 2, 3]) for _ in range(50)]) for r in runners]
for each in threads: each.start()
for each in threads: each.join()
print("both are here")
"""


def test_two_models_may_step_in_two_threads_on_any_threading_layer(mixed):
    """Numba's workqueue layer ends a process in which two threads are in parallel regions at once."""
    environment = {**os.environ, "NUMBA_THREADING_LAYER": "workqueue"}
    command = [sys.executable, "-c", TWO_THREADS, str(mixed)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.stdout == "both are here\n", result.stderr
