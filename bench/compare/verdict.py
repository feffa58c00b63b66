"""From the figures of alternating runs to a ratio, its spread and a verdict for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

FASTER, SLOWER, SAME, UNDECIDED = "faster", "slower", "no difference", "too few rounds"
# Where there is no difference, all of 5 rounds agree once in 16 times, all of 8 once in 128, and 11 of 12 once in 158.
LEAST_ROUNDS = 5
ROUNDS_PER_OUTLIER = 12  # of so many rounds, one at each end of the spread does not count


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """One row: tokens per second of both sides, round by round; the median of new / base of each round, and between
    what the ratios lie."""

    name: str
    base_tok_s: tuple[float, ...]
    new_tok_s: tuple[float, ...]
    ratio: float
    low: float
    high: float
    verdict: str


def rule(threshold: float) -> str:
    """What a verdict means, in words."""
    return (
        f"faster or slower: the median ratio is off by more than {threshold:.1%}, and the ratio of every round is on "
        f"that side of 1 (at least {LEAST_ROUNDS}; for every {ROUNDS_PER_OUTLIER}, the outermost two do not count)"
    )


def judge(name: str, base: Sequence[float], new: Sequence[float], threshold: float) -> RowVerdict:
    """Compare round by round: a round's two runs come one right after the other, so what slows the machine down for
    minutes slows both. Raises ValueError where there is no round, or a side has more of them."""
    if not base:
        raise ValueError(f"{name}: there is no round to judge by")
    ratios = sorted(b / a for a, b in zip(base, new, strict=True))
    cut = len(ratios) // ROUNDS_PER_OUTLIER
    low, high = ratios[cut], ratios[-1 - cut]
    middle = median(ratios)
    verdict = SAME
    if len(ratios) < LEAST_ROUNDS:
        verdict = UNDECIDED
    elif middle > 1 + threshold and low > 1:
        verdict = FASTER
    elif middle < 1 - threshold and high < 1:
        verdict = SLOWER
    return RowVerdict(name, tuple(base), tuple(new), middle, low, high, verdict)


def rows_of(printed: Mapping[str, object]) -> dict[str, float]:
    """What `bench engine --json` printed, as one figure for each row: "decode 16", "prefill 512", "W1"."""
    rows: dict[str, float] = {}
    for family in ("decode", "prefill"):
        speeds = printed[f"{family}_tok_s"]
        assert isinstance(speeds, Mapping)
        rows |= {f"{family} {size}": float(speed) for size, speed in speeds.items()}
    w1 = printed["w1_output_tok_s"]
    return rows if w1 is None else {**rows, "W1": float(str(w1))}


def order(num_rounds: int, first: str, second: str) -> list[str]:
    """Who runs when: A B, B A, A B, ... so that neither side is always the one that comes after a pause."""
    pairs = [(first, second) if i % 2 == 0 else (second, first) for i in range(num_rounds)]
    return [side for pair in pairs for side in pair]


def judge_all(runs: Mapping[str, Sequence[Mapping[str, float]]], threshold: float) -> list[RowVerdict]:
    """runs: {"base": rows of each round, "new": the same}. Rows that only one side has are left out."""
    names = [name for name in runs["base"][0] if name in runs["new"][0]]
    speeds = {side: {name: [run[name] for run in runs[side]] for name in names} for side in ("base", "new")}
    return [judge(name, speeds["base"][name], speeds["new"][name], threshold) for name in names]
