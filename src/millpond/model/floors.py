"""What each phase of a step has to do at the least: bytes to read or write and products to sum, from figures alone.

A phase cannot be faster than its bytes at the machine's bandwidth, nor than its products at its dot rate.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from millpond.kernels.matmul import AMX_U4, BF16, COLUMNS, F32_WEIGHTS, U4, U8
from millpond.kernels.pack import Packed
from millpond.kernels.roofline import MachineRates
from millpond.model.config import ModelConfig
from millpond.model.weights import ModelWeights

# The phases of model/forward.py's walk, in its order: around the layers, and of each layer.
FIRST, LAST = ("embed",), ("last norm", "head")
LAYER = ("norm 1", "q k v", "rotate, write", "attend", "gather", "out", "norm 2", "gate * up", "down")
# Outside the walk: the step as arrays before it; after it the threads' leave, the sampler and its results as objects.
BEFORE, AFTER = "arrays", "leave, sample"

DOT_OF = {U4: "u8 x s8", U8: "u8 x s8", BF16: "bf16", F32_WEIGHTS: "float32"}
INPUT_BYTES = {"u8 x s8": 1, "bf16": 2, "float32": 4}  # of an activation, by the product that it goes into
QUERY_BYTES = {"bf16": 2, "float32": 4, "u8 x s8": 1.5}  # of a query's element, by the product that it goes into
FLOAT = 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of `sequences` that each compute `new_tokens` tokens, the last at position context - 1."""

    sequences: int
    new_tokens: int
    context: int

    @property
    def name(self) -> str:
        if self.new_tokens > 1:
            return f"prefill {self.new_tokens}"
        return f"decode {self.sequences} at {self.context}"

    @property
    def rows(self) -> int:
        return self.sequences * self.new_tokens

    @property
    def scored_positions(self) -> int:
        """How many positions the rows attend to, all together."""
        before = self.context - self.new_tokens
        return self.sequences * (self.new_tokens * before + self.new_tokens * (self.new_tokens + 1) // 2)


@dataclass(slots=True)
class Work:
    """One phase of one step, over all layers. memory_bytes are weights and K/V, which nothing but memory holds from
    one step to the next (or a cache, where all of the model fits); cache_bytes are the rows that one phase leaves to
    the next, `parts` times cache_bytes / parts; operations by the kind of product, a multiply-add being two."""

    rows: int
    parts: int = 1
    memory_bytes: float = 0
    cache_bytes: float = 0
    operations: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: "Work") -> "Work":
        """Both, as one phase over all layers; the rows are those of the first."""
        operations = dict(self.operations)
        for dot, count in other.operations.items():
            operations[dot] = operations.get(dot, 0) + count
        return Work(
            self.rows,
            self.parts + other.parts,
            self.memory_bytes + other.memory_bytes,
            self.cache_bytes + other.cache_bytes,
            operations,
        )

    def floor(self, rates: MachineRates, step_bytes: float) -> tuple[float, str]:
        """The least seconds, and what bounds them: "memory", "cache" or "compute". step_bytes: what the whole step
        reads of weights and K/V, which says where it comes from."""
        seconds = {
            "memory": self.memory_bytes / rates.read_rate(int(step_bytes)),
            "cache": self.cache_bytes / rates.read_rate(int(self.cache_bytes / self.parts)),
            "compute": sum(count / rates.dots[dot] for dot, count in self.operations.items()),
        }
        bound = max(seconds, key=lambda name: seconds[name])
        return seconds[bound], bound


def phase_names(num_layers: int) -> list[str]:
    """The name of each phase that a step walks through, in order."""
    return [*FIRST, *LAYER * num_layers, *LAST]


def dot_of(layer: Packed, isa: str) -> str:
    """The kind of product that a layer's weights meet the rows in: AMX makes bfloat16 of integers."""
    kind = layer.kind_for(isa)
    return DOT_OF[kind] if kind < AMX_U4 else "bf16"


def linear_work(layers: Iterable[Packed], rows: int, isa: str) -> Work:
    """`rows` rows through each of the layers."""
    layers = list(layers)
    work = Work(rows, parts=len(layers))
    for each in layers:
        work.memory_bytes += packed_bytes(each)
        dot = dot_of(each, isa)
        work.cache_bytes += rows * (each.depth * INPUT_BYTES[dot] + each.columns * FLOAT)
        work.operations[dot] = work.operations.get(dot, 0) + 2 * rows * each.columns * each.depth
    return work


def gated_work(gate_up: Iterable[Packed], rows: int, written: float, isa: str) -> Work:
    """gate and up, of which only the product is left: `written` bytes a row and layer."""
    layers = list(gate_up)
    work = linear_work(layers, rows, isa)
    outputs = sum(each.columns * FLOAT for each in layers)
    work.cache_bytes += rows * (len(layers) * written - outputs)
    return work


def row_work(layers: int, rows: int, read: int, written: float) -> Work:
    """`rows` rows of each layer, `read` float32 numbers in and `written` bytes out."""
    return Work(rows, parts=layers, cache_bytes=layers * rows * (read * FLOAT + written))


def packed_bytes(layer: Packed) -> int:
    return layer.weights.nbytes


def attention_work(config: ModelConfig, shape: StepShape, kv_position_bytes: float, kv_dot: str) -> Work:
    """Each sequence's K/V once for all its rows; each row's query times each key, each probability times each value.

    Heads that AMX does not take (amx_attention.fits) get its rate all the same: a floor below the true one.
    """
    width = config.num_heads * config.head_dim
    return Work(
        shape.rows,
        parts=config.num_layers,
        memory_bytes=shape.sequences * shape.context * kv_position_bytes,
        cache_bytes=config.num_layers * shape.rows * width * 2 * FLOAT,
        operations={kv_dot: 2.0 * config.num_layers * shape.scored_positions * 2 * width},
    )


def step_work(
    config: ModelConfig, weights: ModelWeights, shape: StepShape, kv_position_bytes: float, kv_dot: str, isa: str
) -> dict[str, Work]:
    """The work of every part of a step by name.

    kv_position_bytes: of one position over all layers, keys and values; kv_dot: the kind of product that they meet;
    isa: the instruction set. The arrays before the walk have no floor worth a name. After the last attention only the
    rows that sample go on.
    """
    rows, layers, sampled = shape.rows, config.num_layers, shape.sequences
    qkv, out, gate_up, down = zip(*weights.layers, strict=True)
    inner = layers - 1
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    both = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim

    def prepared(group: tuple[Packed, ...]) -> float:
        return sum(each.depth * INPUT_BYTES[dot_of(each, isa)] for each in group) / layers

    embedding_row = packed_bytes(weights.embedding) / config.vocab_size
    head_input = hidden * INPUT_BYTES[dot_of(weights.head, isa)]
    return {
        BEFORE: Work(rows),
        "embed": Work(rows, memory_bytes=rows * embedding_row, cache_bytes=rows * hidden * FLOAT),
        "norm 1": row_work(layers, rows, hidden, prepared(qkv)),
        "q k v": linear_work(qkv, rows, isa),
        "rotate, write": row_work(layers, rows, both, heads * QUERY_BYTES[kv_dot] + kv_position_bytes / layers),
        "attend": attention_work(config, shape, kv_position_bytes, kv_dot),
        "gather": row_work(inner, rows, heads, prepared(out)) + row_work(1, sampled, heads, prepared(out)),
        "out": linear_work(out[:-1], rows, isa) + linear_work(out[-1:], sampled, isa),
        "norm 2": row_work(inner, rows, hidden, prepared(gate_up)) + row_work(1, sampled, hidden, prepared(gate_up)),
        "gate * up": gated_work(gate_up[:-1], rows, prepared(down), isa)
        + gated_work(gate_up[-1:], sampled, prepared(down), isa),
        "down": linear_work(down[:-1], rows, isa) + linear_work(down[-1:], sampled, isa),
        "last norm": row_work(1, sampled, hidden, head_input),
        "head": linear_work([weights.head], sampled, isa),
        AFTER: row_work(1, sampled, config.vocab_size // COLUMNS, 0),
    }
