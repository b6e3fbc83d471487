"""Unit of boosts, so that one means the same in rankings whose scores have different scales."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

UNIT_OF = 100  # scores, the largest, whatever the length of the answer


def boost_unit(scores: NDArray[np.floating[Any]]) -> float:
    """Return the standard deviation of the `UNIT_OF` largest scores [n]; 1 where none differ."""
    largest = -np.sort(-scores.astype(np.float64))[:UNIT_OF]
    deviation = float(largest.std()) if len(largest) else 0.0
    return deviation if deviation > 0 else 1.0
