"""Order of items by the values of their fields, a page at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.catalogue.columns import ItemFields, ValueColumn
from models.catalogue.item_values import Special, exact_number, keyword_of, plain_number

_Keys = NDArray[np.float64]
_STEP = 64  # one in this many keys is in a sample
_SAMPLED = 256  # keys in a sample, at least


@dataclass(frozen=True, slots=True)
class SortKey:
    """A field that items are ordered by. Items without a value in it come last either way."""

    field: str
    descending: bool = False


class SortedValue(NamedTuple):
    """The values that an item is ordered by in one field; None without one of a type."""

    number: float | None
    keyword: str | bool | None


@dataclass(frozen=True, slots=True)
class SortPosition:
    """The place of an item in an order, which stays one when items come and go."""

    values: tuple[SortedValue, ...]  # for each key
    item_id: str


def sorted_rows(
    fields: ItemFields,
    rows: NDArray[np.int64],
    keys: Sequence[SortKey],
    *,
    limit: int,
    offset: int = 0,
    after: SortPosition | None = None,
) -> NDArray[np.int64]:
    """Return a page of rows [≤ limit] in the order of their fields.

    The smallest of several values of an item counts, descending the largest. Numbers come before
    strings by code point, false and true; descending it is the reverse. Items that tie in all keys
    are in the order of their ids. With `after`, only rows behind this position are returned.
    """
    by_key = [*(_orders(fields, key) for key in keys), [_order_of_ids(fields)]]
    orders = [order for orders in by_key for order in orders]
    if after is not None:
        values = (*after.values, SortedValue(None, after.item_id))
        places = [
            order.place(value)
            for orders, value in zip(by_key, values, strict=True)
            for order in orders
        ]
        rows = _behind(rows, orders, places)
    return _first(rows, orders, offset + limit)[offset:]


def position(fields: ItemFields, row: int, keys: Sequence[SortKey]) -> SortPosition:
    values = tuple(_value(fields, row, key) for key in keys)
    return SortPosition(values, fields.vocabulary.id(row))


class _Order(NamedTuple):
    """One array of keys, computed for the rows that need it; infinity for no value."""

    keys: Callable[[NDArray[np.int64]], _Keys]  # rows [n] -> [n], smaller first
    place: Callable[[SortedValue], float]  # the key of a value


def _orders(fields: ItemFields, key: SortKey) -> list[_Order]:
    """Return the orders that a field is sorted by in turn: of numbers, of keywords."""
    size, sign = fields.size, -1.0 if key.descending else 1.0
    if key.field == "item_id":
        return [_order_of_ids(fields, sign)]
    columns, orders = fields.columns_of(key.field), list[_Order]()
    by_number = [] if columns.numbers is None else _orders_of_numbers(columns.numbers, size, sign)
    if (keywords := columns.keywords) is not None:
        keys = keywords.sort_keys()
        table = np.where(np.isfinite(keys.of_codes), sign * keys.of_codes, np.inf)

        def keyword_place(value: SortedValue) -> float:
            place = keys.place(keyword_of(value.keyword))
            return sign * place if np.isfinite(place) else np.inf

        orders.append(
            _Order(lambda rows: keywords.codes.smallest(rows, table.take, size), keyword_place)
        )
    return [*orders, *by_number] if key.descending else [*by_number, *orders]


def _orders_of_numbers(numbers: ValueColumn[Any], size: int, sign: float) -> list[_Order]:
    """Return the orders of the numbers as floats and, for inexact ones, of their remainders."""
    is_exact = numbers.dtype == np.complex128

    def keys_of(values: NDArray[Any]) -> NDArray[Any]:
        keys = values.astype(np.complex128 if is_exact else np.float64)
        keys = np.negative(keys) if sign < 0 else keys
        keys[~numbers.filled(values)] = np.inf
        return keys

    def place(value: SortedValue) -> complex:
        return np.inf if value.number is None else sign * exact_number(value.number)

    def smallest(rows: NDArray[np.int64]) -> NDArray[Any]:
        return numbers.smallest(rows, keys_of, size)

    orders = [_Order(lambda rows: smallest(rows).real, lambda value: place(value).real)]
    if is_exact:
        orders.append(_Order(lambda rows: smallest(rows).imag, lambda value: place(value).imag))
    return orders


def _order_of_ids(fields: ItemFields, sign: float = 1.0) -> _Order:
    ranks = fields.id_ranks()
    return _Order(
        lambda rows: sign * ranks.ranks[rows].astype(np.float64),
        lambda value: sign * ranks.place(str(value.keyword)),
    )


def _value(fields: ItemFields, row: int, key: SortKey) -> SortedValue:
    if key.field == "item_id":
        return SortedValue(None, fields.vocabulary.id(row))
    columns, at = fields.columns_of(key.field), np.array([row])
    choose = max if key.descending else min
    number = keyword = None
    if columns.numbers is not None:
        numbers = columns.numbers.values_of(at, columns.numbers.extras_of(at)).tolist()
        number = choose(map(plain_number, numbers), default=None)
    if columns.keywords is not None:
        codes = columns.keywords.codes
        own = codes.values_of(at, codes.extras_of(at)).tolist()
        found = [columns.keywords.keyword(code) for code in own]
        found = [each for each in found if each not in {Special.NULL, Special.OBJECT}]
        flags = [each is Special.TRUE for each in found if isinstance(each, Special)]
        texts = [each for each in found if isinstance(each, str)]
        # Booleans come behind all strings.
        groups: list[Sequence[str | bool]] = [flags, texts] if key.descending else [texts, flags]
        keyword = next((choose(group) for group in groups if group), None)
    return SortedValue(number, keyword)


def _behind(
    rows: NDArray[np.int64], orders: Sequence[_Order], places: Sequence[float]
) -> NDArray[np.int64]:
    behind = np.zeros(len(rows), np.bool_)
    tied = np.arange(len(rows))  # in all keys so far
    for order, place in zip(orders, places, strict=True):
        keys = order.keys(rows[tied])
        behind[tied[keys > place]] = True
        tied = tied[keys == place]
    return rows[behind]


def _first(rows: NDArray[np.int64], orders: Sequence[_Order], count: int) -> NDArray[np.int64]:
    """Return the first rows [≤ count] in lexicographic order of their keys.

    Later keys are computed only for rows that tie in the earlier ones at the end of the page.
    """
    chosen, tied = [rows[:0]], rows
    for order in orders:
        left = count - sum(map(len, chosen))
        if len(tied) <= left or not left:
            break
        keys = order.keys(tied)
        last = _nth(keys, left)
        chosen.append(tied[keys < last])
        tied = tied[keys == last]
    page = np.concatenate([*chosen, tied])
    return page[np.lexsort([order.keys(page) for order in reversed(orders)])][:count]


def _nth(keys: _Keys, count: int) -> float:
    """Return the `count`-th smallest key, counted from 1.

    If there are many keys, a sample says which few can be among the smallest.
    """
    if len(keys) > _SAMPLED * _STEP:
        sample = np.sort(keys[::_STEP])
        bound = sample[min(len(sample) - 1, 2 * (count // _STEP) + 8)]
        few = keys[keys <= bound]
        if len(few) >= count:
            keys = few
    return float(np.partition(keys, count - 1)[count - 1])
