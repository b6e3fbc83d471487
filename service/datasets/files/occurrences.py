"""Occurrence numbers of equal rows within one file."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class OccurrenceCounter:
    """Numbers equal digests 0, 1, … in the order of their arrival, in 12 bytes a distinct digest.

    Counts lie in sorted runs, of which two of about the same length are merged, as in a
    log-structured merge tree: a dictionary would take ten times the memory.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[NDArray[np.uint64], NDArray[np.uint32]]] = []

    def number(self, digests: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return, for each digest [n], how many equal ones came before it in all calls."""
        distinct, inverse, counts = np.unique(digests, return_inverse=True, return_counts=True)
        before = np.zeros(len(distinct), np.int64)
        for known, known_counts in self._runs:
            places = np.minimum(np.searchsorted(known, distinct), len(known) - 1)
            before += np.where(known[places] == distinct, known_counts[places], 0)
        # The rank of a digest among equal ones of this call: its place in its sorted group.
        order = np.argsort(inverse, kind="stable")
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        within = np.empty(len(digests), np.int64)
        within[order] = np.arange(len(digests)) - starts
        if len(distinct):
            self._add(distinct, counts.astype(np.uint32))
        numbered: NDArray[np.int64] = before[inverse] + within
        return numbered

    def _add(self, digests: NDArray[np.uint64], counts: NDArray[np.uint32]) -> None:
        while self._runs and len(self._runs[-1][0]) <= 2 * len(digests):
            last, last_counts = self._runs.pop()
            joined, inverse = np.unique(np.concatenate([last, digests]), return_inverse=True)
            totals = np.zeros(len(joined), np.uint32)
            np.add.at(totals, inverse, np.concatenate([last_counts, counts]))
            digests, counts = joined, totals
        self._runs.append((digests, counts))
