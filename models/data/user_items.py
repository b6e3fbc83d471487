"""A user's item as one number, and what comes first: for counting what users had."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def user_item_keys(
    users: NDArray[np.integer[Any]], items: NDArray[np.integer[Any]], n_items: int
) -> NDArray[np.int64]:
    """One number for each user's item, [E]: equal where both are."""
    return users.astype(np.int64) * n_items + items


def is_first_occurrence(values: NDArray[Any]) -> NDArray[np.bool_]:
    """True [E] where a value stands for the first time."""
    first = np.zeros(len(values), dtype=np.bool_)
    first[np.unique(values, return_index=True)[1]] = True
    return first
