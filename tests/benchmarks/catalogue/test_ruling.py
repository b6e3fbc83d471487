"""The benchmark of rules over a catalogue that is quick to make."""

from __future__ import annotations

from rich.console import Console

from tests.benchmarks.catalogue import ruling


def test_every_question_is_timed_beside_the_plain_one() -> None:
    """Every question has a time and a ratio, and stands in the table."""
    found = ruling.measure(2_000, 1)
    assert found.seconds.keys() == found.ratios.keys() == ruling.QUESTIONS.keys()
    assert found.ratios["plain"].median == 1
    assert not found.as_dict()["indexed"]
    console = Console(record=True, width=120)
    console.print(ruling.shown(found))
    text = console.export_text()
    assert all(name in text for name in ruling.QUESTIONS)
