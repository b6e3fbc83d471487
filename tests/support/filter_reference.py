"""Filters, facets and orders of items by plain loops over their fields."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from models.catalogue.item_filter import Condition, ItemFilter
from models.catalogue.item_values import ItemEntry
from models.catalogue.sorting import SortKey

_OPERATORS = {
    "gt": lambda a, b: a > b,
    "gte": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "lte": lambda a, b: a <= b,
}


def values(entry: ItemEntry, field: str) -> list[Any]:
    """All values of an item in a field, objects among them."""
    own: dict[str, list[Any]] = {
        "item_id": [entry.item_id],
        "title": [entry.title] if entry.title else [],
        "published_at": [] if entry.published_at is None else [entry.published_at],
        "categories": list(entry.categories),
        "tags": list(entry.tags),
    }
    if field in own:
        return own[field]
    return [value for path, value in _walk("attributes", entry.attributes) if path == field]


def _walk(path: str, members: Any) -> Iterator[tuple[str, Any]]:
    for name, value in members.items():
        inner = f"{path}.{name}"
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, list):
                yield inner, one
                if isinstance(one, dict):
                    yield from _walk(inner, one)


def same(a: Any, b: Any) -> bool:
    """Equality of JSON scalars: 1 is 1.0, and neither is true."""
    if isinstance(a, dict) or isinstance(b, dict) or isinstance(a, bool) != isinstance(b, bool):
        return False
    return bool(a == b)


def kind(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, dict):
        return "other"
    return "text" if isinstance(value, str) else "number"


def holds(value: Any, operator: str, wanted: Any) -> bool:
    """Report whether one value meets one comparison."""
    if operator == "eq":
        return same(value, wanted)
    if operator == "in":
        return any(same(value, one) for one in wanted)
    if operator == "contains":
        return isinstance(value, str) and wanted.casefold() in value.casefold()
    if operator == "within_km":
        return isinstance(value, dict) and _is_near(value, *wanted)
    comparable = kind(value) == kind(wanted) != "other"
    return comparable and bool(_OPERATORS[operator](value, wanted))


def _is_near(place: dict[str, Any], lat: float, lon: float, km: float) -> bool:
    a, b = place.get("lat"), place.get("lon")
    if kind(a) != "number" or kind(b) != "number" or abs(a) > 90 or abs(b) > 180:  # type: ignore[arg-type]
        return False
    one, other = math.radians(a), math.radians(lat)  # type: ignore[arg-type]
    apart = math.radians(b - lon)  # type: ignore[operator]
    squared = math.sin((one - other) / 2) ** 2
    squared += math.cos(one) * math.cos(other) * math.sin(apart / 2) ** 2
    return 2 * 6371.0088 * math.asin(min(1.0, math.sqrt(squared))) <= km


def passes(entry: ItemEntry, wanted: ItemFilter) -> bool:
    if isinstance(wanted, Condition):
        own, comparisons = values(entry, wanted.field), dict(wanted.comparisons)
        exists = comparisons.pop("exists", None)
        if exists is not None and bool(own) != exists:
            return False
        return not comparisons or any(
            all(holds(value, *each) for each in comparisons.items()) for value in own
        )
    member = (passes(entry, one) for one in wanted.members)
    if wanted.kind == "all":
        return all(member)
    return any(member) if wanted.kind == "any" else not any(member)


def facet(entries: Sequence[ItemEntry], field: str, limit: int) -> tuple[Any, ...]:
    """Counts of values, what is left over, and the least and the largest number."""
    counts: Counter[tuple[str, Any]] = Counter()
    numbers = []
    for entry in entries:
        own = {(_type(value), value) for value in values(entry, field)
               if not isinstance(value, dict)}  # fmt: skip
        counts.update(own)
        numbers += [value for type_, value in own if type_ == "0 number"]
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0][0], _within(pair[0][1])))
    listed = [(value, count) for (_, value), count in ranked[:limit]]
    other = sum(count for _, count in ranked[limit:])
    return listed, other, min(numbers, default=None), max(numbers, default=None)


def _type(value: Any) -> str:
    if value is None:
        return "3 null"
    return (
        "2 flag"
        if isinstance(value, bool)
        else {"number": "0 number", "text": "1 text"}[kind(value)]
    )


def _within(value: Any) -> Any:
    return 0 if value is None else value


def ordered(entries: Sequence[ItemEntry], keys: Sequence[SortKey]) -> list[str]:
    """Ids in the order of some fields."""
    ranked = sorted(entries, key=lambda entry: entry.item_id)
    for key in reversed(keys):  # a stable sort: the first key counts first

        def place(entry: ItemEntry, key: SortKey = key) -> Any:
            own = values(entry, key.field)
            sign = -1 if key.descending else 1
            numbers = [sign * value for value in own if kind(value) == "number"]
            texts = sorted({(isinstance(value, bool), value) for value in own
                            if isinstance(value, str | bool)})  # fmt: skip
            return numbers, texts

        ranked = _sorted_by(ranked, place, descending=key.descending)
    return [entry.item_id for entry in ranked]


def _sorted_by(entries: list[ItemEntry], place: Any, *, descending: bool) -> list[ItemEntry]:
    every = sorted({text for entry in entries for text in place(entry)[1]})
    sign = -1 if descending else 1

    def key(entry: ItemEntry) -> tuple[float, float]:
        numbers, texts = place(entry)
        number = min(numbers, default=math.inf)
        text = min((sign * every.index(each) for each in texts), default=math.inf)
        return (text, number) if descending else (number, text)

    return sorted(entries, key=key)
