"""Tables, sentences and JSON of the study of personal search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from service.lab.comparison_report import format_interval
from tests.benchmarks.studies.personal_search import DEFAULT, Measured, Ranks, mrr


def show(console: Console, measured: Measured) -> None:
    """Print the validation grid, then what the test cases say of the chosen and default weights."""
    console.print(_grid(measured))
    test = measured.test
    console.print(f"test, {len(test.nobody):,} cases: MRR without the user {mrr(test.nobody):.4f}")
    for label, weight in _weights(measured):
        gain, over = measured.gained(weight), measured.over_popularity(weight)
        console.print(
            f"personal {weight:g} ({label}): MRR {mrr(test.memory[weight]):.4f}, more by "
            f"{format_interval(gain)} (paired bootstrap); over popularity {format_interval(over)}",
            highlight=False,
            soft_wrap=True,
        )
    popular = measured.chosen_popularity
    console.print(
        f"popularity, {popular:g} likewise chosen: MRR {mrr(test.popularity[popular]):.4f}"
    )
    if measured.without_words:
        console.print(f"{measured.without_words:,} cases left out: their items have no categories")


def as_json(measured: Measured) -> dict[str, Any]:
    """All figures as plain values."""
    test, validation, popular = measured.test, measured.validation, measured.chosen_popularity
    return {
        "cases": len(test.nobody),
        "without": mrr(test.nobody),
        "with": [
            {
                "personal": weight,
                "why": label,
                "mrr": mrr(test.memory[weight]),
                "gained": measured.gained(weight)._asdict(),
                "over_popularity": measured.over_popularity(weight)._asdict(),
            }
            for label, weight in _weights(measured)
        ],
        "popularity": {"personal": popular, "mrr": mrr(test.popularity[popular])},
        "validation": {
            "without": mrr(validation.nobody),
            "memory": _by_weight(validation.memory),
            "popularity": _by_weight(validation.popularity),
        },
    }


def _weights(measured: Measured) -> list[tuple[str, float]]:
    return [("chosen on validation", measured.chosen), ("by default", DEFAULT)]


def _grid(measured: Measured) -> Table:
    """MRR on the validation cases for each weight that could be chosen."""
    validation = measured.validation
    table = Table(title=f"validation, {len(validation.nobody):,} cases: MRR")
    for heading in ("personal", "the user's memory", "popularity in its place"):
        table.add_column(heading, justify="right")
    table.add_row("without", f"{mrr(validation.nobody):.4f}", "")
    for weight, ranks in validation.memory.items():
        popular = mrr(validation.popularity[weight])
        table.add_row(f"{weight:g}", f"{mrr(ranks):.4f}", f"{popular:.4f}")
    return table


def _by_weight(ranks: Mapping[float, Ranks]) -> dict[str, float]:
    return {f"{weight:g}": mrr(each) for weight, each in ranks.items()}
