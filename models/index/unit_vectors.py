"""Vectors of unit length, whose inner product is their cosine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def normalize_rows(vectors: Floats) -> Floats:
    """Divide each of vectors [n, d] by its length; a zero vector stays zero."""
    wide = vectors.astype(np.float64)  # the square of any float32 fits
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    np.divide(wide, length, out=wide, where=length > 0)
    return wide.astype(np.float32)
