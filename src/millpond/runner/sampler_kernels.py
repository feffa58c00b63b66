"""One row of logits to one token, compiled: penalties, greedy, and exact draws without a sort.

Probabilities are whole numbers: the likeliest token weighs WEIGHT_ONE, a token d nats less likely floor(WEIGHT_ONE *
exp(-d)). Sums of whole numbers have no rounding, so they come out the same in any order and on any processor. A token
can be drawn if and only if its weight is at least 1; those left out are rarer than 2.3e-13 times the likeliest one.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.kernels.jit import compiled, inner, merged
from millpond.kernels.link import call, entry_point
from millpond.kernels.matmul import COLUMNS
from millpond.kernels.reference import reference_to
from millpond.kernels.tops import largest, row_tops

GREEDY_BELOW = 1e-5  # temperatures under this are 0
NOT_FINITE = -1  # in place of a token id: the row holds a NaN, or +inf, or nothing but -inf
NOT_REACHED = -2  # in place of a token id: the row follows a draft that was wrong
NO_DRAFT = -3  # in place of a draft: the row follows a token that is known
ALL_MASKED = -4  # in place of a token id: the request's own mask left no token of the row

WEIGHT_BITS = 42  # 2**20 tokens of the largest weight still fit int64
WEIGHT_ONE = 1 << WEIGHT_BITS
WEIGHTLESS_NATS = 31.0  # further than this below the top, a weight is 0: above (WEIGHT_BITS + 1) * ln 2

TILES = 10  # of the head's tiles to a block: few tokens for greedy choice to look through, long loops for a draw
BLOCK = TILES * COLUMNS
BRACKET = 64  # so few candidates are sorted rather than narrowed down further

IN_PROMPT = 1 << 30  # a flag above the count of a token's appearances in the output
OUTPUT_COUNT = IN_PROMPT - 1

LARGEST = float(np.finfo(np.float32).max)


class Rules(NamedTuple):
    """The sampling rules of every slot, one array entry per slot; top_k is from 1 to the vocabulary's size.

    counts[slot, token] is IN_PROMPT if the token is in the prompt, plus how often it is in the output.
    """

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    repetition: NDArray[np.float64]
    presence: NDArray[np.float64]
    frequency: NDArray[np.float64]
    seed: NDArray[np.uint64]
    penalised: NDArray[np.bool_]
    counts: NDArray[np.int32]


class Scratch(NamedTuple):
    """Working space: a row after penalties and the weights [vocab], the largest logit of each tile [tiles] and of each
    block [blocks], the few candidates that are sorted [BRACKET]."""

    penalised: NDArray[np.float32]
    weights: NDArray[np.int64]
    tops: NDArray[np.float32]
    block_tops: NDArray[np.float32]
    ids: NDArray[np.int64]


class Rows(NamedTuple):
    """What to sample: tokens[i] becomes the token of row i of logits [rows, logits_width], or NOT_FINITE.

    tops [rows, tiles or more] are the largest logits of each tile as the head noted them, or [rows, 0] where nobody
    has. drafts[i] is NO_DRAFT, or the guess that row i was computed behind: where the row above gave another token, the
    row is NOT_REACHED and touches nothing.
    """

    logits: NDArray[np.float32]
    tops: NDArray[np.float32]
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    drafts: NDArray[np.int64]
    tokens: NDArray[np.int64]


def link_sampler(rows: Rows, rules: Rules, scratch: Scratch, link: Callable[..., int] = entry_point) -> int:
    """Compile (or load) what sample_by calls, for such arguments; returns the address of `sample_rows`. link does it,
    as in load_tiles."""
    entry = link(sample_rows, *map(reference_to, (rows, rules, scratch)))
    link(sample_by, *[types.int64] * 4)
    return entry


@compiled
def sample_by(entry, rows, rules, scratch):
    """`sample_rows` by its address, with the addresses of its arguments: a way in from Python that is soon compiled."""
    call(entry, rows, rules, scratch)


@inner
def sample_rows(rows, rules, scratch):
    """Sample all rows."""
    logits, tops, slots, positions = rows.logits, rows.tops, rows.slots, rows.positions
    drafts, tokens = rows.drafts, rows.tokens
    size, tiles = rules.counts.shape[1], scratch.tops.size
    for i in range(slots.shape[0]):
        if drafts[i] == NO_DRAFT or drafts[i] == tokens[i - 1]:
            tokens[i] = sample_row(logits[i, :size], tops[i, :tiles], slots[i], positions[i], rules, scratch)
        else:
            tokens[i] = NOT_REACHED


@merged
def sample_row(row, tops, slot, position, rules, scratch):
    """The token that the slot's rules choose from its logits, or NOT_FINITE; counts it where it is penalised."""
    counts = rules.counts[slot]
    if rules.penalised[slot]:
        penalise(row, counts, rules.repetition[slot], rules.presence[slot], rules.frequency[slot], scratch.penalised)
        row = scratch.penalised
    if rules.penalised[slot] or tops.size == 0:
        tops = scratch.tops
        row_tops(row, tops)
    elif row.size % COLUMNS:  # the head's tile goes on with columns that are no tokens
        tops[-1] = largest(row[row.size // COLUMNS * COLUMNS :])
    top = largest(tops)
    if not -np.inf < top < np.inf:
        return NOT_FINITE
    if rules.temperature[slot] < GREEDY_BELOW:
        token = first_of_the_top(row, tops, top)
    else:
        chance = uniform(rules.seed[slot], position)
        join_tiles(tops, scratch.block_tops)
        token = draw(row, scratch.block_tops, top, slot, rules, chance, scratch.weights, scratch.ids)
    if rules.penalised[slot]:
        counts[token] += 1
    return token


@inner
def span(block, size):
    """The first index of a block and the one after its last; unsigned, so that none is checked for being negative."""
    start = block * BLOCK
    stop = start + BLOCK
    return np.uint64(start), np.uint64(stop if stop < size else size)


@inner
def first_of_the_top(row, tops, top):
    """The lowest id among the largest logits."""
    for tile in range(tops.shape[0]):
        if tops[tile] == top:
            for i in range(tile * COLUMNS, row.shape[0]):
                if row[i] == top:
                    return i
    return NOT_FINITE


@inner
def join_tiles(tops, block_tops):
    """The largest logit of each block from those of its tiles."""
    for block in range(block_tops.shape[0]):
        top = np.float32(-np.inf)
        for tile in range(block * TILES, min((block + 1) * TILES, tops.shape[0])):
            top = tops[tile] if tops[tile] > top else top
        block_tops[block] = top


@inner
def penalise(row, counts, repetition, presence, frequency, out):
    """out = row, with the tokens of the prompt and the output pushed down (or up).

    What is not finite stays as it is, and what is stays finite: an extreme penalty is not a fault of the model.
    """
    for i in range(row.shape[0]):
        logit = row[i]
        if counts[i] != 0 and -LARGEST <= logit <= LARGEST:
            value = np.float64(logit)
            value = value / repetition if value > 0.0 else value * repetition
            appearances = counts[i] & OUTPUT_COUNT
            if appearances > 0:
                value -= frequency * appearances + presence
            value = value if value > -LARGEST else -LARGEST
            logit = np.float32(value if value < LARGEST else LARGEST)
        out[i] = logit


@inner
def mix(word):
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@inner
def uniform(seed, position):
    """The random number in [0, 1) of one output position: a function of the two and of nothing else.

    The seed is mixed first, so that neighbouring seeds do not walk through the same numbers a step apart.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    word = mix(mix(seed + step) + (np.uint64(position) + np.uint64(1)) * step)
    return np.float64(np.int64(word >> np.uint64(11))) * 2.0**-53


@merged
def draw(row, block_tops, top, slot, rules, chance, weights, ids):
    """One token drawn from what temperature, min_p, top_k and top_p leave, in this order. chance is in [0, 1)."""
    temperature = rules.temperature[slot]
    low = np.float32(np.float64(top) - WEIGHTLESS_NATS * temperature)
    least = np.int64(math.ceil(rules.min_p[slot] * WEIGHT_ONE))
    count, total = weigh(row, block_tops, top, low, temperature, max(least, 1), weights)
    for by_count in (True, False):
        available = count if by_count else total
        need = rules.top_k[slot]
        if not by_count:
            need = np.int64(math.ceil(rules.top_p[slot] * total)) if rules.top_p[slot] < 1.0 else total
        if need < available:
            count, total, low = keep_first(row, block_tops, top, low, count, max(need, 1), by_count, weights, ids)
    return pick(weights, min(np.int64(chance * total), total - 1))


@inner
def weigh(row, block_tops, top, low, temperature, least, weights):
    """Fill weights [vocab]; returns how many are not 0, and their sum. Weights under `least` become 0.

    exp(-d) = 2**-k * exp(r) with k the nearest whole number, so |r| <= ln(2) / 2 and Taylor to r**8 / 8! leaves 2e-10.
    """
    bits_per_unit = 1.0 / (math.log(2.0) * temperature)
    highest = np.float64(top)
    count, total = np.int64(0), np.int64(0)
    for block in range(block_tops.shape[0]):
        start, stop = span(block, row.shape[0])
        if block_tops[block] < low:
            for i in range(start, stop):
                weights[i] = 0
            continue
        for i in range(start, stop):
            depth = (highest - np.float64(row[i])) * bits_per_unit
            depth = depth if depth < 62.0 else 62.0
            shift = np.int64(depth + 0.5)
            r = (np.float64(shift) - depth) * math.log(2.0)
            e = 1.0 + r / 8.0
            e = 1.0 + r * e * (1.0 / 7.0)
            e = 1.0 + r * e * (1.0 / 6.0)
            e = 1.0 + r * e * (1.0 / 5.0)
            e = 1.0 + r * e * 0.25
            e = 1.0 + r * e * (1.0 / 3.0)
            e = 1.0 + r * e * 0.5
            e = 1.0 + r * e
            weight = np.int64(e * WEIGHT_ONE) >> shift
            weight = weight if weight >= least else 0
            weights[i] = weight
            total += weight
            count += weight > 0
    return count, total


@merged
def keep_first(row, block_tops, top, low, count, need, by_count, weights, ids):
    """Keep the shortest run of candidates, likeliest first, that reaches `need` (tokens, or weight).

    Returns how many are kept, their weight and their least logit; the others' weights become 0.
    Likelier means a larger logit, then a lower id. All `count` candidates have a logit of at least `low`.
    """
    last_logit, last_id = boundary(row, block_tops, top, low, count, need, by_count, weights, ids)
    count, total = np.int64(0), np.int64(0)
    for i in range(row.shape[0]):
        keep = row[i] > last_logit or (row[i] == last_logit and i <= last_id)
        weight = weights[i] if keep else 0
        weights[i] = weight
        total += weight
        count += weight > 0
    return count, total, last_logit


@inner
def boundary(row, block_tops, top, low, count, need, by_count, weights, ids):
    """The logit and the id of the last candidate that keep_first keeps.

    Halves the bracket [low, high) that holds it until few are inside, or all inside are equal.
    """
    high, count_above, amount_above = np.float32(np.inf), np.int64(0), np.int64(0)
    middle = top
    while count - count_above > BRACKET and low < middle < high:
        inside, weight = measure(row, block_tops, middle, weights)
        amount = inside if by_count else weight
        if amount >= need:
            low, count = middle, inside
        else:
            high, count_above, amount_above = middle, inside, amount
        middle = low + ((high if high < top else top) - low) * np.float32(0.5)
    if count - count_above > BRACKET:
        return low, last_of_equals(row, low, need - amount_above, by_count, weights)
    for place in range(likeliest_first(row, block_tops, low, high, weights, ids)):
        last = ids[place]
        amount_above += 1 if by_count else weights[last]
        if amount_above >= need:
            break
    return row[last], last


@inner
def measure(row, block_tops, threshold, weights):
    """How many candidates have a logit of at least the threshold, and their weight."""
    count, total = np.int64(0), np.int64(0)
    for block in range(block_tops.shape[0]):
        if block_tops[block] >= threshold:
            start, stop = span(block, row.shape[0])
            for i in range(start, stop):
                weight = weights[i] if row[i] >= threshold else 0
                total += weight
                count += weight > 0
    return count, total


@inner
def last_of_equals(row, logit, need, by_count, weights):
    """The id at which the candidates with exactly this logit, lowest id first, reach `need`."""
    for i in range(row.shape[0]):
        if row[i] == logit and weights[i] > 0:
            need -= 1 if by_count else weights[i]
            if need <= 0:
                return i
    return row.shape[0]


@inner
def likeliest_first(row, block_tops, low, high, weights, ids):
    """Fill ids with the at most BRACKET candidates with low <= logit < high, likeliest first; returns how many."""
    found = 0
    for block in range(block_tops.shape[0]):
        if block_tops[block] >= low:
            start, stop = span(block, row.shape[0])
            for i in range(start, stop):
                if low <= row[i] < high and weights[i] > 0:
                    place = found
                    while place > 0 and row[ids[place - 1]] < row[i]:
                        ids[place] = ids[place - 1]
                        place -= 1
                    ids[place] = i
                    found += 1
    return found


@inner
def pick(weights, target):
    """The token in whose share of the summed weights, taken by rising id, the target falls."""
    for block in range(-(-weights.shape[0] // BLOCK)):
        start, stop = span(block, weights.shape[0])
        total = np.int64(0)
        for i in range(start, stop):
            total += weights[i]
        if target < total:
            for i in range(start, stop):
                target -= weights[i]
                if target < 0:
                    return np.int64(i)
        target -= total
    return NOT_FINITE
