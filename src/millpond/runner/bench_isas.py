"""One linear layer by the kernels of every instruction set in turn: what `millpond bench isas` measures."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from millpond.errors import ConfigError
from millpond.kernels.isa import runnable
from millpond.kernels.matmul import BF16, GROUP, HALF, U4, U8, input_stride
from millpond.kernels.pack import Packed, aligned_zeros, new_unpacked, pack_affine, pack_float
from millpond.kernels.pointwise import prepare
from millpond.kernels.roofline import repeat_linear
from millpond.kernels.threads import new_sync
from millpond.kernels.tiles import Tiles, load_tiles

WEIGHTS = {"4-bit": U4, "8-bit": U8, "bfloat16": BF16}
DEPTH, COLUMNS = 576, 480  # weights that a core's own cache holds: it is the instructions that are compared
BASE = "portable"
RUN_OPERATIONS = 5e7  # of one timed run: about a millisecond, seldom disturbed


@dataclass(frozen=True, slots=True)
class IsaRow:
    """How fast the kernels of one instruction set are for one kind of weights and number of rows, on one core.

    operations_s: the median of the rounds, a multiplication and an addition being two. ratio: to the portable ones'
    rate in the same round, the median, and the quartiles below and above it.
    """

    weights: str
    rows: int
    isa: str
    operations_s: float
    ratio: float
    ratio_low: float
    ratio_high: float


@dataclass(frozen=True, slots=True)
class IsaPlan:
    """What to measure: kinds of weights by their names in WEIGHTS, numbers of rows, instruction sets (BASE among them),
    and how many rounds, in each of which they take turns."""

    weights: tuple[str, ...]
    rows: tuple[int, ...]
    isas: tuple[str, ...]
    rounds: int

    def __post_init__(self) -> None:
        unknown = [name for name in self.weights if name not in WEIGHTS]
        if unknown:
            raise ConfigError(f"weights must be among {', '.join(WEIGHTS)}; got {unknown[0]!r}")
        if not self.weights or not self.rows:
            raise ConfigError("there is nothing to measure: name kinds of weights and numbers of rows")
        if BASE not in self.isas:
            raise ConfigError(f"the others are compared with {BASE}, which is not among {', '.join(self.isas)}")

    @property
    def num_measurements(self) -> int:
        return len(self.isas) + len(self.weights) * len(self.rows)


def plan_of(weights: tuple[str, ...], rows: tuple[int, ...], rounds: int) -> IsaPlan:
    """A plan with every instruction set of this processor."""
    return IsaPlan(weights, rows, tuple(runnable()), rounds)


def measure_isas(plan: IsaPlan, clock: Callable[[], float], notify: Callable[[str], None]) -> list[IsaRow]:
    """Carry out the plan.

    clock: seconds that this thread was on a core. notify is called with the name of each of the plan's num_measurements
    before it starts.
    """
    kinds, tiles = {WEIGHTS[name] for name in plan.weights}, {}
    for isa in plan.isas:
        notify(f"compiling {isa} kernels")
        tiles[isa] = load_tiles(isa, 1, kinds=kinds, kv_dtype=np.float32, heads_per_kv=1, head_dim=16)
    result = []
    for name in plan.weights:
        layer = random_layer(WEIGHTS[name])
        for rows in plan.rows:
            notify(f"{name}, rows: {rows}")
            runs = {isa: layer_run(layer, rows, isa, each) for isa, each in tiles.items()}
            rates = layer_rates(runs, rows, plan.rounds, clock)
            result += [row_of(name, rows, isa, rates[isa], rates[BASE]) for isa in plan.isas]
    return result


def row_of(weights: str, rows: int, isa: str, rates: list[float], base: list[float]) -> IsaRow:
    ratios = [one / other for one, other in zip(rates, base, strict=True)]
    low, middle, high = (float(each) for each in np.quantile(ratios, [0.25, 0.5, 0.75]))
    return IsaRow(weights, rows, isa, median(rates), middle, low, high)


def layer_rates(
    runs: dict[str, Callable[[int], None]], rows: int, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Operations per second of each round by instruction set, which take turns; the first turn is not counted."""
    operations = 2.0 * rows * DEPTH * COLUMNS
    count, rates = max(1, round(RUN_OPERATIONS / operations)), {isa: [] for isa in runs}
    for turn in range(rounds + 1):
        for isa, run in runs.items():
            start = clock()
            run(count)
            seconds = clock() - start
            if turn:
                rates[isa].append(count * operations / seconds)
    return rates


def layer_run(packed: Packed, rows: int, isa: str, tiles: Tiles) -> Callable[[int], None]:
    """A function of a count that has the layer computed so many times on the same random rows."""
    layer = np.array(packed.descriptor(isa), np.int64)
    stride = input_stride.py_func(layer)
    inputs, sums = aligned_zeros(rows * stride), np.zeros((rows, DEPTH // GROUP * 2), np.float32)
    for row, values in enumerate(np.random.default_rng(1).standard_normal((rows, DEPTH), dtype=np.float32)):
        prepare(layer, values, 0, inputs.ctypes.data + row * stride, sums[row].ctypes.data)
    outputs, scratch = np.zeros((rows, COLUMNS), np.float32), new_unpacked(DEPTH)[0]
    sync = new_sync(1)

    def run(count: int) -> None:
        assert packed.weights.size  # the descriptor holds its address alone
        repeat_linear(count, tiles, sync, layer, rows, inputs, sums, outputs, scratch)

    return run


def random_layer(kind: int) -> Packed:
    """Random weights of one kind, COLUMNS by DEPTH."""
    rng = np.random.default_rng(0)
    if kind == BF16:
        return pack_float(rng.standard_normal((COLUMNS, DEPTH), dtype=np.float32), kind)
    bits = 4 if kind == U4 else 8
    codes = rng.integers(0, 1 << bits, (COLUMNS, DEPTH), dtype=np.uint8)
    scale = rng.uniform(0.5, 1.5, (COLUMNS, DEPTH // HALF)).astype(np.float16)
    return pack_affine(codes, scale, -scale, bits)
