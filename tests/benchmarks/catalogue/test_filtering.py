"""The benchmark of filters over a catalogue that is quick to make."""

from __future__ import annotations

from rich.console import Console

from tests.benchmarks.catalogue import filtering


def test_catalogue_and_arrays_agree_and_are_timed() -> None:
    """Every question has a time and a ratio, after both sides gave the same answer."""
    found = filtering.measure(3_000, 1)
    assert found.seconds.keys() == found.ratios.keys()
    assert all(taken.median > 0 for taken in [*found.seconds.values(), *found.ratios.values()])
    assert 0 < found.as_dict()["column_bytes_an_item"] < 200
    console = Console(record=True, width=120)
    console.print(filtering.shown(found))
    assert "five narrow conditions" in console.export_text()
