"""Search over a catalogue that is just large enough for an index."""

from __future__ import annotations

import pytest
from rich.console import Console

from models.text.static_encoder import StaticEncoder
from tests.benchmarks.catalogue import large_search

WORDS = [
    "garden",
    "river",
    "engine",
    "violin",
    "harbour",
    "copper",
    "lantern",
    "meadow",
    "orbit",
    "pepper",
    "quilt",
    "saddle",
]
SOURCE = [
    (f"{a} {b} {c} guide", f"How a {a} and a {b} become one {c}, in {len(a + b)} steps")
    for a in WORDS
    for b in WORDS
    for c in WORDS[:4]
    if a != b
]


def test_the_items_are_those_of_the_source_and_then_copies() -> None:
    """A copy differs from its item in a seventh of the words; the same seed makes the same."""
    made = list(large_search.entries(SOURCE, 3 * len(SOURCE)))
    assert [(e.title, e.fields["description"]) for e in made[: len(SOURCE)]] == SOURCE
    pairs = [
        (word, other)
        for at, entry in enumerate(made[len(SOURCE) :])
        for word, other in zip(
            made[at % len(SOURCE)].fields["description"].split(),
            entry.fields["description"].split(),
            strict=True,
        )
    ]
    changed = sum(word != other for word, other in pairs) / len(pairs)
    # Some draws are of one place twice, or of the word that is there.
    assert 0.10 < changed < large_search._OTHER
    assert made == list(large_search.entries(SOURCE, 3 * len(SOURCE)))
    assert len({entry.item_id for entry in made}) == len(made)


def test_everything_is_measured() -> None:
    """Search finds what exact search does, sees every change, and answers while it is indexed."""
    stages: list[str] = []
    found = large_search.measure(
        SOURCE,
        5_100,
        StaticEncoder(),
        queries=4,
        judged=4,
        rounds=1,
        progress=lambda stage, _done, _whole: stages.append(stage),
    )
    assert (found.items, found.keys) == (5_100, 10_200)
    assert found.visible
    assert found.recall >= 0.9
    assert 0 < found.keys_recall <= 1
    assert found.ratio.median > 0
    assert found.during > 0
    expected = ["texts", "keys", "index", "queries", "changes", "index anew"]
    assert list(dict.fromkeys(stages)) == expected
    console = Console(record=True, width=120)
    console.print(large_search.shown(found))
    assert "5,100 items, 10,200 keys" in console.export_text()
    assert found.as_dict()["recall"] == found.recall


def test_so_few_items_have_no_index() -> None:
    """A catalogue too small for an index is refused."""
    with pytest.raises(ValueError, match="so few items have no index"):
        large_search.measure(SOURCE, 500, StaticEncoder(), queries=1, judged=1, rounds=1)
