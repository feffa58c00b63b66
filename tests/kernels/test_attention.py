"""Paged attention against a softmax in numpy, in every type of cache, whatever lies in the rest of the blocks."""

from functools import cache

import numpy as np
import pytest
from numba import njit, types

from kernels import slow_attention
from kernels.emit import RUNNABLE_ISAS
from millpond.kernels.attention import BLOCK, GROUP_TOKENS, KV_KINDS, attend, score_tile, value_tile
from millpond.kernels.attention_int8 import code_bytes, scale_bytes
from millpond.kernels.jit import OPTIONS
from millpond.kernels.matmul import F32_WEIGHTS
from millpond.kernels.pack import round_to_bf16
from millpond.kernels.pointwise import write_key, write_value
from millpond.kernels.tiles import load_tiles

BF16, FLOAT32, INT8 = np.uint16, np.float32, np.uint8
# Of a weighted mean of values near 1: a bfloat16 weight is off by up to 2**-9 of itself, a float32 sum by a few 2**-24,
# an 8-bit weight by up to 1/510 of the largest in its block.
TOLERANCE = {BF16: 2.0**-8, FLOAT32: 2e-6, INT8: 0.012}
LENGTHS = [1, 15, 16, 17, 33]
GUARD = 77.0

every_isa = pytest.mark.parametrize("isa", RUNNABLE_ISAS)
every_type = pytest.mark.parametrize("kind", [BF16, FLOAT32, INT8], ids=["bfloat16", "float32", "int8"])
every_float_type = pytest.mark.parametrize("kind", [BF16, FLOAT32], ids=["bfloat16", "float32"])


@cache
def tiles_for(isa, kind, head_dim, heads_per_kv):
    shape = {"heads_per_kv": heads_per_kv, "head_dim": head_dim, "windowed": True, "capped": True}
    return load_tiles(isa, 1, kinds={F32_WEIGHTS}, kv_dtype=kind, **shape)


def held(x: np.ndarray, kind: type, part: str) -> np.ndarray:
    """Float32 queries, keys or values as a cache of this kind holds them."""
    if kind is INT8:
        if part == "v":
            return slow_attention.held_values(x)
        codes, scales = slow_attention.quantised_rows(x, bf16=part == "k")
        return codes * np.repeat(scales, slow_attention.DIMS, axis=-1)
    return x if kind is FLOAT32 else slow_attention.widened(round_to_bf16(x))


def as_queries(q: np.ndarray, kind: type) -> np.ndarray:
    """Rows [..., head_dim] as the tiles want them."""
    if kind is INT8:
        codes, scales = slow_attention.quantised_rows(q, bf16=False)
        rows = zip(codes.reshape(-1, q.shape[-1]), scales.reshape(-1, scales.shape[-1]), strict=True)
        return np.array([slow_attention.query_row(*each) for each in rows])
    return np.ascontiguousarray(round_to_bf16(q) if kind is BF16 else q)


class Sequence:
    """One sequence's keys and values, float32 [positions, kv_heads, head_dim], in scattered blocks of leftovers (in 8
    bits: of bytes that spell such a number)."""

    def __init__(self, kind, positions, *, kv_heads=2, head_dim=64, heads_per_kv=3, seed=0, leftovers=np.nan):
        rng = np.random.default_rng(seed)
        self.kind, self.head_dim, self.heads_per_kv = kind, head_dim, heads_per_kv
        self.k, self.v = rng.standard_normal((2, positions, kv_heads, head_dim)).astype(np.float32)
        self.q = rng.standard_normal((positions, kv_heads, heads_per_kv, head_dim)).astype(np.float32)
        blocks = -(-positions // BLOCK)
        self.table = rng.permutation(2 * blocks)[:blocks].astype(np.int64)
        self.keys, self.values, self.key_scales, self.value_scales = self.new_cache(2 * blocks, kv_heads, leftovers)
        for position in range(positions):
            self.put(position, cleared=BLOCK - 1 - position % BLOCK if position == positions - 1 else 0)

    def new_cache(self, blocks, kv_heads, leftovers):
        if self.kind is INT8:
            bits = np.float32(leftovers).view(np.uint32) | (0xFFFF if np.isnan(leftovers) else 0)
            fill = np.frombuffer(bits.tobytes(), np.uint8)
            sizes = [code_bytes(self.head_dim)] * 2 + [scale_bytes(self.head_dim)] * 2
            return [np.resize(fill, (blocks, kv_heads, size)) for size in sizes]
        shapes = {
            BF16: ((self.head_dim // 2, BLOCK, 2), (BLOCK // 2, self.head_dim, 2)),
            FLOAT32: ((self.head_dim, BLOCK), (BLOCK, self.head_dim)),
        }
        fill = round_to_bf16(np.full(1, leftovers, np.float32))[0] if self.kind is BF16 else np.float32(leftovers)
        none = [np.empty((blocks, kv_heads, 0), np.uint8)] * 2
        return [np.full((blocks, kv_heads, *shape), fill, self.kind) for shape in shapes[self.kind]] + none

    def put(self, position, cleared):
        block, offset = self.table[position // BLOCK], position % BLOCK
        for head in range(self.k.shape[1]):
            write_key(self.k[position, head], self.keys[block, head], self.key_scales[block, head], offset)
            value_scales = self.value_scales[block, head]
            write_value(self.v[position, head], self.values[block, head], value_scales, offset, cleared)

    def attend(self, isa, first, count, head=1, window=0, cap=0.0):
        """Attention of the tokens at positions first .. first + count - 1 as one group: [count, heads_per_kv, dim]."""
        tiles = tiles_for(isa, self.kind, self.head_dim, self.heads_per_kv)
        q = as_queries(self.q[first : first + count, head], self.kind)
        rows, blocks = count * self.heads_per_kv, len(self.table)
        room = np.full((rows + 1) * self.head_dim, GUARD, np.float32)
        out = room[: -self.head_dim].reshape(count, self.heads_per_kv, self.head_dim)
        scores, factors = np.full((rows, blocks * BLOCK), np.nan, np.float32), np.full(rows, np.nan, np.float32)
        attend(
            tiles, self.keys, self.values, self.key_scales, self.value_scales, head, rows, self.heads_per_kv, first + 1,
            self.table, q.ctypes.data, q.nbytes // rows, out.ctypes.data, self.head_dim,
            np.float32(self.head_dim**-0.5), window, np.float32(cap), scores, factors,
            self.keys.ctypes.data, self.table, blocks,
        )  # fmt: skip
        assert (room[-self.head_dim :] == GUARD).all(), "written beyond the last row"
        return out

    def expected(self, first, count, head=1, window=0, cap=0.0):
        parts = (("q", self.q), ("k", self.k), ("v", self.v))
        q, k, v = (held(each[:, head], self.kind, name).astype(np.float64) for name, each in parts)
        out = []
        for position in range(first, first + count):
            seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
            scores = q[position] @ k[seen].T / np.sqrt(self.head_dim)
            scores = cap * np.tanh(scores / cap) if cap else scores
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out.append(weights / weights.sum(axis=1, keepdims=True) @ v[seen])
        return np.array(out)


@every_type
@every_isa
@pytest.mark.parametrize("heads_per_kv", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_attention_is_a_softmax_of_the_scores_over_the_context(isa, kind, head_dim, heads_per_kv):
    sequence = Sequence(kind, max(LENGTHS), head_dim=head_dim, heads_per_kv=heads_per_kv)
    for length in LENGTHS:
        got, expected = sequence.attend(isa, length - 1, 1), sequence.expected(length - 1, 1)
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE[kind], err_msg=f"context of {length}")


@every_type
@pytest.mark.parametrize("head_dim", [32, 48, 96, 112])
def test_every_multiple_of_16_dimensions_is_covered_once(kind, head_dim):
    sequence = Sequence(kind, 20, head_dim=head_dim, heads_per_kv=3)
    np.testing.assert_allclose(
        sequence.attend(RUNNABLE_ISAS[0], 19, 1), sequence.expected(19, 1), rtol=0, atol=TOLERANCE[kind]
    )


@every_type
@every_isa
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_a_rows_bits_do_not_depend_on_the_group_it_attends_in(isa, kind, head_dim):
    sequence = Sequence(kind, 45, heads_per_kv=3, head_dim=head_dim)
    alone = np.concatenate([sequence.attend(isa, position, 1) for position in range(45)])
    np.testing.assert_allclose(alone, sequence.expected(0, 45), rtol=0, atol=TOLERANCE[kind])
    for count in range(2, GROUP_TOKENS + 1):
        for first in (0, 11, 45 - count):
            got = sequence.attend(isa, first, count)
            np.testing.assert_array_equal(got, alone[first : first + count], err_msg=f"{count} from {first}")


@every_type
@every_isa
def test_what_lies_in_the_rest_of_the_blocks_changes_no_bit(isa, kind):
    sequences = [Sequence(kind, 21, leftovers=leftovers) for leftovers in (0.0, 1e30, np.inf, np.nan)]
    first, *others = (sequence.attend(isa, 20, 1) for sequence in sequences)
    assert np.isfinite(first).all()
    for other in others:
        np.testing.assert_array_equal(other, first)


@every_type
def test_all_instruction_sets_give_the_same_bits_but_for_the_bfloat16_products_of_avx512(kind):
    sequence = Sequence(kind, 33)
    portable = sequence.attend("portable", 30, 3)
    for isa in RUNNABLE_ISAS:
        other = sequence.attend(isa, 30, 3)
        if kind is BF16 and isa in ("amx", "avx512"):
            np.testing.assert_allclose(other, portable, rtol=0, atol=2 * TOLERANCE[kind])
        else:
            np.testing.assert_array_equal(other, portable, err_msg=isa)


@every_type
@every_isa
def test_scores_too_far_apart_for_exp_give_the_value_of_the_largest(isa, kind):
    sequence = Sequence(kind, 17)
    sequence.q[16] = 50 * sequence.k[4][:, None]
    for position in range(17):
        if position != 4:
            sequence.k[position] = -sequence.k[4]
            sequence.put(position, 0)
    only = held(sequence.v[None, 4, 1], kind, "v")
    # The largest score itself is 2**-24 of itself off, and so is its weight, a bit more than 1, before it is rounded.
    np.testing.assert_allclose(sequence.attend(isa, 16, 1)[0], np.repeat(only, 3, axis=0), rtol=1e-5, atol=1e-30)


@every_type
@every_isa
@pytest.mark.parametrize("part", ["k", "v"])
def test_what_is_not_a_number_inside_the_context_shows_in_the_result(isa, kind, part):
    sequence = Sequence(kind, 20)
    getattr(sequence, part)[7, 1, 5] = np.nan
    sequence.put(7, 0)
    got = sequence.attend(isa, 19, 1)
    assert np.isnan(got if part == "k" else got[..., 5]).all()


@every_isa
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_in_8_bits_what_is_not_finite_shows_in_the_rows_that_see_it_and_in_no_other(isa, part, bad):
    sequence = Sequence(INT8, 24, head_dim=80)
    healthy = sequence.attend(isa, 14, 8)
    assert np.isfinite(healthy).all()
    getattr(sequence, part)[17, 1, ..., 5] = bad
    sequence.put(17, 0)
    got = sequence.attend(isa, 14, 8)
    sick = np.arange(14, 22) == 17 if part == "q" else np.arange(14, 22) >= 17
    assert np.isnan(got[sick]).all()
    np.testing.assert_array_equal(got[~sick], healthy[~sick])


@every_isa
def test_in_8_bits_zeros_weigh_as_much_as_they_should(isa):
    sequence = Sequence(INT8, 20)
    sequence.k[:], sequence.v[1::2] = 0, 0
    for position in range(20):
        sequence.put(position, 0)
    np.testing.assert_allclose(sequence.attend(isa, 19, 1), sequence.expected(19, 1), rtol=0, atol=TOLERANCE[INT8])
    sequence.v[:] = 0
    for position in range(20):
        sequence.put(position, 0)
    np.testing.assert_array_equal(sequence.attend(isa, 19, 1), 0)


@every_float_type
def test_a_key_and_a_value_go_to_their_place_in_the_block_and_nowhere_else(kind):
    sequence = Sequence(kind, 16, kv_heads=1, head_dim=32, leftovers=7.0)
    block = sequence.table[0]
    keys, values = sequence.keys[block, 0], sequence.values[block, 0]
    if kind is BF16:
        widened = [(each.astype(np.uint32) << 16).view(np.float32) for each in (keys, values)]
        keys = widened[0].transpose(1, 0, 2).reshape(BLOCK, 32)  # [pair of dims][position][2]
        values = widened[1].transpose(0, 2, 1).reshape(BLOCK, 32)  # [pair of positions][dim][2]
    else:
        keys = keys.T
    np.testing.assert_array_equal(keys, held(sequence.k[:, 0], kind, "k"))
    np.testing.assert_array_equal(values, held(sequence.v[:, 0], kind, "v"))


@every_float_type
@pytest.mark.parametrize(("offset", "cleared"), [(0, 0), (0, 15), (6, 9), (7, 3), (15, 0)])
def test_writing_a_value_clears_as_many_positions_after_it_as_it_is_told(kind, offset, cleared):
    leftover = 0x7FC0 if kind is BF16 else np.nan
    shape = (BLOCK // 2, 32, 2) if kind is BF16 else (BLOCK, 32)
    block = np.full(shape, leftover, kind)
    write_value(np.ones(32, np.float32), block, np.empty(0, np.uint8), offset, cleared)
    rows = block.transpose(0, 2, 1).reshape(BLOCK, 32) if kind is BF16 else block
    one = 0x3F80 if kind is BF16 else 1.0
    expected = np.full((BLOCK, 32), leftover, kind)
    expected[offset], expected[offset + 1 : offset + 1 + cleared] = one, 0
    np.testing.assert_array_equal(rows, expected)


WINDOWS = [1, 5, 16, 17, 40]


@every_type
@every_isa
@pytest.mark.parametrize("window", WINDOWS)
def test_with_a_window_a_token_attends_to_the_last_positions_only_alone_and_in_a_group(isa, kind, window):
    sequence = Sequence(kind, 45, heads_per_kv=3, head_dim=80)
    alone = np.concatenate([sequence.attend(isa, position, 1, window=window) for position in range(45)])
    expected = sequence.expected(0, 45, window=window)
    # A window of one position is its value, of which 8 bits keep an eighth of what they keep of a mean.
    np.testing.assert_allclose(alone, expected, rtol=0, atol=(2 if kind is INT8 else 1) * TOLERANCE[kind])
    for count in range(2, GROUP_TOKENS + 1):
        for first in (0, 11, 45 - count):
            got = sequence.attend(isa, first, count, window=window)
            np.testing.assert_array_equal(got, alone[first : first + count], err_msg=f"{count} from {first}")


@every_type
@every_isa
def test_scores_are_capped_before_the_softmax(isa, kind):
    sequence = Sequence(kind, 40, heads_per_kv=3)
    sequence.q *= 8
    for window in (0, 17):
        got = sequence.attend(isa, 33, 7, window=window, cap=5.0)
        expected = sequence.expected(33, 7, window=window, cap=5.0)
        np.testing.assert_allclose(got, expected, rtol=0, atol=2 * TOLERANCE[kind])
    assert np.abs(expected - sequence.expected(33, 7, window=17)).max() > 10 * TOLERANCE[kind]


@every_type
def test_a_line_that_is_loaded_asks_for_one_of_the_next_block(kind):
    kv, loads = KV_KINDS[kind], {FLOAT32: (8, 64), BF16: (8, 32), INT8: (4, 16)}[kind]

    @njit(**OPTIONS)
    def scores(n):
        score_tile(0, kv, 3, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7])

    @njit(**OPTIONS)
    def values(n):
        value_tile(0, kv, 3, 4, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12])

    for tile, numbers, expected in zip((scores, values), (8, 13), loads, strict=True):
        tile.compile((types.UniTuple(types.int64, numbers),))
        assert "".join(tile.inspect_llvm().values()).count("call void @llvm.prefetch") == expected
