"""Occurrence numbers of equal digests, against a dictionary that counts."""

from collections import Counter

import numpy as np
import pytest

from service.datasets.rows import OccurrenceCounter


@pytest.mark.parametrize("seed", range(20))
def test_equal_digests_are_numbered_in_order(seed: int) -> None:
    """Each digest gets the number of equal ones before it, over batches of all sizes."""
    random = np.random.default_rng(seed)
    counter, seen = OccurrenceCounter(), Counter[int]()
    for size in random.integers(0, 40, 60):
        digests = random.integers(0, 2**64 - 1, 30, np.uint64)[random.integers(0, 30, size)]
        if seed % 2:
            digests %= np.uint64(25)
        wanted = []
        for digest in digests.tolist():
            wanted.append(seen[digest])
            seen[digest] += 1
        assert counter.number(digests).tolist() == wanted
