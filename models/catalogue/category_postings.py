"""Postings of categories: the item rows of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Postings = Mapping[str, NDArray[np.int32]]
"""Item rows by category, none of them empty."""


def updated_postings(
    postings: Postings,
    rows: NDArray[np.int64],
    old: Iterable[tuple[str, ...]],
    new: Sequence[tuple[str, ...]],
    items: int,
) -> Postings:
    """Move some of the items, at `rows`, from the postings of their old categories to the new."""
    stays = np.ones(items, np.bool_)
    stays[rows] = False
    moved = dict(postings)
    for name in {name for names in old for name in names}:
        moved[name] = moved[name][stays[moved[name]]]
    joined = defaultdict[str, list[int]](list)
    for row, names in zip(rows.tolist(), new, strict=True):
        for name in names:
            joined[name].append(row)
    for name, added in joined.items():
        known = moved.get(name, np.zeros(0, dtype=np.int32))
        moved[name] = np.concatenate([known, np.array(added, dtype=np.int32)])
    return {name: listed for name, listed in moved.items() if len(listed)}


def in_postings(postings: Postings, categories: Iterable[str], items: int) -> NDArray[np.bool_]:
    """Mark the rows of at least one of the categories, bool [items]."""
    inside = np.zeros(items, dtype=np.bool_)
    for category in categories:
        if category in postings:
            inside[postings[category]] = True
    return inside
