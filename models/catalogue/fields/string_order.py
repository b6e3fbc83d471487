"""Ranks of the strings of a vocabulary in the order of their code points."""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.data.vocabulary import Vocabulary


class Ranks(NamedTuple):
    """Ranks of the first n strings of a vocabulary."""

    vocabulary: Vocabulary
    order: NDArray[np.int32]  # [n] rows, by their strings
    ranks: NDArray[np.int32]  # [n] of each row

    def place(self, text: str) -> float:
        """Return the rank of a string; between two ranks where it is none of the strings."""
        ids = self.vocabulary.ids
        place = bisect_left(self.order, text, key=lambda row: ids[row])
        known = place < len(self.order) and ids[self.order[place]] == text
        return float(place) if known else place - 0.5


class StringOrder:
    """Keeps the strings of one vocabulary in order, for all versions of what uses it.

    Ranks are computed when they are first asked for: a second for a million strings. Strings that
    were added since are merged into the order in some milliseconds. The order of two strings never
    changes, so that later ranks serve earlier versions.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._found = Ranks(vocabulary, np.zeros(0, np.int32), np.zeros(0, np.int32))

    def ranks(self, count: int) -> Ranks:
        """Return ranks of the first `count` strings, or of more."""
        with self._lock:
            if len(self._found.order) < count:
                self._found = self._extended()
            return self._found

    def _extended(self) -> Ranks:
        order, ids = self._found.order, self._vocabulary.ids
        old, size = len(order), len(self._vocabulary)
        added = np.array(sorted(range(old, size), key=ids.__getitem__), np.int32)
        if old:
            # Bisection for few strings, and the merge of two sorted runs for many.
            if len(added) < old // 20:
                places = [
                    bisect_left(order, ids[row], key=lambda row: ids[row]) for row in added.tolist()
                ]
                added = np.insert(order, places, added)
            else:
                both = np.concatenate([order, added]).tolist()
                added = np.array(sorted(both, key=ids.__getitem__), np.int32)
        ranks = np.empty(size, np.int32)
        ranks[added] = np.arange(size, dtype=np.int32)
        return Ranks(self._vocabulary, added, ranks)
