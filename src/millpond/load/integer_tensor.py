"""A matrix whose codes, scales and zeros are tensors of their own, as in AWQ, GPTQ and compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.errors import ModelFileError
from millpond.load.affine import GROUP, AffineWeights

AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # where in a word the eight columns stand, in units of 4 bits


class Layout(Enum):
    """How codes and zeros lie in int32 words; N are the outputs of the layer, K its inputs, G its groups.

    GPTQ: codes [K / 8, N], eight of one column in a word; zeros [G, N / 8]; scales [G, N].
    AWQ: codes [K, N / 8], eight columns in a word, in the order of AWQ_PLACES; zeros [G, N / 8], so too; scales [G, N].
    ROWS: codes [N, K / p], p of one row in a word; zeros [N / p, G]; scales [N, G]. p is 32 / bits.
    BYTES: codes int8 [N, K], 0 meaning 0; scales [N, G].
    """

    GPTQ = "GPTQ"
    AWQ = "AWQ"
    ROWS = "packed rows"
    BYTES = "int8"


@dataclass(frozen=True, slots=True)
class IntegerTensor:
    """w[n, k] = scale[n, g] * (code[n, k] - zero[n, g]), g = k // group.

    shape: (N, K). words, scales and zeros lie as the layout says; scales: float16, float32 or bfloat16 bits (uint16);
    zero is added to zeros, or is all of them where there are none. rows: which rows are meant, None for all.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    bits: int
    group: int
    words: NDArray[Any]
    scales: NDArray[np.generic]
    zeros: NDArray[np.uint32] | None
    zero: int
    rows: NDArray[np.int64] | None = None

    @property
    def kind(self) -> str:
        """For messages."""
        return f"{self.layout.value}, {self.bits} bits"

    def take_rows(self, rows: NDArray[np.int64]) -> IntegerTensor:
        """Some rows of a whole tensor, in the order asked for."""
        assert self.rows is None
        return replace(self, rows=rows, shape=(len(rows), self.shape[1]))

    def affine(self) -> AffineWeights:
        """The weights in groups of 32, with scales and offsets in float32. Nothing is lost: a scale has at most 11 bits
        and a zero at most 5 more, or their product is rounded once, as it is wherever it is computed."""
        depth = self.shape[1]
        scale, zero = self._scales_and_zeros(np.arange(depth // self.group))
        scale, offset = (np.repeat(each, self.group // GROUP, axis=1) for each in (scale, -scale * zero))
        return AffineWeights(self._codes(np.arange(depth)), scale, offset, self.bits)

    def values(self, inputs: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """float32 [N, K], or of some columns only."""
        inputs = np.arange(self.shape[1]) if inputs is None else inputs
        scale, zero = self._scales_and_zeros(inputs // self.group)
        values: NDArray[np.float32] = scale * (self._codes(inputs).astype(np.float32) - zero)
        return values

    def _outputs(self) -> NDArray[np.int64]:
        return np.arange(self.shape[0]) if self.rows is None else self.rows

    def _codes(self, inputs: NDArray[np.int64]) -> NDArray[np.uint8]:
        """uint8 [N, inputs]."""
        rows, each = self._outputs(), 32 // self.bits
        if self.layout is Layout.BYTES:
            signed: NDArray[np.uint8] = self.words[np.ix_(rows, inputs)].view(np.uint8)
            return signed ^ np.uint8(0x80)
        if self.layout is Layout.ROWS:
            return self._cut(self.words[np.ix_(rows, inputs // each)], inputs % each)
        if self.layout is Layout.GPTQ:
            return self._cut(self.words[np.ix_(inputs // each, rows)].T, inputs % each)
        return self._cut(self.words[np.ix_(inputs, rows // each)], AWQ_PLACES[rows % each]).T

    def _scales_and_zeros(self, groups: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """float32 [N, groups] each."""
        rows, each = self._outputs(), 32 // self.bits
        by_row = self.layout in (Layout.ROWS, Layout.BYTES)
        scales = float32(self.scales[np.ix_(rows, groups)] if by_row else self.scales[np.ix_(groups, rows)].T)
        if not np.isfinite(scales).all():
            raise ModelFileError(f"tensor {self.name!r} ({self.kind}) has a scale that is not finite: it is damaged")
        if self.zeros is None:
            return scales, np.full(scales.shape, self.zero, np.float32)
        places = AWQ_PLACES[rows % each] if self.layout is Layout.AWQ else rows % each
        words = self.zeros[np.ix_(rows // each, groups)].T if by_row else self.zeros[np.ix_(groups, rows // each)]
        zeros = self._cut(words, places).T
        if self.zero and zeros.max(initial=0) + self.zero >> self.bits:
            raise ModelFileError(
                f"tensor {self.name!r} ({self.kind}) has a zero of {(1 << self.bits) - 1} and {self.zero} more, which "
                f"is no code of {self.bits} bits; readers of the format differ in what it means"
            )
        return scales, (zeros + np.float32(self.zero)).astype(np.float32)

    def _cut(self, words: NDArray[Any], places: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The codes at these places of the words of each column."""
        shifts = (places * self.bits).astype(np.uint32)
        codes: NDArray[np.uint8] = ((words >> shifts) & np.uint32((1 << self.bits) - 1)).astype(np.uint8)
        return codes


def float32(values: NDArray[np.generic]) -> NDArray[np.float32]:
    """float16, float32 or bfloat16 bits as float32."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
