"""Facets: counts of the values that items have in a field."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.catalogue.columns import STRINGS, ItemFields, KeywordColumn
from models.catalogue.item_values import Special, plain_number
from models.compute.checkpoint import checkpoint

FacetValue = str | int | float | bool | None

_JSON = {Special.NULL: None, Special.FALSE: False, Special.TRUE: True}
_MAX_SPAN = 1 << 16  # of numbers with a common step, which are counted by their place in it
_MANY = 1 << 16  # distinct values


@dataclass(frozen=True, slots=True)
class FacetCounts:
    """Values of one field with the number of items that have each, the most frequent first."""

    values: tuple[tuple[FacetValue, int], ...]
    other: int  # sum of the counts of the values that are left out
    minimum: float | None  # of the numbers; None without any
    maximum: float | None


class CountedItems:
    """Items that facets count, with the rows that several facets share."""

    def __init__(self, mask: NDArray[np.bool_]) -> None:
        self.mask = mask
        self.count = int(np.count_nonzero(mask))

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.mask)

    @cached_property
    def others(self) -> CountedItems:
        return CountedItems(~self.mask)


def count_values(fields: ItemFields, name: str, items: CountedItems, limit: int) -> FacetCounts:
    """Count the values of a field over some items.

    An item counts once for each of its values. Values of one count are in order: numbers, strings
    by code point, false, true, null. Objects are no values here, and `item_id` is no field.
    """
    checkpoint()
    columns = fields.columns_of(name)
    counted: list[tuple[FacetValue, int]] = []
    total, minimum, maximum = 0, None, None
    if (keywords := columns.keywords) is not None:
        counts = _keyword_counts(keywords, items)
        counts[[0, Special.OBJECT.value]] = 0
        total += int(counts.sum())
        best = _largest(counts, limit, keywords)
        counted += zip(_json_values(keywords, best), counts[best].tolist(), strict=True)
    if (numbers := columns.numbers) is not None:
        blocks = [
            block if (filled := numbers.filled(block)).all() else block[filled]
            for block in numbers.among(items.rows, items.mask)
        ]
        if blocks := [block for block in blocks if len(block)]:
            low, high = min(block.min() for block in blocks), max(block.max() for block in blocks)
            minimum, maximum = plain_number(low.item()), plain_number(high.item())
            distinct, counts = _counted(blocks, low, high)
            total += int(counts.sum())
            best = _largest(counts, limit)
            named = map(plain_number, distinct[best].tolist())
            counted += zip(named, counts[best].tolist(), strict=True)
    listed = heapq.nsmallest(limit, counted, key=lambda pair: (-pair[1], _rank(pair[0])))
    other = total - sum(count for _, count in listed)
    return FacetCounts(tuple(listed), other, minimum, maximum)


def _keyword_counts(keywords: KeywordColumn, items: CountedItems) -> NDArray[np.int64]:
    if 2 * items.count > len(items.mask):  # the others are fewer, and all items are counted already
        every = keywords.counts.array
        counts = -_keyword_counts(keywords, items.others)
        counts[: len(every)] += every
        return counts
    counts = np.zeros(STRINGS + keywords.strings_known, np.int64)
    blocks = keywords.codes.among(items.rows, items.mask)
    # For many distinct values, one long array is counted faster than many short ones.
    for codes in blocks if len(counts) < _MANY else [np.concatenate([counts[:0], *blocks])]:
        counts += np.bincount(codes, minlength=len(counts))
    return counts


def values_of_rows(
    fields: ItemFields, name: str, rows: NDArray[np.int64]
) -> list[tuple[int, FacetValue]]:
    """Return pairs of place and value of a field, for item rows that are ascending and distinct."""
    columns = fields.columns_of(name)
    pairs: list[tuple[int, FacetValue]] = []
    if (keywords := columns.keywords) is not None:
        places, codes = keywords.codes.pairs_of(rows)
        is_value = codes != Special.OBJECT.value
        places, codes = places[is_value], codes[is_value]
        pairs += zip(places.tolist(), _json_values(keywords, codes.astype(np.int64)), strict=True)
    if (numbers := columns.numbers) is not None:
        places, values = numbers.pairs_of(rows)
        pairs += zip(places.tolist(), map(plain_number, values.tolist()), strict=True)
    return pairs


def _largest(
    counts: NDArray[np.int64], limit: int, keywords: KeywordColumn | None = None
) -> NDArray[np.int64]:
    """Return the places of the largest counts above 0, of equal ones the first in order.

    The order is that of the places, or of the keywords whose codes they are.
    """
    at = np.flatnonzero(counts)
    if len(at) <= limit:
        return at
    least = np.partition(counts[at], len(at) - limit)[len(at) - limit]
    larger, tied = np.flatnonzero(counts > least), np.flatnonzero(counts == least)
    if keywords is not None:
        tied = tied[np.argsort(keywords.sort_keys().of_codes[tied])]
    return np.concatenate([larger, tied[: limit - len(larger)]])


def _counted(
    blocks: Sequence[NDArray[Any]], low: Any, high: Any
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the distinct numbers of some arrays, ascending, and how often each occurs.

    Whole numbers and those of two decimals are counted by their place in an array, which takes a
    tenth of the time of sorting them.
    """
    # Floats do not distinguish all integers beyond 2^53; the numbers as stored do.
    is_small = not isinstance(low, complex) and max(abs(low), abs(high)) < 2**53
    for step in (1, 100) if is_small else ():
        if (high - low) * step >= _MAX_SPAN:
            break
        first = round(low * step)
        counts = np.zeros(round(high * step) - first + 1, np.int64)
        for block in blocks:
            scaled = np.rint(block * step)
            if not np.array_equal(scaled / step, block):
                break
            counts += np.bincount((scaled - first).astype(np.int64), minlength=len(counts))
        else:
            at = np.flatnonzero(counts)
            return (at + first) / step, counts[at]
    distinct, counts = np.unique(np.concatenate(blocks), return_counts=True)
    return distinct, counts


def _json_values(column: KeywordColumn, codes: NDArray[np.int64]) -> list[FacetValue]:
    values = [column.keyword(code) for code in codes.tolist()]
    return [_JSON[value] if isinstance(value, Special) else value for value in values]


def _rank(value: FacetValue) -> tuple[int, Any]:
    if value is None:
        return 3, 0
    if isinstance(value, bool):
        return 2, value
    return (1, value) if isinstance(value, str) else (0, value)
