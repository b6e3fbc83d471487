"""Filters, facets and sorted pages over a large catalogue, beside NumPy over every row.

The reference holds the same values in plain arrays, as a program would that knows its fields
beforehand: a mask of every row for each condition with the distances of all items, values counted
by `np.unique`, and `np.argsort` of all that match for a page.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from models.catalogue.catalogue import Catalogue
from models.catalogue.facets import CountedItems, count_values
from models.catalogue.item_filter import Condition, Group, ItemFilter, distances
from models.catalogue.item_values import ItemEntry
from models.catalogue.sorting import SortKey, sorted_rows
from tests.benchmarks.harness.options import Rounds
from tests.benchmarks.harness.tables import print_machine, ratio, seconds, table
from tests.benchmarks.harness.timing import alternate

_BATCH = 20_000  # items that are added at a time
_DIMENSION = 4  # of the text vectors, which play no part here
_CATEGORIES, _BRANDS, _TAGS = 200, 2_000, 5_000
_PAGE = 20
_NOW, _YEAR = 1_800_000_000_000_000, 31_536_000_000_000  # microseconds

LISTED = (3, 5, 8, 13)  # categories of the narrow filter
BERLIN = (52.5, 13.4)
FACETS = ("categories", "attributes.brand", "attributes.price")


@dataclass(frozen=True, slots=True)
class Values:
    """The fields of all items [N] as plain arrays."""

    categories: NDArray[np.int64]  # [N, 3] numbers, -1 where there are fewer
    brands: NDArray[np.int64]  # [N]
    prices: NDArray[np.float64]  # [N]
    places: NDArray[np.complex128]  # [N] latitude + longitude·i
    published: NDArray[np.int64]  # [N]

    @classmethod
    def drawn(cls, items: int, seed: int = 0) -> Values:
        """Draw the fields of items: a few categories and brands are on most of them."""
        rng = np.random.default_rng(seed)
        categories = (_CATEGORIES * rng.random((items, 3)) ** 2).astype(np.int64)
        categories[np.arange(3) > rng.integers(0, 3, items)[:, None]] = -1
        for column, earlier in ((1, 0), (2, 0), (2, 1)):
            categories[categories[:, column] == categories[:, earlier], column] = -1
        return cls(
            categories,
            (_BRANDS * rng.random(items) ** 3).astype(np.int64),
            np.round(100 * rng.random(items), 2),
            90 - 180 * rng.random(items) + 1j * (180 - 360 * rng.random(items)),
            _NOW - (3 * _YEAR * rng.random(items)).astype(np.int64),
        )

    def entry(self, row: int) -> ItemEntry:
        """Return one item."""
        place = complex(self.places[row])
        return ItemEntry(
            f"item-{row}",
            f"Item {(row * 7_919) % 1_000_003} of {row}",
            categories=[f"category {name}" for name in self.categories[row].tolist() if name >= 0],
            attributes={
                "brand": f"brand {self.brands[row]}",
                "price": float(self.prices[row]),
                "place": {"lat": place.real, "lon": place.imag},
            },
            published_at=int(self.published[row]),
            tags=[f"tag {row % _TAGS}", f"tag {row * 31 % _TAGS}"],
        )


def filters(
    items: Annotated[int, typer.Option(min=1_000, help="Of the catalogue.")] = 1_000_000,
    rounds: Rounds = 11,
) -> None:
    """Measure filters, facets and sorted pages over a large catalogue.

    Beside NumPy over plain arrays of the same values, row by row; both must agree. A million items
    take two minutes on one core and 3 GB of memory.
    """
    print_machine("one thread")
    values = Values.drawn(items)
    catalogue, build = drawn_catalogue(values)
    questions = _questions(catalogue, values)
    for name, (ours, reference) in questions.items():
        if (answer := ours()) != (expected := reference()):
            raise ValueError(f"{name}: {answer} is not {expected}")
    works = {name: ours for name, (ours, _) in questions.items()}
    works |= {f"{name}, reference": reference for name, (_, reference) in questions.items()}
    timed = alternate(works, rounds)
    latest = [catalogue]  # each change follows the one before

    def change() -> None:
        latest[0] = latest[0].updated([values.entry(items // 2)], [], _encode)

    changed = alternate({"one": change}, rounds).seconds("one")
    table(
        f"{items:,} items",
        ("question", "time", "times NumPy over every row"),
        (
            (
                name,
                seconds(timed.seconds(name).median),
                ratio(timed.ratio(name, f"{name}, reference")),
            )
            for name in questions
        ),
        caption=f"All items are added in {seconds(build)}, one is changed in "
        f"{seconds(changed.median)}.",
    )


def narrow() -> ItemFilter:
    """Return five conditions that few items meet."""
    lat, lon = BERLIN
    return Group(
        "all",
        (
            Condition("categories", {"in": [f"category {name}" for name in LISTED]}),
            Condition("attributes.price", {"gte": 10, "lt": 60}),
            Group("none", (Condition("attributes.brand", {"eq": "brand 0"}),)),
            Condition("attributes.place", {"within_km": (lat, lon, 300)}),
            Condition("published_at", {"gte": _NOW - _YEAR}),
        ),
    )


def wide() -> ItemFilter:
    """Return five conditions that most items meet."""
    lat, lon = BERLIN
    return Group(
        "all",
        (
            Group("none", (Condition("categories", {"eq": "category 199"}),)),
            Condition("attributes.price", {"gte": 1}),
            Group("none", (Condition("attributes.brand", {"eq": "brand 0"}),)),
            Condition("attributes.place", {"within_km": (lat, lon, 15_000)}),
            Condition("published_at", {"gte": _NOW - 2 * _YEAR}),
        ),
    )


def _questions(
    catalogue: Catalogue, values: Values
) -> dict[str, tuple[Callable[[], int], Callable[[], int]]]:
    """Return each question to the catalogue and to the arrays; both return a number to compare."""
    priced = catalogue.allowed(Condition("attributes.price", {"gte": 20}))

    def facets() -> int:
        items = CountedItems(priced)
        counted = [count_values(catalogue.fields, name, items, 10) for name in FACETS]
        return sum(count for facet in counted for _, count in facet.values)

    def facets_of_arrays() -> int:
        return sum(
            int(np.sort(np.unique(given[given >= 0], return_counts=True)[1])[-10:].sum())
            for given in (values.categories[priced], values.brands[priced], values.prices[priced])
        )

    return {
        "five narrow conditions": (
            lambda: int(np.count_nonzero(catalogue.allowed(narrow()))),
            lambda: int(np.count_nonzero(_narrow_mask(values))),
        ),
        "five wide conditions": (
            lambda: int(np.count_nonzero(catalogue.allowed(wide()))),
            lambda: int(np.count_nonzero(_wide_mask(values))),
        ),
        "three facets": (facets, facets_of_arrays),
        "a page by price": (
            lambda: _page(catalogue, priced, "attributes.price", values.prices),
            lambda: _page_of_arrays(priced, values.prices),
        ),
        "a page by time": (
            lambda: _page(catalogue, priced, "published_at", values.published),
            lambda: _page_of_arrays(priced, values.published),
        ),
    }


def _narrow_mask(values: Values) -> NDArray[np.bool_]:
    listed = np.isin(values.categories, LISTED)  # [N, 3]
    inside = listed[:, 0] | listed[:, 1] | listed[:, 2]
    inside &= (values.prices >= 10) & (values.prices < 60)
    inside &= values.brands != 0
    inside &= distances(values.places, *BERLIN) <= 300
    inside &= values.published >= _NOW - _YEAR
    return inside


def _wide_mask(values: Values) -> NDArray[np.bool_]:
    wanted: NDArray[np.bool_] = values.categories != _CATEGORIES - 1  # [N, 3]
    inside: NDArray[np.bool_] = wanted[:, 0] & wanted[:, 1] & wanted[:, 2]
    inside &= values.prices >= 1
    inside &= values.brands != 0
    inside &= distances(values.places, *BERLIN) <= 15_000
    inside &= values.published >= _NOW - 2 * _YEAR
    return inside


def _page(
    catalogue: Catalogue, mask: NDArray[np.bool_], field: str, given: NDArray[Any] | None = None
) -> int:
    """Return the sum of the values of a page in hundredths, of which ties may have any order."""
    rows = sorted_rows(catalogue.fields, np.flatnonzero(mask), [SortKey(field)], limit=_PAGE)
    return 0 if given is None else round(100 * float(given[rows].sum()))


def _page_of_arrays(mask: NDArray[np.bool_], given: NDArray[Any]) -> int:
    rows = np.flatnonzero(mask)
    rows = rows[np.argsort(given[rows], kind="stable")[:_PAGE]]
    return round(100 * float(given[rows].sum()))


def drawn_catalogue(values: Values) -> tuple[Catalogue, float]:
    """Return a catalogue of these items, and the seconds that adding them took."""
    catalogue, items, taken = Catalogue.empty(_DIMENSION), len(values.prices), 0.0
    for begin in range(0, items, _BATCH):
        entries = [values.entry(row) for row in range(begin, min(items, begin + _BATCH))]
        started = time.process_time()
        catalogue = catalogue.updated(entries, [], _encode)
        taken += time.process_time() - started
    return catalogue, taken


def _encode(texts: Any) -> NDArray[np.float32]:
    return np.zeros((len(texts), _DIMENSION), np.float32)
