"""Columns of item fields: searched strings, and the values of rows."""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import numpy as np
import pytest

from models.catalogue import columns
from models.catalogue.catalogue import Catalogue
from models.catalogue.columns import FoldedStrings
from models.catalogue.facets import values_of_rows
from models.catalogue.item_values import ItemEntry
from models.data.vocabulary import Vocabulary
from models.ranking.audiences import distinctive_categories
from tests.support.small import DIMENSION, encode


@pytest.fixture
def strings(monkeypatch: pytest.MonkeyPatch) -> FoldedStrings:
    """Ten strings, in blocks of four."""
    monkeypatch.setattr(columns, "_BLOCK", 4)
    return FoldedStrings(Vocabulary(f"String {at}" for at in range(10)))


def found(strings: FoldedStrings, part: str, count: int) -> list[int]:
    """The places of the strings that contain another."""
    return np.flatnonzero(strings.containing(part, count)).tolist()


def test_an_older_catalogue_is_searched_after_a_newer_one(strings: FoldedStrings) -> None:
    """Strings that only the newer one has are not found, and are no error."""
    assert found(strings, "STRING", 10) == [*range(10)]
    assert found(strings, "string", 6) == [*range(6)]
    assert found(strings, "string 7", 6) == []
    assert len(strings.containing("string", 6)) == 6


def test_searches_at_once_find_what_one_finds(strings: FoldedStrings) -> None:
    """Two threads that fold the same strings, line by line in step, do not keep them twice."""

    def slowly(frame: FrameType, _event: str, _value: object) -> object:
        is_own = frame.f_code.co_filename == columns.__file__
        if is_own and not frame.f_code.co_name.startswith("<"):
            time.sleep(0.02)
        return slowly

    tracer = sys.gettrace()
    barrier = threading.Barrier(2)

    def search() -> None:
        barrier.wait()
        sys.settrace(slowly)  # type: ignore[arg-type]
        try:
            strings.containing("string", 4)
        finally:
            sys.settrace(tracer)

    with ThreadPoolExecutor(2) as threads:
        for search_ in [threads.submit(search) for _ in range(2)]:
            search_.result()
    for at in range(10):
        assert found(strings, f"string {at}", 10) == [at]


def drawn(rng: random.Random, name: str) -> ItemEntry:
    """An item with none to five categories, and attributes of mixed types."""
    attributes: dict[str, Any] = {}
    if rng.random() < 0.6:
        kinds = [1, 2.5, "red", True, None, ["red", 3], {"inner": 4}]
        attributes["mixed"] = rng.choice(kinds)
    categories = rng.sample([f"c{n}" for n in range(7)], rng.randrange(6))
    return ItemEntry(name, name, categories=categories, attributes=attributes)


def expected(entry: ItemEntry, field: str) -> list[Any]:
    """The values that an item has in a field."""
    if field == "categories":
        return list(entry.categories)
    value = entry.attributes.get("mixed", [])
    return [] if isinstance(value, dict) else value if isinstance(value, list) else [value]


@pytest.mark.parametrize("seed", range(5))
def test_values_of_rows_are_those_of_the_items(seed: int) -> None:
    """After changes and removals, each item has the values that it was stored with last."""
    rng = random.Random(seed)
    catalogue, stored = Catalogue.empty(DIMENSION), dict[str, ItemEntry]()
    for _ in range(12):
        changed = [drawn(rng, f"i{rng.randrange(40)}") for _ in range(9)]
        removed = [name for name in stored if rng.random() < 0.1]
        catalogue = catalogue.updated(changed, removed, encode)
        for name in removed:
            stored.pop(name)
        stored |= {entry.item_id: entry for entry in changed}
    rows = np.flatnonzero(catalogue.present)[:: 1 + seed % 2]
    names = catalogue.vocabulary.ids_of(rows.tolist())
    for field in ("categories", "attributes.mixed"):
        found = Counter(map(repr, values_of_rows(catalogue.fields, field, rows)))
        assert found == Counter(
            repr((place, value))
            for place, name in enumerate(names)
            for value in expected(stored[name], field)
        )
    assert values_of_rows(catalogue.fields, "attributes.none", rows) == []


@pytest.mark.parametrize("seed", range(5))
def test_distinctive_categories_are_more_frequent_than_usual(seed: int) -> None:
    """Categories are in the order of p log (p / q), counted in loops over the items."""
    rng = random.Random(seed)
    entries = [drawn(rng, f"i{n}") for n in range(60)]
    catalogue = Catalogue.empty(DIMENSION).updated(entries, [], encode)
    rows = [rng.randrange(60) for _ in range(15)]
    terms = {}
    for name in {name for entry in entries for name in entry.categories}:
        share = sum(name in entries[row].categories for row in rows) / len(rows)
        of_all = sum(name in entry.categories for entry in entries) / len(entries)
        if share > of_all:
            terms[name] = share * math.log(share / of_all)
    order = sorted(terms, key=lambda name: (-terms[name], name))
    assert distinctive_categories(catalogue, rows, 3) == order[:3]
    assert distinctive_categories(Catalogue.empty(DIMENSION), [], 3) == []
