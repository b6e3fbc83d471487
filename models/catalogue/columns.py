"""Typed columns of item fields, which filters, facets and sorting read.

Columns are frozen, and updated by copy-on-write. A field has up to three: keywords (strings,
booleans, null), numbers and points. They are filled when items are added, so that no request builds
one: 4 bytes an item for strings, 8 for numbers, 16 for points, as much again if many items have a
second value, and only the values themselves if few items have any.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.catalogue.cow import CowArray
from models.catalogue.item_values import FieldValues, Keyword, Special, exact_number
from models.compute.checkpoint import checkpoint
from models.data.vocabulary import Vocabulary

T = TypeVar("T", bound=np.generic)

_SPARSE = 16  # values that fewer than one in this many rows has are held as pairs of row and value
_MOST_DENSE = 4  # arrays of a value for every row
_FEW = 16  # rows that are looked for one by one among the extras
_BLOCK = 1 << 16  # values at a time: larger temporary arrays cost more in new pages than in work
_GLANCE = 1 << 12  # values at a time where the first ones mostly decide
_DEAD = 1_000  # extras that are no longer of a row, before they are left out


@dataclass(frozen=True, slots=True, eq=False)
class ValueColumn(Generic[T]):
    """A frozen column; `updated` returns the next version.

    The first value of a row stands in `dense[0]`, the second in `dense[1]`, as long as many rows
    have that many values; further ones are extras, pairs of row and value. Rows behind the end of
    such an array have no value in it, so that a catalogue grows without an update of its columns.
    """

    dense: tuple[CowArray[T], ...]  # each [≤ N]
    extra_rows: CowArray[np.int32]  # [E]
    extra_values: CowArray[T]  # [E]
    missing: Any  # stands for no value, and in the extras for one that was removed; 0, NaN, …
    dead: int = 0  # extras that were removed

    @classmethod
    def empty(cls, dtype: type[T], missing: Any) -> ValueColumn[T]:
        return cls((), CowArray(np.zeros(0, np.int32)), CowArray(np.zeros(0, dtype)), missing)

    @classmethod
    def of(cls, values: NDArray[T], missing: Any) -> ValueColumn[T]:
        """Return a column of at most one value a row [n]."""
        none = CowArray(np.zeros(0, np.int32))
        return cls((CowArray(values),), none, CowArray(values[:0]), missing)

    @property
    def dtype(self) -> np.dtype[T]:
        return self.extra_values.array.dtype

    @property
    def has_nan(self) -> bool:
        """Report whether `missing` is NaN, which meets no comparison."""
        return bool(self.missing != self.missing)

    def filled(self, values: NDArray[T]) -> NDArray[np.bool_]:
        """Mark the values that are not `missing`, bool of the shape of `values`."""
        present: NDArray[np.bool_] = values != self.missing
        return ~np.isnan(values) if self.has_nan else present

    def holding(self, dtype: type[np.generic]) -> ValueColumn[Any]:
        """Return this column with values of a wider type."""
        if self.dtype == dtype:
            return self
        dense = tuple(CowArray(part.array.astype(dtype)) for part in self.dense)
        extra_values = CowArray(self.extra_values.array.astype(dtype))
        return replace(self, dense=dense, extra_values=extra_values)

    def has_values(self) -> bool:
        return any(
            bool(self.filled(part.array[begin : begin + _GLANCE]).any())
            for part in (*self.dense, self.extra_values)
            for begin in range(0, len(part), _GLANCE)
        )

    def values_of(self, rows: NDArray[np.int64], extras: NDArray[np.int64]) -> NDArray[T]:
        """Return all values of distinct rows, unordered; `extras` is from `extras_of` of these."""
        parts = [part.array[rows[rows < len(part)]] for part in self.dense]
        values = np.concatenate([*parts, self.extra_values.array[extras]])
        return values[self.filled(values)]

    def extras_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of the extras of some rows."""
        extra_rows = self.extra_rows.array
        if not len(extra_rows):
            return np.zeros(0, np.int64)
        if len(rows) <= _FEW:
            return np.concatenate([np.flatnonzero(extra_rows == row) for row in rows] or [rows])
        sought = np.zeros(max(int(extra_rows.max()), int(rows.max())) + 1, np.bool_)
        sought[rows] = True
        return np.flatnonzero(sought[extra_rows])

    def pairs_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[T]]:
        """Return all values of ascending, distinct rows [n], and the places of their rows."""
        extras = self.extras_of(rows)
        places = [np.searchsorted(rows, self.extra_rows.array[extras])]
        values = [self.extra_values.array[extras]]
        for part in self.dense:
            places.append(np.arange(int(np.searchsorted(rows, len(part)))))
            values.append(part.array[rows[places[-1]]])
        place, value = np.concatenate(places), np.concatenate(values)
        filled = self.filled(value)
        return place[filled], value[filled]

    def updated(
        self,
        rows: NDArray[np.int64],
        owners: NDArray[np.int64],
        values: NDArray[T],
        size: int,
        extras: NDArray[np.int64] | None = None,
    ) -> ValueColumn[T]:
        """Return this column after some rows got other values in place of theirs.

        Args:
            rows: that change [c], ascending and distinct.
            owners: the row of each new value [m], ascending; each is one of `rows`.
            values: new values [m], no two of one row the same.
            size: N, the number of rows of the catalogue.
            extras: what `extras_of` returns for the rows, where it is known.
        """
        extras = self.extras_of(rows) if extras is None else extras
        _, place, inverse = np.unique(owners, return_index=True, return_inverse=True)
        number = np.arange(len(owners)) - place[inverse]  # of each value among those of its row
        dense = []
        for at, part in enumerate(self.dense):
            chosen = number == at
            given = np.full(len(rows), self.missing, self.dtype)
            given[np.searchsorted(rows, owners[chosen])] = values[chosen]
            # Rows behind the end stay there, unless they have a value.
            end = max(len(part), int(owners[chosen].max(initial=-1)) + 1)
            more = np.full(end - len(part), self.missing, self.dtype)
            inside, new = rows < len(part), (rows >= len(part)) & (rows < end)
            more[rows[new] - len(part)] = given[new]
            dense.append(part.updated(rows[inside], given[inside], more))
        rest = number >= len(dense)
        updated = replace(self, dense=tuple(dense))
        return updated._with_extras(extras, owners[rest], values[rest])._condensed(size)  # noqa: SLF001

    def mask(
        self,
        holds: Callable[[NDArray[T]], NDArray[np.bool_]],
        size: int,
        rows: NDArray[np.int64] | None = None,
    ) -> NDArray[np.bool_]:
        """Mark the rows with a value that meets a condition, bool [size].

        `holds` maps values [n] to bool [n], false for `missing`. With `rows` [m], ascending, only
        these are looked at, and the result is bool [m].
        """
        if rows is not None:
            return self._mask_of(rows, holds, size)
        inside = np.zeros(size, np.bool_)
        for part in self.dense:
            for begin in range(0, len(part), _BLOCK):
                checkpoint()
                block = part.array[begin : begin + _BLOCK]
                inside[begin : begin + len(block)] |= holds(block)
        for begin in range(0, len(self.extra_rows), _BLOCK):
            held = np.flatnonzero(holds(self.extra_values.array[begin : begin + _BLOCK]))
            inside[self.extra_rows.array[begin : begin + _BLOCK].take(held)] = True
        return inside

    def _mask_of(
        self, rows: NDArray[np.int64], holds: Callable[[NDArray[T]], NDArray[np.bool_]], size: int
    ) -> NDArray[np.bool_]:
        inside = np.zeros(len(rows), np.bool_)
        for part in self.dense:
            held = rows[: np.searchsorted(rows, len(part))]
            inside[: len(held)] |= holds(part.array.take(held))
        if len(self.extra_rows):
            sought = np.zeros(size, np.bool_)
            sought[rows] = True
            chosen = np.flatnonzero(sought.take(self.extra_rows.array))
            chosen = chosen[holds(self.extra_values.array.take(chosen))]
            inside[np.searchsorted(rows, self.extra_rows.array.take(chosen))] = True
        return inside

    def among(self, rows: NDArray[np.int64], mask: NDArray[np.bool_]) -> Iterator[NDArray[T]]:
        """Yield the values of marked rows in blocks, unordered, `missing` among them.

        `rows` are the marked rows of `mask` [N], ascending.
        """
        for part in self.dense:
            held = rows[: np.searchsorted(rows, len(part))]
            for begin in range(0, len(held), _BLOCK):
                block = held[begin : begin + _BLOCK]
                start, end = int(block[0]), int(block[-1]) + 1
                # If all rows are marked, nothing need be copied.
                is_whole = end - start == len(block)
                yield part.array[start:end] if is_whole else part.array.take(block)
        for begin in range(0, len(self.extra_rows), _BLOCK):
            marked = mask.take(self.extra_rows.array[begin : begin + _BLOCK])
            values = self.extra_values.array[begin : begin + _BLOCK]
            yield np.where(marked, values, np.asarray(self.missing, values.dtype))

    def smallest(
        self, rows: NDArray[np.int64], key: Callable[[NDArray[T]], NDArray[Any]], size: int
    ) -> NDArray[Any]:
        """Return the smallest key of the values of each of some rows [n]; infinity without a value.

        `key` maps values [m] to float64 or complex128 [m], and `missing` to infinity.
        """
        keys = np.full(len(rows), np.inf, key(self.extra_values.array[:0]).dtype)
        for part in self.dense:
            for begin in range(0, len(rows) if len(part) else 0, _BLOCK):
                block = rows[begin : begin + _BLOCK]
                of_block = key(part.array.take(block, mode="clip"))
                of_block[block >= len(part)] = np.inf
                least = keys[begin : begin + _BLOCK]
                np.minimum(least, of_block, out=least)
        if len(self.extra_rows):
            places = np.full(size, -1)
            places[rows] = np.arange(len(rows))
            place = places.take(self.extra_rows.array)
            chosen = np.flatnonzero(place >= 0)
            np.minimum.at(keys, place[chosen], key(self.extra_values.array.take(chosen)))
        return keys

    def _condensed(self, size: int) -> ValueColumn[T]:
        """Move the first extra of each row to an array of all rows, while many rows have extras."""
        column = self
        while len(column.dense) < _MOST_DENSE and len(column.extra_rows) * _SPARSE >= size:
            live = np.flatnonzero(self.filled(column.extra_values.array))
            rows, values = column.extra_rows.array[live], column.extra_values.array[live]
            having = np.zeros(size, np.bool_)
            having[rows] = True
            if not len(rows) or np.count_nonzero(having) * _SPARSE < size:
                break
            at, place = np.unique(rows, return_index=True)
            firsts = np.full(size, self.missing, self.dtype)
            firsts[at] = values[place]
            rest = np.ones(len(rows), np.bool_)
            rest[place] = False
            dense = (*column.dense, CowArray(firsts))
            column = ValueColumn(dense, CowArray(rows[rest]), CowArray(values[rest]), self.missing)
        return column

    def _with_extras(
        self, removed: NDArray[np.int64], owners: NDArray[np.int64], values: NDArray[T]
    ) -> ValueColumn[T]:
        """Return this column without the extras at some places, and with others."""
        if not len(removed) and not len(values):
            return self
        gone = np.full(len(removed), self.missing, values.dtype)
        dead = self.dead + int(np.count_nonzero(self.filled(self.extra_values.array[removed])))
        extra_rows = self.extra_rows.extended(owners.astype(np.int32))
        extra_values = self.extra_values.updated(removed, gone, values)
        if dead > _DEAD and 2 * dead > len(extra_rows):
            live = self.filled(extra_values.array)
            extra_rows = CowArray(extra_rows.array[live])
            extra_values, dead = CowArray(extra_values.array[live]), 0
        return replace(self, extra_rows=extra_rows, extra_values=extra_values, dead=dead)


def distinct_pairs(
    owners: NDArray[np.int64], values: NDArray[T]
) -> tuple[NDArray[np.int64], NDArray[T]]:
    """Return pairs of row and value by rising row, without repetitions."""
    order = np.lexsort((values, owners))
    owners, values = owners[order], values[order]
    new = np.ones(len(owners), np.bool_)
    new[1:] = (owners[1:] != owners[:-1]) | (values[1:] != values[:-1])
    return owners[new], values[new]


class Ranks(NamedTuple):
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
    """Keeps the strings of one vocabulary in order.

    The first ranks take a second for a million strings; later strings are merged into the order in
    some milliseconds. The order of two strings never changes, so that later ranks serve earlier
    versions.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._ranks = Ranks(vocabulary, np.zeros(0, np.int32), np.zeros(0, np.int32))

    def ranks(self, count: int) -> Ranks:
        """Return ranks of the first `count` strings, or of more."""
        with self._lock:
            if len(self._ranks.order) < count:
                self._ranks = self._extended()
            return self._ranks

    def _extended(self) -> Ranks:
        order, ids = self._ranks.order, self._vocabulary.ids
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


_FOLDED_BLOCK = 4_096  # strings that are searched in one call, in some tenths of a millisecond


class FoldedStrings:
    """Case-folded strings, folded when a search first needs them and kept."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # Whole ones, which never change, by number: searches on several threads fold them.
        self._blocks: dict[int, tuple[str, list[int]]] = {}

    def containing(self, part: str, count: int) -> NDArray[np.bool_]:
        """Mark which of the first `count` strings contain another, in upper or lower case."""
        # A block that a newer catalogue has completed holds more strings than `count`.
        matches, part = np.zeros(count + _FOLDED_BLOCK, np.bool_), part.casefold()
        for first in range(0, count, _FOLDED_BLOCK):
            checkpoint()
            text, starts = self._block(first, count)
            at = text.find(part)
            while at >= 0:
                place = bisect_right(starts, at) - 1
                end = starts[place + 1] - 1 if place + 1 < len(starts) else len(text)
                if at + len(part) <= end:  # not across two strings
                    matches[first + place] = True
                    at = end
                at = text.find(part, at + 1)
        return matches[:count]

    def _block(self, first: int, count: int) -> tuple[str, list[int]]:
        """Return the strings of a block, a line each, and where each starts."""
        number = first // _FOLDED_BLOCK
        block = self._blocks.get(number)
        if block is not None:
            return block
        last = min(first + _FOLDED_BLOCK, count)
        strings = [text.casefold() for text in self._vocabulary.ids[first:last]]
        starts = list(accumulate((len(text) + 1 for text in strings[:-1]), initial=0))
        block = ("\n".join(strings), starts)
        if len(strings) == _FOLDED_BLOCK:
            self._blocks[number] = block
        return block


STRINGS = 5  # code of the first string; before it stand no value, 0, and the specials
_BEHIND_STRINGS = 2.0**40  # more than the rank of any string
_SHORT = 1 << 16  # codes that take two bytes each; where there are more, all take four
_STRING_BLOCK = 16_384  # strings between two checkpoints
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
        return cls.of(ValueColumn.empty(np.uint16, 0), (), CowArray(np.zeros(0, np.int32)))

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
        """Return this column after rows [c], ascending and distinct, got other values."""
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
        return bool(self.counts.array[STRINGS:].any())

    def strings(self) -> list[str]:
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
            is_wanted: NDArray[np.bool_] = codes == first
            for code in others:
                is_wanted |= codes == code
            return is_wanted

        return holds

    def meets(
        self, condition: Callable[[str], bool]
    ) -> Callable[[NDArray[Any]], NDArray[np.bool_]]:
        """Return the condition that a string meets another one, called once a distinct string."""
        table = np.zeros(len(self.counts), np.bool_)
        ids = self.vocabulary.ids
        for begin in range(0, self.strings_known, _STRING_BLOCK):
            checkpoint()
            end = min(begin + _STRING_BLOCK, self.strings_known)
            table[STRINGS + begin : STRINGS + end] = [condition(one) for one in ids[begin:end]]
        return table.take

    def contains(self, part: str) -> Callable[[NDArray[Any]], NDArray[np.bool_]]:
        """Return the condition that a string contains another, in upper or lower case."""
        table = np.zeros(len(self.counts), np.bool_)
        table[STRINGS:] = self.folded.containing(part, self.strings_known)
        return table.take

    def sort_keys(self) -> SortKeys:
        count = self.strings_known
        ranks = self.order.ranks(count)
        keys = np.full(STRINGS + count, np.inf)
        keys[STRINGS:] = ranks.ranks[:count]
        keys[Special.FALSE.value], keys[Special.TRUE.value] = _BEHIND_STRINGS, _BEHIND_STRINGS + 1
        return SortKeys(keys, ranks)


NO_NUMBER, NO_POINT = float("nan"), complex("nan")


@dataclass(frozen=True, slots=True, eq=False)
class FieldColumns:
    """The values of one field by type; None where no item ever had one of that type."""

    keywords: KeywordColumn | None = None
    # float64; complex128 once an integer is not exact as a float (see `exact_number`); int64 for
    # `published_at`.
    numbers: ValueColumn[Any] | None = None
    points: ValueColumn[np.complex128] | None = None

    def updated(self, rows: NDArray[np.int64], new: FieldValues, size: int) -> FieldColumns:
        """Return these columns after rows [c], ascending, got other values; `size` is N."""
        keywords, numbers, points = self.keywords, self.numbers, self.points
        if keywords is not None or new.keywords:
            keywords = keywords or KeywordColumn.empty()
            keywords = keywords.updated(rows, new.keyword_rows, new.keywords, size)
        if numbers is not None or new.numbers:
            numbers = numbers or ValueColumn.empty(np.float64, NO_NUMBER)
            owners, values = np.array(new.number_rows, np.int64), _numbers(new.numbers)
            numbers = numbers.holding(np.result_type(numbers.dtype, values.dtype).type)
            values = values.astype(numbers.dtype, copy=False)
            numbers = numbers.updated(rows, *distinct_pairs(owners, values), size)
        if points is not None or new.points:
            points = points or ValueColumn.empty(np.complex128, NO_POINT)
            owners, places = np.array(new.point_rows, np.int64), np.array(new.points, np.complex128)
            points = points.updated(rows, *distinct_pairs(owners, places), size)
        return FieldColumns(keywords, numbers, points)

    def exists(self, size: int, rows: NDArray[np.int64] | None = None) -> NDArray[np.bool_]:
        """Mark the rows that have a value as `ValueColumn.mask` does; null is a value."""
        inside = np.zeros(size if rows is None else len(rows), np.bool_)
        if self.keywords is not None:
            inside |= self.keywords.codes.mask(self.keywords.codes.filled, size, rows)
        if self.numbers is not None:
            inside |= self.numbers.mask(self.numbers.filled, size, rows)
        return inside  # a point is also an object, which is a keyword


def _numbers(numbers: list[float]) -> NDArray[Any]:
    values = np.array(numbers, np.float64)
    # All integers below 2^53 are exact floats.
    if (np.abs(values) >= 2.0**53).any():
        return np.array([exact_number(number) for number in numbers])
    return values


def updated_columns(
    columns: Mapping[str, FieldColumns],
    old: Mapping[str, Collection[int]],
    new: Mapping[str, FieldValues],
    size: int,
) -> dict[str, FieldColumns]:
    """Return the columns of all fields after items changed.

    `old` are the rows that may have had values before, by field; `new` are all values of these, and
    of rows that had none.
    """
    updated, none = dict(columns), FieldValues()
    for name in old.keys() | new.keys():
        given = new.get(name, none)
        changed = {*given.keyword_rows, *given.number_rows, *old.get(name, ())}
        rows = np.array(sorted(changed), np.int64)
        updated[name] = updated.get(name, FieldColumns()).updated(rows, given, size)
    return updated


NEVER = np.iinfo(np.int64).min  # published_at of items without one


@dataclass(frozen=True, slots=True, eq=False)
class ItemFields:
    """Fields by name: `item_id`, `published_at`, and those that have columns."""

    size: int  # N
    vocabulary: Vocabulary  # of ids; may have grown past N
    id_order: StringOrder  # of the vocabulary
    published: NDArray[np.int64]  # [N] microseconds UTC, or `NEVER`
    columns: Mapping[str, FieldColumns]  # of the other fields

    def columns_of(self, name: str) -> FieldColumns:
        """Return the columns of a field other than `item_id`; empty ones if no item has it."""
        if name == "published_at":
            return FieldColumns(numbers=ValueColumn.of(self.published, NEVER))
        return self.columns.get(name, FieldColumns())

    def id_ranks(self) -> Ranks:
        return self.id_order.ranks(self.size)
