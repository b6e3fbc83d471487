"""Sets of rows."""

from __future__ import annotations

import numpy as np
import pytest

from models.data.vocabulary import expand_ranges, sorted_union


@pytest.mark.parametrize("sizes", [(0,), (0, 0), (1, 0), (5, 7, 3), (200, 300)])
def test_rows_are_united_as_sets_are(sizes: tuple[int, ...]) -> None:
    """`sorted_union` returns the distinct rows of all parts in ascending order."""
    generator = np.random.default_rng(sum(sizes))
    parts = [generator.integers(0, 50, size) for size in sizes]
    found = sorted_union(*parts)
    assert found.tolist() == sorted({row for part in parts for row in part.tolist()})
    assert found.dtype == np.int64


def test_ranges_are_laid_end_to_end() -> None:
    """`expand_ranges` returns each range's elements in turn, and which range each is from."""
    index, elements = expand_ranges(np.array([5, 9, 0, 5]), np.array([2, 0, 3, 1]))
    assert index.tolist() == [0, 0, 2, 2, 2, 3]
    assert elements.tolist() == [5, 6, 0, 1, 2, 5]
