"""Tables and JSON of the study of cold start."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as RichTable

from service.lab.comparison import Comparison
from service.lab.comparison_report import (
    differences,
    differences_json,
    format_interval,
    metric_cells,
    results_json,
)
from service.lab.protocols import EvaluationTask
from service.training.judgement import HEED
from tests.benchmarks.studies.cold_start import ColdStart


def shown(task: EvaluationTask, found: ColdStart) -> RenderableType:
    """Both halves; errors are standard errors over cases."""
    return Group(*_items(task, found), *_users(found))


def as_json(found: ColdStart) -> dict[str, Any]:
    """Every figure, for machines."""

    def each(table: Comparison) -> dict[str, Any]:
        return {
            "cases": table[HEED].test[0].n_cases,
            "models": {name: results_json(row)["test"][0] for name, row in table.items()},
            "heed_over": differences_json(table),
        }

    return {
        "items_never_seen": {
            "hidden": found.items.hidden,
            "ranking_all": each(found.items.everything),
            "ranking_them": each(found.items.unseen),
        },
        "newest_events_shown": {
            "all" if events is None else str(events): each(table)
            for events, table in found.users.items()
        },
    }


def _items(task: EvaluationTask, found: ColdStart) -> list[RenderableType]:
    items = found.items
    grid = RichTable(
        title=f"{items.hidden:,} of {task.train.n_items:,} items never seen in training, known by "
        f"their text; {items.everything[HEED].test[0].n_cases:,} cases about them"
    )
    grid.add_column("model")
    for candidates in ("all items", "these alone"):
        for metric in ("HR@10", "NDCG@10"):
            grid.add_column(f"{metric}, {candidates}", justify="right")
    for name, row in items.everything.items():
        grid.add_row(name, *metric_cells(row.test), *metric_cells(items.unseen[name].test))
    lines = [
        f"{HEED} over {other}, paired bootstrap, {candidates}: "
        f"NDCG@10 {format_interval(ndcg)}, HR@10 {format_interval(hr)}"
        for candidates, table in (
            ("all items", items.everything),
            ("these alone", items.unseen),
        )
        for other, (hr, ndcg) in differences(table).items()
    ]
    return [grid, *lines]


def _users(found: ColdStart) -> list[RenderableType]:
    names = list(found.users[None])
    cases = found.users[None][HEED].test[0].n_cases
    grid = RichTable(
        title=f"Users of whom the newest events are shown, {cases:,} cases; HR@10 / NDCG@10"
    )
    grid.add_column("events shown")
    for name in names:
        grid.add_column(name, justify="right")
    for events, table in found.users.items():
        cells = [f"{row.test[0].hr:.4f} / {row.test[0].ndcg:.4f}" for row in table.values()]
        grid.add_row("all" if events is None else f"{events}", *cells)
    lines = [
        f"{HEED} over {other}, paired bootstrap, {events or 'all'} shown: "
        f"NDCG@10 {format_interval(ndcg)}, HR@10 {format_interval(hr)}"
        for events, table in found.users.items()
        for other, (hr, ndcg) in differences(table).items()
        if other == "popularity"
    ]
    return [grid, *lines]
