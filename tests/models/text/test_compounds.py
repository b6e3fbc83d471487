"""Compounds that the words of a catalogue split and join."""

from __future__ import annotations

import math

import numpy as np
import pytest

from models.text.bm25 import BM25Index, BM25Writer, Document

TITLES = [
    "REGENCY CAKESTAND 3 TIER",
    "LACE CAKE STAND WHITE",
    "CAKE TIN",
    "UMBRELLA STAND",
    "T-LIGHT HOLDER",
    "tea towel",
    "carpet",
    "a car",
    "pet food",
]


def indexed(titles: list[str] = TITLES) -> BM25Index:
    """Items of these titles, whose rows are their places."""
    return BM25Writer().update(Document(row, title, []) for row, title in enumerate(titles))


def found(index: BM25Index, query: str, titles: list[str] = TITLES) -> list[str]:
    """The titles that have words of a query, best first."""
    rows = index.search(index.parser.parse(query), 20, np.ones(len(titles), np.bool_)).rows
    return [titles[row] for row in rows.tolist()]


def test_two_words_find_the_item_that_writes_them_as_one() -> None:
    """Words side by side also stand for one word, which comes before items that have one part."""
    assert set(found(indexed(), "cake stand")[:2]) == set(TITLES[:2])
    assert found(indexed(), "tlight holder")[0] == "T-LIGHT HOLDER"


def test_one_word_finds_the_item_that_writes_it_as_two() -> None:
    """A word also stands for the two that it is made of, side by side, known itself or not."""
    assert found(indexed(), "cakestand") == TITLES[:2]
    others = TITLES[1:]
    parsed = indexed(others).parser.parse("cakestand")
    assert parsed.corrections == {"cakestand": ("cake stand",)}
    assert parsed.text == "cake stand"
    assert found(indexed(others), "cakestand", others)[0] == "LACE CAKE STAND WHITE"


def test_words_that_nobody_writes_side_by_side_are_no_compound() -> None:
    """A word is not split into words that stand apart, nor words joined to one that nobody has."""
    assert found(indexed(), "carpet") == ["carpet"]
    assert indexed().parser.parse("carpet").compounds == ()
    assert indexed().parser.parse("tin food").compounds == ()
    assert indexed().parser.parse('"cake" stand').compounds == ()


def test_a_compound_weighs_what_its_parts_do() -> None:
    """In a query of two words the one word weighs twice what they do, in a longer one less."""
    index = indexed()

    def rarity(count: int) -> float:
        return math.log(1 + (len(TITLES) - count + 0.5) / (count + 0.5))

    parts = 2 * rarity(2) / rarity(1)
    (short,) = index.parser.parse("cake stand").compounds
    assert short.text == "cakestand"
    assert short.weight == pytest.approx(2 * parts)
    (long,) = index.parser.parse("red blue cake stand").compounds
    assert long.weight == pytest.approx(0.75 * parts)


MEASURES = [
    "HDMI cable 3m black",
    "HDMI cable 5 m white",
    "DDR4 memory 16GB",
    "DDR4 memory 32 GB",
    "Paracetamol 500mg tablets",
    "Ibuprofen 400 mg tablets",
    "Vitamin B12",
    "Vitamin D 3",
    "kettle 1.5 L",
    "jug 2.5L",
    "drive 8 TB",
    "drive 8TB blue",
]


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("ddr4 32gb", [3]),
        ("32gb", [3]),
        ("32 GB", [3]),
        ("16 gb", [2]),
        ("5m", [1]),
        ("5 m", [1]),
        ("3 m", [0]),
        ("hdmi-5m", [1]),
        ("d3", [7]),
        ("vitamin d3", [7]),
        ("vitamin b 12", [6]),
        ("b-12", [6]),
        ("500 mg", [4]),
        ("400mg tablets", [5]),
        ("1.5l", [8]),
        ("2.5 l", [9]),
        ("8 tb", [10, 11]),
        ("8tb", [10, 11]),
    ],
)
def test_a_number_and_its_unit_are_one_term(query: str, best: list[int]) -> None:
    """A measure is found first however it is spaced, and marked where it stands."""
    index = indexed(MEASURES)
    parsed = index.parser.parse(query)
    rows = index.search(parsed, 20, np.ones(len(MEASURES), np.bool_)).rows.tolist()
    assert sorted(rows[: len(best)]) == best
    assert any(
        char.isdigit()
        for start, end in index.match_spans(parsed)(MEASURES[best[0]])
        for char in MEASURES[best[0]][start:end]
    )


@pytest.mark.parametrize("query", ["64gb", "33gb", "4m", "d4", "b13", "600mg", "3.5l", "3.5 kg"])
def test_another_number_is_another_term(query: str) -> None:
    """A measure that no item has is neither corrected to another nor found by its unit."""
    parsed = indexed(MEASURES).parser.parse(query)
    assert (parsed.corrections, parsed.did_you_mean) == ({}, None)
    assert found(indexed(MEASURES), query, MEASURES) == []
