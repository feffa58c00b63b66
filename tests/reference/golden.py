"""Golden reference values, and what a model's logits are measured by against them. numpy only.

    golden = load_prompts()[0]; compare_logits(golden, logits)   # largest absolute error over the fingerprint
    quality(load_text(), logits)                                 # top-1 agreement, KL divergence, perplexity

Logits are float32 [positions, vocab] throughout: row t holds what follows tokens 0..t. Logarithms are natural.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).resolve().parent.parent / "golden"
TEXTS_FILE = FOLDER / "prompts.json"
PROMPTS_FILE = FOLDER / "smollm2_prompts.npz"
TEXT_FILE = FOLDER / "smollm2_text.npz"
NUM_TOP = 16  # most likely tokens in a fingerprint
NUM_COLUMNS = 64  # vocabulary entries, the same at every position, in a fingerprint
NUM_CLASSES = 64  # most likely tokens that keep their own probability in the text's reference
ROWS_AT_A_TIME = 64  # in float64 a block of the vocabulary stays below 30 MB

MAX_LOGIT_ERROR = 1e-4  # of the float32 path, at every position
MIN_TOP1_AGREEMENT = 0.955  # of the quantised path over the text
MAX_KL_MEAN = 0.004  # likewise, over the whole vocabulary


@dataclass(frozen=True, slots=True)
class PromptGolden:
    """One prompt's reference: a fingerprint of every position's logits, and the greedy continuation.

    top_ids and top_logits are [positions, NUM_TOP], most likely first; column_ids is [NUM_COLUMNS] and column_logits
    [positions, NUM_COLUMNS]; log_normalizer [positions] is the logarithm of the sum of the exponentials of a whole
    row. greedy_token_ids went on past end tokens; greedy_margins says by how much each led the runner-up.
    """

    name: str
    token_ids: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logits: NDArray[np.float32]
    column_ids: NDArray[np.int32]
    column_logits: NDArray[np.float32]
    log_normalizer: NDArray[np.float32]
    greedy_token_ids: NDArray[np.int32]
    greedy_margins: NDArray[np.float32]

    def greedy_until(self, end_token_ids: frozenset[int]) -> list[int]:
        """The greedy tokens that come before the first end token, or all of them."""
        tokens = self.greedy_token_ids.tolist()
        return tokens[: next((i for i, token in enumerate(tokens) if token in end_token_ids), len(tokens))]


@dataclass(frozen=True, slots=True)
class TextGolden:
    """The reference's distributions over a text, each cut into NUM_CLASSES tokens of their own and a rest.

    token_ids is [positions]; top_ids and top_logprobs are [positions, NUM_CLASSES], most likely first; rest_logprob is
    [positions]; nll [positions - 1] is the negative log-probability of the token that does come next.
    """

    token_ids: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    rest_logprob: NDArray[np.float32]
    nll: NDArray[np.float32]

    def first(self, positions: int) -> TextGolden:
        """The reference of the text's beginning, which is the beginning of the reference."""
        arrays = {key: getattr(self, key)[:positions] for key in _array_names(TextGolden)}
        return TextGolden(**{**arrays, "nll": self.nll[: positions - 1]})


@dataclass(frozen=True, slots=True)
class Quality:
    """How near logits come to a reference over a text. KL is of the reference from the model, in nats per position."""

    positions: int
    top1_agreement: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    nll: float
    reference_nll: float

    @property
    def perplexity_ratio(self) -> float:
        return float(np.exp(self.nll - self.reference_nll))

    def __str__(self) -> str:
        return (
            f"{self.positions} positions: top-1 agreement {self.top1_agreement:.4f}, KL mean {self.kl_mean:.6f}, "
            f"p99 {self.kl_p99:.5f}, max {self.kl_max:.5f}, perplexity {np.exp(self.nll):.3f} against "
            f"{np.exp(self.reference_nll):.3f} (x {self.perplexity_ratio:.5f})"
        )


def load_prompts(path: Path = PROMPTS_FILE) -> list[PromptGolden]:
    with np.load(path) as arrays:
        names = dict.fromkeys(key.split(".")[0] for key in arrays.files)
        return [
            PromptGolden(name, **{key: _unpacked(arrays[f"{name}.{key}"]) for key in _array_names(PromptGolden)})
            for name in names
        ]


def load_text(path: Path = TEXT_FILE) -> TextGolden:
    with np.load(path) as arrays:
        return TextGolden(**{key: _unpacked(arrays[key]) for key in _array_names(TextGolden)})


def save_prompts(goldens: list[PromptGolden], path: Path = PROMPTS_FILE) -> None:
    arrays = {f"{golden.name}.{key}": getattr(golden, key) for golden in goldens for key in _array_names(PromptGolden)}
    np.savez_compressed(path, **_packed(arrays))


def save_text(golden: TextGolden, path: Path = TEXT_FILE) -> None:
    np.savez_compressed(path, **_packed({key: getattr(golden, key) for key in _array_names(TextGolden)}))


def fingerprint(logits: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """The fields of PromptGolden that come from the logits."""
    columns = _columns(logits.shape[1])
    top_ids = _top(logits, NUM_TOP)
    return {
        "top_ids": top_ids,
        "top_logits": np.take_along_axis(logits, top_ids, axis=1),
        "column_ids": columns,
        "column_logits": logits[:, columns],
        "log_normalizer": _log_normalizer(logits).astype(np.float32),
    }


def coarsen(token_ids: NDArray[np.int32], logits: NDArray[np.float32]) -> TextGolden:
    """What is kept of the reference's logits over a text."""
    parts = []
    for rows, logprobs in _logprob_blocks(logits):
        top_ids = _top(logits[rows], NUM_CLASSES)
        top_logprobs = np.take_along_axis(logprobs, top_ids, axis=1)
        np.put_along_axis(logprobs, top_ids, -np.inf, axis=1)
        parts.append((top_ids, top_logprobs, _log_normalizer(logprobs)))
    top_ids, top_logprobs, rest = (np.concatenate(part) for part in zip(*parts, strict=True))
    nll = _nll(token_ids, logits)
    return TextGolden(
        token_ids, top_ids, top_logprobs.astype(np.float32), rest.astype(np.float32), nll.astype(np.float32)
    )


def compare_logits(golden: PromptGolden, logits: NDArray[np.float32]) -> float:
    """The largest absolute difference in nats over the fingerprint of every position; infinite where not finite."""
    _check_shape(logits, len(golden.token_ids), int(max(golden.column_ids.max(), golden.top_ids.max())) + 1)
    if not np.isfinite(logits).all():
        return float("inf")
    differences = (
        np.take_along_axis(logits, golden.top_ids, axis=1) - golden.top_logits,
        logits[:, golden.column_ids] - golden.column_logits,
        _log_normalizer(logits) - golden.log_normalizer,
    )
    return max(float(np.abs(difference).max()) for difference in differences)


def worst_positions(golden: PromptGolden, logits: NDArray[np.float32], count: int = 5) -> list[tuple[int, float]]:
    """The positions of the largest differences in the fixed columns, worst first: where to look for a fault."""
    errors = np.abs(logits[:, golden.column_ids] - golden.column_logits).max(axis=1)
    return [(int(position), float(errors[position])) for position in np.argsort(-errors)[:count]]


def quality(golden: TextGolden, logits: NDArray[np.float32]) -> Quality:
    """Measure logits over the text against the reference's coarsened distributions.

    The KL divergence over {each of the NUM_CLASSES tokens, all the rest} is never above that over the whole
    vocabulary (merging outcomes loses information, by the log-sum inequality), and falls short of it by what differs
    inside the rest.
    """
    _check_shape(logits, len(golden.token_ids), int(golden.top_ids.max()) + 1)
    _check_finite(logits)
    divergences = []
    for rows, logprobs in _logprob_blocks(logits):
        top_ids, top_logprobs = golden.top_ids[rows], golden.top_logprobs[rows].astype(np.float64)
        model_top = np.take_along_axis(logprobs, top_ids, axis=1)
        np.put_along_axis(logprobs, top_ids, -np.inf, axis=1)
        rest = golden.rest_logprob[rows].astype(np.float64)
        divergences.append(
            (np.exp(top_logprobs) * (top_logprobs - model_top)).sum(axis=1)
            + np.exp(rest) * (rest - _log_normalizer(logprobs))
        )
    agreement = logits.argmax(axis=1) == golden.top_ids[:, 0]
    return _quality(np.concatenate(divergences), agreement, _nll(golden.token_ids, logits), golden.nll)


def full_quality(token_ids: NDArray[np.int32], reference: NDArray[np.float32], logits: NDArray[np.float32]) -> Quality:
    """The same, with the KL divergence over the whole vocabulary: needs the reference's own logits."""
    _check_shape(logits, *reference.shape)
    _check_finite(logits)
    divergences = []
    for (_, expected), (_, logprobs) in zip(_logprob_blocks(reference), _logprob_blocks(logits), strict=True):
        divergences.append((np.exp(expected) * (expected - logprobs)).sum(axis=1))
    agreement = logits.argmax(axis=1) == reference.argmax(axis=1)
    return _quality(np.concatenate(divergences), agreement, _nll(token_ids, logits), _nll(token_ids, reference))


def _quality(divergences, agreement, nll, reference_nll) -> Quality:
    return Quality(
        positions=len(divergences),
        top1_agreement=float(agreement.mean()),
        kl_mean=float(divergences.mean()),
        kl_p99=float(np.quantile(divergences, 0.99)),
        kl_max=float(divergences.max()),
        nll=float(nll.mean()),
        reference_nll=float(reference_nll.astype(np.float64).mean()),
    )


def _array_names(kind: type) -> list[str]:
    return [field.name for field in fields(kind) if field.name != "name"]


def _packed(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Token ids in 16 bits: the vocabulary has 49,152 entries, and half of a golden file is ids."""
    return {key: array.astype(np.uint16) if array.dtype.kind in "iu" else array for key, array in arrays.items()}


def _unpacked(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.int32) if array.dtype == np.uint16 else array


def _columns(vocab: int) -> NDArray[np.int32]:
    """The first and the last entry, and others drawn once and for all."""
    drawn = np.random.default_rng(0).choice(np.arange(1, vocab - 1), NUM_COLUMNS - 2, replace=False)
    return np.sort(np.concatenate([[0], drawn, [vocab - 1]])).astype(np.int32)


def _top(logits: NDArray[Any], count: int) -> NDArray[np.int32]:
    """Ids of the largest entries of each row, largest first, the lower id first where equal."""
    ids = np.sort(np.argpartition(-logits, count - 1, axis=1)[:, :count], axis=1)
    order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1).astype(np.int32)


def _log_normalizer(logits: NDArray[Any]) -> NDArray[np.float64]:
    largest = logits.max(axis=1, keepdims=True).astype(np.float64)
    sums = np.concatenate([np.exp(logits[rows] - largest[rows]).sum(axis=1) for rows in _row_blocks(len(logits))])
    return np.log(sums) + largest[:, 0]


def _logprob_blocks(logits: NDArray[np.float32]) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    for rows in _row_blocks(len(logits)):
        yield rows, logits[rows].astype(np.float64) - _log_normalizer(logits[rows])[:, None]


def _row_blocks(count: int) -> Iterator[slice]:
    for first in range(0, count, ROWS_AT_A_TIME):
        yield slice(first, min(first + ROWS_AT_A_TIME, count))


def _nll(token_ids: NDArray[np.int32], logits: NDArray[np.float32]) -> NDArray[np.float64]:
    chosen = logits[np.arange(len(token_ids) - 1), token_ids[1:]]
    return _log_normalizer(logits)[:-1] - chosen


def _check_shape(logits: NDArray[Any], positions: int, vocab: int) -> None:
    if logits.ndim != 2 or logits.shape[0] != positions or logits.shape[1] < vocab:
        raise ValueError(f"logits are {logits.shape}, the reference has {positions} positions of at least {vocab}")


def _check_finite(logits: NDArray[Any]) -> None:
    bad = np.flatnonzero(~np.isfinite(logits).all(axis=1))
    if len(bad):
        raise ValueError(f"logits of {len(bad)} positions are not finite, the first at position {bad[0]}")
