"""Columns of keywords: codes of strings, their order, and their folded forms."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.catalogue.cow_columns import CowArray
from models.catalogue.fields.item_values import Keyword, Special
from models.catalogue.fields.value_column import ValueColumn, distinct_pairs
from models.compute.checkpoint import checkpoint
from models.data.vocabulary import Vocabulary

_SEARCHED = 4_096  # strings that are searched in one call, in some tenths of a millisecond


class FoldedStrings:
    """Case-folded strings, folded when a search first needs them and kept."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # Whole ones, which never change, by number: searches on several threads fold them.
        self._blocks: dict[int, tuple[str, list[int]]] = {}

    def containing(self, part: str, count: int) -> NDArray[np.bool_]:
        """Mark which of the first `count` strings contain another, in upper or lower case."""
        # A block that a newer catalogue has completed holds more strings than `count`.
        found, part = np.zeros(count + _SEARCHED, np.bool_), part.casefold()
        for first in range(0, count, _SEARCHED):
            checkpoint()
            text, starts = self._block(first, count)
            at = text.find(part)
            while at >= 0:
                place = bisect_right(starts, at) - 1
                end = starts[place + 1] - 1 if place + 1 < len(starts) else len(text)
                if at + len(part) <= end:  # not across two strings
                    found[first + place] = True
                    at = end
                at = text.find(part, at + 1)
        return found[:count]

    def _block(self, first: int, count: int) -> tuple[str, list[int]]:
        """Return the strings of a block, a line each, and where each starts."""
        number = first // _SEARCHED
        block = self._blocks.get(number)
        if block is not None:
            return block
        last = min(first + _SEARCHED, count)
        strings = [one.casefold() for one in self._vocabulary.ids[first:last]]
        starts = list(accumulate((len(one) + 1 for one in strings[:-1]), initial=0))
        block = ("\n".join(strings), starts)
        if len(strings) == _SEARCHED:
            self._blocks[number] = block
        return block


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


STRINGS = 5  # code of the first string; before it stand no value, 0, and the specials
_BEHIND_STRINGS = 2.0**40  # more than the rank of any string
_SHORT = 1 << 16  # codes that take two bytes each; where there are more, all take four
_BLOCK = 16_384  # strings between two checkpoints
_COMPARED = 8  # codes that are compared one after the other; more are looked up in a table


class SortKeys(NamedTuple):
    """Keys by which values are sorted: strings by code point, then false, then true."""

    of_codes: NDArray[np.float64]  # infinity for no value, null and objects
    ranks: Ranks

    def place(self, value: Keyword) -> float:
        """Return the key of a value; between two keys for a string that no item has."""
        if isinstance(value, Special):
            return float(self.of_codes[value.value])
        return self.ranks.place(value)


@dataclass(frozen=True, slots=True, eq=False)
class KeywordColumn:
    """A frozen column; `updated` returns the next version.

    All versions share the vocabulary, which only grows: a code never changes its meaning.
    """

    codes: ValueColumn[Any]  # uint16, or int32 from `_SHORT` codes on
    vocabulary: Vocabulary
    order: StringOrder
    folded: FoldedStrings
    counts: CowArray[np.int32]  # [≤ codes] items that have each code

    @classmethod
    def empty(cls) -> KeywordColumn:
        """Return a column without values."""
        vocabulary = Vocabulary()
        counts = CowArray(np.zeros(0, np.int32))
        codes = ValueColumn.empty(np.uint16, 0)
        return cls(codes, vocabulary, StringOrder(vocabulary), FoldedStrings(vocabulary), counts)

    @classmethod
    def of(
        cls, codes: ValueColumn[Any], strings: Iterable[str], counts: CowArray[np.int32]
    ) -> KeywordColumn:
        """Return a column of these codes, of distinct strings in the order of their codes."""
        vocabulary = Vocabulary(strings)
        return cls(codes, vocabulary, StringOrder(vocabulary), FoldedStrings(vocabulary), counts)

    def updated(
        self, rows: NDArray[np.int64], owners: Sequence[int], values: Sequence[Keyword], size: int
    ) -> KeywordColumn:
        """Return this column after some rows got other values in place of theirs.

        Args:
            rows: that change [c], ascending and distinct.
            owners: the row of each new value.
            values: as many new values.
            size: N, the number of rows of the catalogue.
        """
        add = self.vocabulary.add
        coded = [STRINGS + add(one) if isinstance(one, str) else one.value for one in values]
        many = STRINGS + len(self.vocabulary) > _SHORT or self.codes.dtype == np.int32
        column = self.codes.holding(np.int32 if many else np.uint16)
        at, won = distinct_pairs(np.array(owners, np.int64), np.array(coded, column.dtype))
        extras = column.extras_of(rows)
        lost = column.values_of(rows, extras).astype(np.int64)
        codes, places = np.unique(np.concatenate([lost, won]), return_inverse=True)
        signs = np.repeat([-1.0, 1.0], [len(lost), len(won)])
        change = np.bincount(places, signs, len(codes)).astype(np.int32)
        known = codes < len(self.counts)
        more = np.zeros(max(0, STRINGS + len(self.vocabulary) - len(self.counts)), np.int32)
        more[codes[~known] - len(self.counts)] = change[~known]
        counted = self.counts.array[codes[known]] + change[known]
        return replace(
            self,
            codes=column.updated(rows, at, won, size, extras),
            counts=self.counts.updated(codes[known], counted, more),
        )

    def code(self, value: Keyword) -> int:
        """Return the code of a value that an item has, or 0."""
        if isinstance(value, Special):
            code = value.value
        else:
            row = self.vocabulary.row(value)
            code = STRINGS + row if row >= 0 else 0
        return code if 0 < code < len(self.counts) and self.counts.array[code] else 0

    def keyword(self, code: int) -> Keyword:
        """Return the value of a code above 0."""
        return self.vocabulary.id(code - STRINGS) if code >= STRINGS else Special(code)

    @property
    def strings_known(self) -> int:
        """Number of strings that have codes, whether an item still has them or not."""
        return max(0, len(self.counts) - STRINGS)

    @property
    def has_strings(self) -> bool:
        """Report whether some item has a string."""
        return bool(self.counts.array[STRINGS:].any())

    def strings(self) -> list[str]:
        """Return the strings that some item has."""
        ids = self.vocabulary.ids
        return [ids[at] for at in np.flatnonzero(self.counts.array[STRINGS:]).tolist()]

    def is_any(self, values: Iterable[Keyword]) -> Callable[[NDArray[Any]], NDArray[np.bool_]]:
        """Return the condition of `ValueColumn.mask` that a value is one of these."""
        wanted = sorted({code for value in values if (code := self.code(value))})
        if len(wanted) > _COMPARED:
            table = np.zeros(len(self.counts), np.bool_)
            table[wanted] = True
            return table.take
        if not wanted:
            return lambda codes: np.zeros(len(codes), np.bool_)
        first, *others = wanted

        def holds(codes: NDArray[Any]) -> NDArray[np.bool_]:
            found: NDArray[np.bool_] = codes == first
            for code in others:
                found |= codes == code
            return found

        return holds

    def meets(
        self, condition: Callable[[str], bool]
    ) -> Callable[[NDArray[Any]], NDArray[np.bool_]]:
        """Return the condition of `ValueColumn.mask` that a string meets another one.

        It is called once for each distinct string, not for each item.
        """
        table = np.zeros(len(self.counts), np.bool_)
        ids = self.vocabulary.ids
        for begin in range(0, self.strings_known, _BLOCK):
            checkpoint()
            end = min(begin + _BLOCK, self.strings_known)
            table[STRINGS + begin : STRINGS + end] = [condition(one) for one in ids[begin:end]]
        return table.take

    def contains(self, part: str) -> Callable[[NDArray[Any]], NDArray[np.bool_]]:
        """Return the condition that a string contains another, in upper or lower case."""
        table = np.zeros(len(self.counts), np.bool_)
        table[STRINGS:] = self.folded.containing(part, self.strings_known)
        return table.take

    def sort_keys(self) -> SortKeys:
        """Return the keys that values are sorted by."""
        count = self.strings_known
        ranks = self.order.ranks(count)
        keys = np.full(STRINGS + count, np.inf)
        keys[STRINGS:] = ranks.ranks[:count]
        keys[Special.FALSE.value], keys[Special.TRUE.value] = _BEHIND_STRINGS, _BEHIND_STRINGS + 1
        return SortKeys(keys, ranks)
