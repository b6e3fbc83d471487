"""Filters, facets and sorting of the catalogue, compared with loops over plain items."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.catalogue import columns, cow, item_filter
from models.catalogue.catalogue import Catalogue, catalogue_from_parts, catalogue_to_parts
from models.catalogue.facets import CountedItems, count_values
from models.catalogue.item_filter import Condition, Group, ItemFilter
from models.catalogue.item_values import ItemEntry
from models.catalogue.sorting import SortKey, position, sorted_rows
from tests.support import filter_reference as reference
from tests.support.small import DIMENSION, encode

IDS = [f"i{n}" for n in range(12)]
WORDS = ["", "a", "ab", "B", "é", "Straße"]
# Integers without an equal float, beside their neighbours, and floats of their size.
LARGE = [2**53, 2**53 + 1, -(2**53) - 1, 2**60, 2**60 + 1, 2**63 - 1, -(2**63), 2.0**60, 1e300]
scalars = st.one_of(
    st.sampled_from([*WORDS, 0, 1, 1.0, -2.5, 2.25, 7, True, False, None]), st.sampled_from(LARGE)
)
places = st.fixed_dictionaries(
    {
        "lat": st.sampled_from([52.5, 52.6, -89.5, 91, "x"]),
        "lon": st.sampled_from([13.4, 179.9, -179.9]),
    }
)
values = st.one_of(
    scalars, st.lists(scalars, max_size=3), places, st.lists(places, max_size=2),
    st.fixed_dictionaries({"c": scalars}), st.lists(st.lists(scalars, max_size=1), max_size=1),
)  # fmt: skip
entries = st.builds(
    ItemEntry,
    item_id=st.sampled_from(IDS),
    title=st.sampled_from(WORDS),
    categories=st.lists(st.sampled_from(["x", "y", "z"]), max_size=4),
    attributes=st.dictionaries(st.sampled_from(["a", "b", "b.c", "p"]), values, max_size=4),
    hidden=st.sampled_from([False, False, False, True]),
    published_at=st.one_of(st.none(), st.integers(-3, 3)),
    tags=st.lists(st.sampled_from(["t", "u"]), max_size=2),
)
changes = st.lists(
    st.tuples(st.lists(entries, max_size=6), st.lists(st.sampled_from(IDS), max_size=2)),
    min_size=1, max_size=4,
)  # fmt: skip
ATTRIBUTES = ["attributes.a", "attributes.b", "attributes.b.c", "attributes.p", "attributes.p.lat"]
FIELDS = ["item_id", "title", "categories", "tags", "published_at", "attributes.none", *ATTRIBUTES]
bounds = st.dictionaries(
    st.sampled_from(["gt", "gte", "lt", "lte"]), st.sampled_from([*WORDS, -1, 0, 1, 2.25, *LARGE]),
    min_size=1, max_size=2,
)  # fmt: skip
circles = [(52.5, 13.4, 5), (52.5, 13.4, 20), (-90, 0, 60), (0, 180, 15_000), (90, 10, 0)]
comparisons = st.one_of(
    bounds,
    st.fixed_dictionaries({"eq": st.one_of(scalars, st.sampled_from(["x", "t", "i3"]))}),
    st.fixed_dictionaries({"in": st.lists(scalars, max_size=12)}),
    st.fixed_dictionaries({"exists": st.booleans()}),
    st.fixed_dictionaries({"contains": st.sampled_from(["", "A", "SS", "i1"])}),
    st.fixed_dictionaries({"in": st.lists(scalars, max_size=3), "gte": st.sampled_from([1, "a"])}),
    st.fixed_dictionaries({"within_km": st.sampled_from(circles)}),
)
conditions = st.builds(Condition, field=st.sampled_from(FIELDS), comparisons=comparisons)
filters: st.SearchStrategy[ItemFilter] = st.recursive(
    conditions,
    lambda inner: st.builds(
        Group, st.sampled_from(["all", "any", "none"]),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=6,
)  # fmt: skip
sort_keys = st.lists(
    st.builds(SortKey, st.sampled_from(FIELDS), st.booleans()), min_size=0, max_size=3
)
thorough = settings(max_examples=150, deadline=None, derandomize=True)


@pytest.fixture(params=["sparse", "dense"], autouse=True)
def _layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a few values in the layouts that large catalogues have: mapped, in many blocks."""
    monkeypatch.setattr(cow, "SMALL", 0)
    monkeypatch.setattr(item_filter, "_NARROW", 2)
    monkeypatch.setattr(columns, "_BLOCK", 3)
    monkeypatch.setattr(columns, "_GLANCE", 3)
    monkeypatch.setattr(columns, "_SHORT", 8)  # in the middle of a series
    monkeypatch.setattr(columns, "_DEAD", 1)
    monkeypatch.setattr(columns, "_SPARSE", 1 if request.param == "sparse" else 10**6)


def versions(
    series: Sequence[tuple[list[ItemEntry], list[str]]],
) -> list[tuple[Catalogue, dict[str, ItemEntry]]]:
    """The catalogue after each change, and the items that are in it."""
    catalogue, known = Catalogue.empty(DIMENSION), dict[str, ItemEntry]()
    made = []
    for upserted, removed in series:
        catalogue = catalogue.updated(upserted, removed, encode)
        kept = {id_: entry for id_, entry in known.items() if id_ not in removed}
        known = kept | {entry.item_id: entry for entry in upserted}
        made.append((catalogue, known))
    return made


def visible(known: dict[str, ItemEntry]) -> list[ItemEntry]:
    return [entry for entry in known.values() if not entry.hidden]


@thorough
@given(series=changes, wanted=filters)
def test_any_filter_allows_what_a_loop_over_items_would(
    series: list[tuple[list[ItemEntry], list[str]]], wanted: ItemFilter
) -> None:
    """Filters are exact over every version of a catalogue, earlier ones included."""
    for catalogue, known in versions(series):
        allowed = catalogue.allowed(wanted)
        ids = {*_ids(catalogue, np.flatnonzero(allowed))}
        assert ids == {entry.item_id for entry in visible(known) if reference.passes(entry, wanted)}


@thorough
@given(series=changes, wanted=filters, field=st.sampled_from(FIELDS[1:]), limit=st.integers(1, 5))
def test_facets_count_what_a_loop_over_items_would(
    series: list[tuple[list[ItemEntry], list[str]]], wanted: ItemFilter, field: str, limit: int
) -> None:
    """Values come by falling count and then in their order, of few items or most; others add up."""
    for catalogue, known in versions(series):
        allowed = [entry for entry in visible(known) if reference.passes(entry, wanted)]
        found = count_values(
            catalogue.fields, field, CountedItems(catalogue.allowed(wanted)), limit
        )
        listed, other, low, high = reference.facet(allowed, field, limit)
        assert [(type(v) is bool, v, n) for v, n in found.values] == [
            (type(v) is bool, v, n) for v, n in listed
        ]
        assert (found.other, found.minimum, found.maximum) == (other, low, high)


@thorough
@given(series=changes, keys=sort_keys, limit=st.integers(1, 4))
def test_pages_have_the_order_of_a_sorted_list(
    series: list[tuple[list[ItemEntry], list[str]]], keys: list[SortKey], limit: int
) -> None:
    """Pages by offset and pages behind a position are those of one sorted list."""
    for catalogue, known in versions(series):
        rows = np.flatnonzero(catalogue.allowed())
        expected = reference.ordered(visible(known), keys)
        after, behind = None, []
        for offset in range(0, len(expected) + 1, limit):
            page = sorted_rows(catalogue.fields, rows, keys, limit=limit, offset=offset)
            assert _ids(catalogue, page) == expected[offset : offset + limit]
            following = sorted_rows(catalogue.fields, rows, keys, limit=limit, after=after)
            behind += _ids(catalogue, following)
            if len(following):
                after = position(catalogue.fields, int(following[-1]), keys)
        assert behind == expected


@thorough
@given(series=changes, keys=sort_keys)
def test_a_position_survives_changes_of_the_catalogue(
    series: list[tuple[list[ItemEntry], list[str]]], keys: list[SortKey]
) -> None:
    """Behind an item of an earlier version come the later items that sort behind it."""
    for (old, known), (new, later) in pairwise(versions(series)):
        for row in np.flatnonzero(old.allowed()).tolist():
            at = known[old.vocabulary.id(row)]
            rows = np.flatnonzero(new.allowed())
            page = sorted_rows(
                new.fields, rows, keys, limit=99, after=position(old.fields, row, keys)
            )
            others = [entry for entry in visible(later) if entry.item_id != at.item_id]
            ordered = reference.ordered([*others, at], keys)
            behind = ordered[ordered.index(at.item_id) + 1 :]
            own = at.item_id
            assert [id_ for id_ in _ids(new, page) if id_ != own] == behind


def _ids(catalogue: Catalogue, rows: Any) -> list[str]:
    return catalogue.vocabulary.ids_of(rows.tolist())


@pytest.mark.parametrize("step", [1, 0.01, 1 / 3])
def test_numbers_of_many_items_are_counted_exactly(step: float) -> None:
    """Whole numbers, prices and fractions are counted value by value."""
    prices = [round(n % 7 * step, 2) if step == 0.01 else n % 7 * step for n in range(50)]
    items = [ItemEntry(f"i{n}", attributes={"price": price}) for n, price in enumerate(prices)]
    made = Catalogue.empty(DIMENSION).updated(items, [], encode)
    mask = made.allowed()
    found = count_values(made.fields, "attributes.price", CountedItems(mask), 50)
    assert dict(found.values) == {price: prices.count(price) for price in prices}


def test_numbers_of_a_catalogue_that_was_read_are_exact() -> None:
    """Integers that no float equals stay apart in filters, facets, sorting and cursors."""
    numbers = [2**53 + 1, 2**53, 0.5, 2**63 - 1, -(2**63), 2**63 - 2, 1e300, -(2**53) - 1, 2.0**63]
    catalogue = Catalogue.empty(DIMENSION).updated(
        [ItemEntry(f"i{n}", attributes={"a": each}) for n, each in enumerate(numbers)], [], encode
    )
    catalogue = catalogue_from_parts(Catalogue.empty(DIMENSION), catalogue_to_parts(catalogue))
    for operator in ("eq", "gt", "lte"):
        for operand in [*numbers, 2**53 + 2, 2**62 + 1, -(2**53)]:
            allowed = catalogue.allowed(Condition("attributes.a", {operator: operand}))
            wanted = [reference.holds(number, operator, operand) for number in numbers]
            assert allowed.tolist() == wanted
    counts = count_values(
        catalogue.fields, "attributes.a", CountedItems(catalogue.allowed()), len(numbers)
    )
    assert counts.values == tuple((each, 1) for each in sorted(numbers))
    assert list(map(type, dict(counts.values))) == list(map(type, sorted(numbers)))
    for descending in (False, True):
        key = SortKey("attributes.a", descending)
        order = sorted(range(len(numbers)), key=numbers.__getitem__, reverse=descending)
        rows = np.arange(len(numbers))
        assert sorted_rows(catalogue.fields, rows, [key], limit=9).tolist() == order
        for place, row in enumerate(order):
            after = position(catalogue.fields, row, [key])
            page = sorted_rows(catalogue.fields, rows, [key], limit=9, after=after)
            assert page.tolist() == order[place + 1 :]
