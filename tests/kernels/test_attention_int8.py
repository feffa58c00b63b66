"""The 8-bit cache: what is put into it byte for byte, and each tile over it against slow integers."""

import threading
from functools import cache

import numpy as np
import pytest
from numba import njit

from kernels import slow_attention as slow
from kernels.emit import RUNNABLE_ISAS
from millpond.kernels.attention_int8 import P_BYTES, query_bytes
from millpond.kernels.attention_int8 import quantise_query as quantise_query_at
from millpond.kernels.link import call
from millpond.kernels.matmul import F32_WEIGHTS
from millpond.kernels.pointwise import write_key as write_key_at
from millpond.kernels.pointwise import write_value as write_value_at
from millpond.kernels.simd import address
from millpond.kernels.tiles import load_tiles

BLOCK = 16
HEAD_DIMS = [16, 64, 80, 128]
ROWS = range(1, 7)
GUARD = 0xA5
ROUNDING = 1e-6  # of a sum of float32 products, as a share of the sum of their magnitudes

every_isa = pytest.mark.parametrize("isa", RUNNABLE_ISAS)
every_dim = pytest.mark.parametrize("dim", HEAD_DIMS)


@cache
def tiles_for(isa, dim):
    return load_tiles(isa, 1, kinds={F32_WEIGHTS}, kv_dtype=np.uint8, heads_per_kv=1, head_dim=dim)


@njit
def quantise_query(x, target):
    quantise_query_at(address(x), address(target), x.size)


@njit(nogil=True)
def write_key(x, block, offset):
    """block: its codes and the room for its scales, as slow_attention.py has them."""
    write_key_at(x, block[: BLOCK * x.size], block[BLOCK * x.size :], offset)


@njit(nogil=True)
def write_value(x, block, offset, cleared):
    write_value_at(x, block[: BLOCK * x.size], block[BLOCK * x.size :], offset, cleared)


@njit
def score(tiles, q, k, scores, dim):
    rows, row_bytes = q.shape[0], scores.strides[0]
    call(
        tiles.score[rows], 0, 0, rows, address(q), q.strides[0], address(k), address(k) + BLOCK * dim, address(scores),
        row_bytes, dim,
    )  # fmt: skip


@njit
def softmax(tiles, scale, scores, length, blocks, table, values, dim, factor):
    call(
        tiles.softmax[0], 0, 0, 0, scale, 0, address(scores), length, blocks, address(table),
        address(values) + BLOCK * dim, values.strides[0], address(factor),
    )  # fmt: skip


@njit
def value(tiles, vectors, p, table, values, factors, out, dim, first):
    call(
        tiles.value[p.shape[0], vectors], 0, 0, p.shape[0], vectors, address(p), p.strides[0], address(table),
        table.size, address(values) + BLOCK * first, values.strides[0], address(factors), address(out) + 4 * first,
        out.strides[0], dim,
    )  # fmt: skip


def rows_of_every_sort(dim, count=BLOCK, seed=0):
    """Float32 [count, dim]: small and large numbers, zeros, and magnitudes too small to divide by."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, dim)).astype(np.float32) * np.float32(10) ** rng.integers(-3, 4, (count, 1))
    x = x.astype(np.float32)
    x[1] = 0
    x[2, :16] = 0
    x[3] = 1e-42 * rng.standard_normal(dim)
    x[3, ::3] = 0
    x[4] *= np.float32(1e-36)
    x[5] = np.float32(3e38) * np.sign(x[5])
    x[6, ::2] = 0.5  # ties when rounded
    return x


def block_of(dim, seed=0):
    """Random codes and scales of keys, [16, dim] and [16, dim / 16], the largest and smallest codes among them."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-127, 128, (BLOCK, dim))
    codes[0], codes[1] = 127, -127
    scales = slow.widened(slow.round_to_bf16(rng.uniform(0.001, 0.1, (BLOCK, dim // 16)).astype(np.float32)))
    return codes, scales


def queries_of(dim, rows, seed=1):
    rng = np.random.default_rng(seed)
    codes = rng.integers(-127, 128, (rows, dim))
    codes[0] = 127
    return codes, rng.uniform(0.001, 0.1, (rows, dim // 16)).astype(np.float32)


def packed_queries(codes, scales):
    return np.array([slow.query_row(*each) for each in zip(codes, scales, strict=True)])


# ---- what is put into a block -------------------------------------------------------------------------


@every_dim
def test_a_query_is_codes_with_the_scale_and_the_sum_of_every_16(dim):
    for x in rows_of_every_sort(dim):
        got = np.full(query_bytes(dim) + 1, GUARD, np.uint8)
        quantise_query(x, got)
        codes, scales = slow.quantised_rows(x, bf16=False)
        np.testing.assert_array_equal(got[:-1], slow.query_row(codes, scales))
        assert got[-1] == GUARD


@every_dim
@pytest.mark.parametrize("order", [range(BLOCK), range(BLOCK - 1, -1, -1)], ids=["forwards", "backwards"])
def test_keys_and_values_lie_where_they_are_drawn_whatever_the_order_they_came_in(dim, order):
    k, v = rows_of_every_sort(dim, seed=1), rows_of_every_sort(dim, seed=2)
    keys, values = np.zeros((2, slow.block_bytes(dim) + 1), np.uint8)
    keys[-1] = values[-1] = GUARD
    for offset in order:
        write_key(k[offset], keys[:-1], offset)
        write_value(v[offset], values[:-1], offset, 0)
    np.testing.assert_array_equal(keys[:-1], slow.key_block(*slow.quantised_rows(k, bf16=True)))
    np.testing.assert_array_equal(values[:-1], slow.value_block(*slow.quantised(v, bf16=False)))
    assert keys[-1] == values[-1] == GUARD


@every_dim
@pytest.mark.parametrize(("offset", "cleared"), [(0, 0), (0, 15), (6, 9), (15, 0)])
def test_a_position_is_written_and_no_byte_of_another_is_touched_or_cleared(dim, offset, cleared):
    x = rows_of_every_sort(dim)[7]
    keys, values = np.repeat(np.array([[0, 0xFF]] * 2, np.uint8)[..., None], slow.block_bytes(dim), axis=2)
    for key_block, own_values in zip(keys, values, strict=True):
        write_key(x, key_block, offset)
        write_value(x, own_values, offset, cleared)
    for (zeros, ones), own_bytes in ((keys, dim + dim // 16 * 2), (values, dim + 4)):
        assert (zeros == ones).sum() == own_bytes
        assert (zeros[zeros != ones] == 0).all()
        assert (ones[zeros != ones] == 0xFF).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, "a NaN of all ones"])
@every_dim
def test_what_is_not_finite_makes_its_scale_not_a_number_and_no_other(dim, bad):
    x = rows_of_every_sort(dim)[0]
    x[3] = np.array([0x7FFFFFFF], np.uint32).view(np.float32)[0] if isinstance(bad, str) else bad
    query = np.zeros(query_bytes(dim), np.uint8)
    quantise_query(x, query)
    scales = query[dim:].view(np.float32)[::2]
    assert np.isnan(scales).tolist() == [True] + [False] * (dim // 16 - 1)
    keys, values = np.zeros((2, slow.block_bytes(dim)), np.uint8)
    write_key(x, keys, 5)
    write_value(x, values, 5, 0)
    scales = slow.widened(keys[BLOCK * dim :][: 2 * dim].view(np.uint16)).reshape(-1, BLOCK)
    assert np.argwhere(np.isnan(scales)).tolist() == [[0, 5]]
    assert np.flatnonzero(np.isnan(values[BLOCK * dim :][: 4 * BLOCK].view(np.float32))).tolist() == [5]


@njit(nogil=True)
def write_and_look(rows, keys, values, own_keys, own_values, offset, times):
    """Write the two rows to one position in turns; how often a byte of its own was not what it had just written.

    own_keys, own_values: the places of those bytes, and what each row leaves there.
    """
    lost = 0
    for turn in range(times):
        write_key(rows[turn % 2], keys, offset)
        write_value(rows[turn % 2], values, offset, 0)
        for i in range(own_keys.shape[1]):
            lost += keys[own_keys[0, i]] != own_keys[1 + turn % 2, i]
        for i in range(own_values.shape[1]):
            lost += values[own_values[0, i]] != own_values[1 + turn % 2, i]
    return lost


def own_bytes(write, rows, num_bytes):
    """The places of the bytes that are written, and what each row leaves there: [3, bytes]."""
    left = np.array([[np.full(num_bytes, fill, np.uint8) for fill in (0, 0xFF)] for _ in rows])
    for row, blocks in zip(rows, left, strict=True):
        for block in blocks:
            write(row, block)
    places = np.flatnonzero(left[0, 0] == left[0, 1])
    return np.array([places, left[0, 0][places], left[1, 0][places]], np.int64)


def test_two_threads_write_positions_side_by_side_and_neither_loses_a_byte():
    """The threads meet seldom: a write of a byte by way of its neighbours loses one in a few 100,000 turns."""
    dim, jobs, lost = 64, [], []
    keys, values = np.zeros((2, slow.block_bytes(dim)), np.uint8)
    for offset in (4, 5):
        rows = np.random.default_rng(offset).standard_normal((2, dim)).astype(np.float32)
        own_keys = own_bytes(lambda x, block, offset=offset: write_key(x, block, offset), rows, keys.size)
        own_values = own_bytes(lambda x, block, offset=offset: write_value(x, block, offset, 0), rows, values.size)
        jobs.append((rows, keys, values, own_keys, own_values, offset))
    for job in jobs:
        assert write_and_look(*job, 2) == 0
    threads = [threading.Thread(target=lambda job=job: lost.append(write_and_look(*job, 3_000_000))) for job in jobs]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert lost == [0, 0]


# ---- the tiles ----------------------------------------------------------------------------------------


@every_dim
@every_isa
@pytest.mark.parametrize("rows", ROWS)
def test_scores_are_exact_where_their_scales_are_1(isa, dim, rows):
    (k, _), (q, _) = block_of(dim), queries_of(dim, rows)
    ones = np.ones((BLOCK, dim // 16), np.float32)
    got = np.full((rows + 1, 20), np.nan, np.float32)
    score(tiles_for(isa, dim), packed_queries(q, ones[:rows]), slow.key_block(k, ones), got, dim)
    np.testing.assert_array_equal(got[:rows, :BLOCK], q @ k.T)
    assert np.isnan(got[rows]).all()
    assert np.isnan(got[:, BLOCK:]).all()


@every_dim
@every_isa
@pytest.mark.parametrize("rows", ROWS)
def test_scores_are_those_of_the_slow_sum_up_to_rounding(isa, dim, rows):
    k, q = block_of(dim), queries_of(dim, rows)
    got = np.zeros((rows, BLOCK), np.float32)
    score(tiles_for(isa, dim), packed_queries(*q), slow.key_block(*k), got, dim)
    magnitudes = slow.scores((abs(q[0]), q[1]), (abs(k[0]), k[1]))
    assert (abs(got - slow.scores(q, k)) <= ROUNDING * magnitudes).all()


def probabilities(row, blocks):
    """Codes [blocks, 16] and scales [blocks] that softmax has left in a row of scores."""
    parts = row.view(np.uint8)[: blocks * P_BYTES].reshape(blocks, P_BYTES)
    return parts[:, :BLOCK].astype(np.int64), np.ascontiguousarray(parts[:, 16:20]).view(np.float32)[:, 0]


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (15, 1), (16, 1), (16, 2), (17, 2), (33, 5)])
@every_dim
def test_a_probability_times_its_values_scale_is_a_code_and_its_blocks_scale(dim, length, blocks):
    rng = np.random.default_rng(length)
    table = rng.permutation(2 * blocks)[:blocks]
    values = np.full((2 * blocks, slow.block_bytes(dim)), 0xFF, np.uint8)  # scales that are not numbers
    v_scales = rng.uniform(0.001, 0.1, blocks * BLOCK).astype(np.float32)
    for position in range(length):
        block = values[table[position // BLOCK], BLOCK * dim :].view(np.float32)
        block[position % BLOCK] = v_scales[position]
    scores = np.full(blocks * BLOCK + 16, np.nan, np.float32)
    scale, factor = np.float32(0.125), np.zeros(1, np.float32)
    scores[:length] = 24 * rng.standard_normal(length)
    before = scale * scores[:length].astype(np.float64)
    softmax(tiles_for("portable", dim), scale, scores, length, blocks, table, values, dim, factor)
    weights = np.exp(before - before.max())
    np.testing.assert_allclose(factor[0], 1 / weights.sum(), rtol=1e-6)
    expected = np.zeros(blocks * BLOCK)
    expected[:length] = weights * v_scales[:length]
    expected = expected.reshape(blocks, BLOCK)
    codes, p_scales = probabilities(scores, blocks)
    np.testing.assert_allclose(p_scales, expected.max(axis=1) / 255, rtol=1e-6)
    off = abs(codes * p_scales[:, None].astype(np.float64) - expected)
    assert (off <= 0.5001 * p_scales[:, None]).all()
    assert (codes.ravel()[length:] == 0).all()
    assert np.isnan(scores[blocks * BLOCK :]).all()


def random_probabilities(rng, rows, blocks, scale=None):
    """Rows as softmax leaves them, the codes 0 and 255 among them."""
    room = rng.integers(0, 256, (rows, blocks * BLOCK * 4), dtype=np.uint8)
    for row in room:
        parts = row[: blocks * P_BYTES].reshape(blocks, P_BYTES)
        parts[0, :2] = 0, 255
        new = rng.uniform(0.001, 0.1, blocks) if scale is None else np.full(blocks, scale)
        parts[:, 16:20] = new.astype(np.float32)[:, None].view(np.uint8)
    return room


def tile_shares(dim):
    """(first dimension, vectors) of the value tiles that cover head_dim."""
    return [(first, 4) for first in range(0, dim - 63, 64)] + [(first, 1) for first in range(dim // 64 * 64, dim, 16)]


@every_dim
@every_isa
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scale", [1.0, None], ids=["exact", "scaled"])
def test_weighted_sums_of_values_are_exact_with_scales_of_1_and_else_up_to_rounding(isa, dim, rows, scale):
    rng, blocks = np.random.default_rng(rows), 3
    table = rng.permutation(2 * blocks)[:blocks]
    codes = rng.integers(-127, 128, (2 * blocks, BLOCK, dim))
    codes[:, 0], codes[:, 1] = 127, -127
    values = np.array([slow.value_block(each, np.full(BLOCK, np.nan)) for each in codes])  # its scales are p's
    room = random_probabilities(rng, rows, blocks, scale)
    factors = np.ones(rows, np.float32) if scale else rng.uniform(0.1, 1, rows).astype(np.float32)
    got = np.full((rows + 1, dim), np.nan, np.float32)
    for first, vectors in tile_shares(dim):
        value(tiles_for(isa, dim), vectors, room, table, values, factors, got, dim, first)
    expected, magnitudes = np.zeros((2, rows, dim))
    for r, row in enumerate(room):
        p, p_scales = probabilities(row.view(np.float32), blocks)
        for block, each, p_scale in zip(codes[table], p, p_scales.astype(np.float64), strict=True):
            expected[r] += factors[r] * p_scale * (each @ block)
            magnitudes[r] += factors[r] * p_scale * (each @ abs(block))
    assert np.isnan(got[rows]).all()
    if scale:
        np.testing.assert_array_equal(got[:rows], expected)
    else:
        assert (abs(got[:rows] - expected) <= ROUNDING * magnitudes).all()
