"""The least work of a step's phases, from figures that can be counted by hand."""

import numpy as np
import pytest

from millpond.kernels.attention import KV_KINDS
from millpond.kernels.isa import ISAS
from millpond.kernels.matmul import BF16, F32_WEIGHTS, U4, U8
from millpond.kernels.pack import Packed
from millpond.kernels.roofline import DOTS, MachineRates
from millpond.model import floors
from millpond.model.config import ModelConfig
from millpond.model.floors import StepShape, Work, gated_work, linear_work, phase_names, step_work
from millpond.model.weights import ModelWeights
from millpond.runner.phase_times import KV_DOTS

CONFIG = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    vocab_size=480,
    context_length=512,
    norm_epsilon=1e-5,
)
RATES = MachineRates(
    2, "portable", {100: 1000.0, 10_000: 100.0, 10**9: 10.0}, 5.0, {"u8 x s8": 40.0, "bf16": 20.0, "float32": 10.0}
)


def packed(columns, depth, kind=U8, num_bytes=1000):
    return Packed(kind, columns, depth, np.zeros(num_bytes, np.uint8))


def weights(kind=U8):
    layer = (packed(128, 64, kind), packed(64, 64, kind), packed(192, 64, kind), packed(64, 96, kind))
    embedding = packed(480, 64, kind, 4800)
    return ModelWeights(
        embedding, embedding, (layer, layer), np.zeros((5, 64), np.float32), None, np.zeros(0, np.uint8)
    )


def test_every_phase_has_its_work():
    work = step_work(CONFIG, weights(), StepShape(3, 1, 20), 100.0, "bf16", "avx512")
    assert set(work) == {*phase_names(2), floors.BEFORE, floors.AFTER}
    assert len(work) == len(floors.LAYER) + len(floors.FIRST) + len(floors.LAST) + 2


@pytest.mark.parametrize("kind", [U4, U8, BF16, F32_WEIGHTS])
def test_every_kind_of_weights_meets_a_product_that_is_measured(kind):
    for isa in ISAS:
        dot = floors.dot_of(packed(128, 64, kind), isa)
        assert dot in DOTS
        assert dot in floors.INPUT_BYTES


def test_amx_makes_bfloat16_of_integers():
    work = linear_work([packed(128, 64, U4)], rows=5, isa="amx")
    assert work.operations == {"bf16": 2 * 5 * 128 * 64}
    assert work.cache_bytes == 5 * (64 * 2 + 128 * 4)


def test_a_linear_layer_reads_its_weights_once_and_sums_a_product_for_each_row_and_weight():
    work = linear_work([packed(128, 64), packed(128, 64, U4)], rows=5, isa="avx512")
    assert work.memory_bytes == 2000
    assert work.operations == {"u8 x s8": 2 * (2 * 5 * 128 * 64)}
    assert work.cache_bytes == 2 * 5 * (64 + 128 * 4)
    assert work.rows == 5


def test_layers_of_two_kinds_are_counted_by_their_own_products():
    work = linear_work([packed(128, 64, U4), packed(128, 64, BF16)], rows=1, isa="avx512")
    assert work.operations == {"u8 x s8": 2 * 128 * 64, "bf16": 2 * 128 * 64}
    assert work.cache_bytes == 64 + 64 * 2 + 2 * 128 * 4


def test_a_decoding_token_attends_to_its_whole_context():
    work = step_work(CONFIG, weights(), StepShape(3, 1, 20), 100.0, "bf16", "avx512")["attend"]
    assert work.memory_bytes == 3 * 20 * 100
    assert work.operations == {"bf16": 2 * 2 * 3 * 20 * 2 * 64}


def test_every_kind_of_keys_and_values_meets_a_product_that_is_measured():
    assert set(floors.QUERY_BYTES) <= set(DOTS)
    assert {KV_DOTS[kind] for kind in KV_KINDS} == set(floors.QUERY_BYTES)


def test_a_query_is_written_as_its_keys_want_it():
    def written(kv_dot):
        return step_work(CONFIG, weights(), StepShape(3, 1, 20), 100.0, kv_dot, "avx512")["rotate, write"].cache_bytes

    assert written("float32") - written("bf16") == 2 * 3 * 64 * (4 - 2)
    assert written("bf16") - written("u8 x s8") == 2 * 3 * 64 * 0.5  # a byte each, and eight for every 16


def test_a_prompts_tokens_attend_each_to_one_more_position():
    shape = StepShape(1, 4, 4)
    assert shape.scored_positions == 1 + 2 + 3 + 4
    assert StepShape(2, 3, 10).scored_positions == 2 * (8 + 9 + 10)
    assert step_work(CONFIG, weights(), shape, 100.0, "float32", "avx512")["attend"].memory_bytes == 4 * 100


def test_only_rows_that_sample_go_through_the_head():
    work = step_work(CONFIG, weights(), StepShape(1, 50, 50), 100.0, "bf16", "avx512")
    assert (work["head"].rows, work["last norm"].rows, work["gate * up"].rows) == (1, 1, 50)
    assert work["head"].operations == {"u8 x s8": 2 * 480 * 64}
    assert work[floors.AFTER].cache_bytes == 480 / 48 * 4, "of each tile the largest logit"


def test_in_the_last_layer_only_rows_that_sample_go_on_after_attention():
    work = step_work(CONFIG, weights(), StepShape(1, 50, 50), 100.0, "bf16", "avx512")
    assert work["q k v"].operations == {"u8 x s8": 2 * (50 + 50) * 128 * 64}
    assert work["down"].operations == {"u8 x s8": 2 * (50 + 1) * 64 * 96}
    assert work["gate * up"].operations == {"u8 x s8": 2 * (50 + 1) * 192 * 64}
    assert work["out"].parts == 2


def test_an_embedded_token_reads_its_own_row_of_the_table():
    work = step_work(CONFIG, weights(), StepShape(3, 1, 20), 100.0, "bf16", "avx512")["embed"]
    assert work.memory_bytes == 3 * 4800 / 480


@pytest.mark.parametrize(
    ("work", "floor"),
    [
        (Work(1, memory_bytes=50, cache_bytes=50, operations={"bf16": 20}), (5.0, "memory")),
        (Work(1, memory_bytes=5, cache_bytes=50, operations={"bf16": 20}), (1.0, "compute")),
        (Work(1, operations={"bf16": 20, "u8 x s8": 40}), (2.0, "compute")),
        (Work(1, cache_bytes=2000, operations={"bf16": 20}), (20.0, "cache")),
        (Work(1, parts=20, cache_bytes=2000, operations={"bf16": 20}), (2.0, "cache")),
    ],
)
def test_the_slowest_of_memory_caches_and_products_is_the_floor(work, floor):
    assert work.floor(RATES, step_bytes=10**8) == floor


def test_weights_that_all_fit_a_cache_are_read_from_it():
    work = Work(1, memory_bytes=50)
    assert work.floor(RATES, step_bytes=100) == (0.05, "memory")


def test_steps_are_named_by_what_they_do():
    assert [StepShape(16, 1, 160).name, StepShape(1, 512, 512).name] == ["decode 16 at 160", "prefill 512"]


def test_of_gate_and_up_only_their_product_is_written():
    work = gated_work([packed(192, 64), packed(192, 64)], 5, 96, "avx512")
    assert work.cache_bytes == 2 * 5 * (64 + 96)
    assert work.operations == {"u8 x s8": 2 * (2 * 5 * 192 * 64)}
