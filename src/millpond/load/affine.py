"""Weights as unsigned codes in groups of 32 along K: the form that the kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GROUP = 32


@dataclass(frozen=True, slots=True)
class AffineWeights:
    """w = scale * code + offset, exactly what the file means.

    codes: uint8 [N, K], each below 2**bits. scale, offset: [N, K // 32], float16, or float32 where float16 could not
    hold them. bits: 4, or 8 for 5-bit types too.
    """

    codes: NDArray[np.uint8]
    scale: NDArray[np.floating]
    offset: NDArray[np.floating]
    bits: int

    def values(self) -> NDArray[np.float32]:
        """float32 [N, K]."""
        columns, depth = self.codes.shape
        groups = self.codes.reshape(columns, depth // GROUP, GROUP)
        wide = (each.astype(np.float32)[..., None] for each in (self.scale, self.offset))
        values: NDArray[np.float32] = next(wide) * groups + next(wide)
        return values.reshape(columns, depth)
