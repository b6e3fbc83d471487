"""Quality of answers: ranks of held-out targets, and recall of the exact best.

Runs in the environments of peers too: only numpy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows = Sequence[ArrayLike] | NDArray[np.int64]  # of each query, or [Q, k]

_ROUNDING = 1e-5  # of a product of unit vectors in float32
ABSENT = 2**31  # a rank far beyond all that is counted


def ranks(lists: Rows, targets: ArrayLike) -> NDArray[np.int64]:
    """Return the rank of each target in its list, from 0; `ABSENT` where it is missing.

    Args:
        lists: M lists of item rows, best first, of any lengths.
        targets: item rows [M].

    Raises:
        ValueError: when there are not as many targets as lists, or a list names an item twice.
    """
    found = []
    for items, target in zip(lists, np.asarray(targets).tolist(), strict=True):
        row = np.asarray(items)
        if len(np.unique(row)) < len(row):
            raise ValueError("a list names an item twice")
        at = np.flatnonzero(row == target)
        found.append(int(at[0]) if len(at) else ABSENT)
    return np.array(found, dtype=np.int64)


def recall(found: Rows, best: Rows) -> float:
    """The share of each query's exact best that is among what was found, on the average.

    Raises:
        ValueError: when there are not as many of one as of the other, or none.
    """
    if len(found) != len(best) or not len(best):
        raise ValueError(f"{len(found)} answers cannot be judged by {len(best)} exact ones")
    shares = [np.isin(np.asarray(b), np.asarray(f)).mean()
              for f, b in zip(found, best, strict=True)]  # fmt: skip
    return float(np.mean(shares))


class Nearest:
    """The exact nearest keys of queries, and what share of them others find.

    Keys that say the same stand at one place: of equals, whichever is found counts.
    """

    def __init__(self, keys: NDArray[np.float32], queries: NDArray[np.float32], count: int) -> None:
        """Compare every key with every query.

        Args:
            keys: unit vectors [F, D].
            queries: unit vectors [Q, D].
            count: how many nearest keys, at most F.
        """
        self._keys, self._queries, self._count = keys, queries, count
        least = len(keys) - count
        # A few at a time: the products of all would need more memory than the keys.
        self._least = np.array(
            [np.partition(keys @ query, least)[least] for query in queries], dtype=np.float32
        )

    def recall(self, found: Rows, queries: Sequence[int]) -> float:
        """On the average over some queries, by what was found of each: rows of keys.

        Raises:
            ValueError: when there are not as many answers as queries, or a key is named twice.
        """
        shares = []
        for rows, at in zip(found, queries, strict=True):
            row = np.asarray(rows, dtype=np.int64)
            if len(np.unique(row)) < len(row):
                raise ValueError("a key is named twice")
            products = self._keys[row] @ self._queries[at]
            good = np.count_nonzero(products >= self._least[at] - _ROUNDING)
            shares.append(min(1.0, good / self._count))
        return float(np.mean(shares))
