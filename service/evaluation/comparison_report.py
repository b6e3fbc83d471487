"""A benchmark's table, its JSON and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table as RichTable

from models.evaluation.full_ranking import RankingMetrics
from models.evaluation.metrics import PairedDifference, hits, ndcg_gains, paired_bootstrap
from models.evaluation.protocols import EvaluationTask
from service.evaluation.compare_models import HEED, Row, Table

# HR@10 and NDCG@10 on MovieLens 1M as their papers and repositories give them, by protocol.
PUBLISHED: Mapping[tuple[str, str], Sequence[tuple[str, float, float]]] = {
    ("ml-1m", "A"): (
        ("SASRec, binary cross-entropy", 0.239, 0.126),
        ("BERT4Rec", 0.284, 0.154),
        ("gSASRec", 0.300, 0.173),
        ("SASRec, full cross-entropy", 0.3152, 0.1821),
        ("SASRec, 3,000 negatives", 0.3159, 0.1857),
    ),
    ("ml-1m", "B"): (
        ("SASRec", 0.2853, 0.1603),
        ("HSTU", 0.3097, 0.1720),
        ("HSTU-large", 0.3294, 0.1893),
        ("HSTU, mixture of logits", 0.3412, 0.1979),
    ),
}


def shown(task: EvaluationTask, table: Table, data: str = "") -> RenderableType:
    """The models side by side; errors are standard errors over cases."""
    grid = RichTable(
        title=f"{task.train.n_users:,} users, {task.train.n_items:,} items, "
        f"{task.events:,} events; task {task.name}, {len(task.test):,} cases, "
        "the whole catalogue ranked"
    )
    grid.add_column("model")
    timed = any(row.told for row in table.values())
    headings = ["HR@10", "NDCG@10"] + (["HR@10, time told", "NDCG@10, time told"] * timed)
    for heading in [*headings, "MRR", "coverage", "val NDCG@10", "fit s"]:
        grid.add_column(heading, justify="right")
    for name, hr, ndcg in PUBLISHED.get((data, task.name), ()):
        blank = ["", ""] * timed
        grid.add_row(f"[dim]{name} (published)[/]", f"{hr:.4f}", f"{ndcg:.4f}", *blank)
    for name, row in table.items():
        label = f"{name}, mean of {len(row.test)} seeds" if len(row.test) > 1 else name
        told = pair(row.told) if row.told else ["", ""]
        grid.add_row(
            label,
            *pair(row.test),
            *(told if timed else []),
            f"{_mean(row.test, 'mrr'):.4f}",
            f"{_mean(row.test, 'coverage'):.3f}",
            f"{_mean(row.validation, 'ndcg'):.4f}" if row.validation else "",
            f"{np.mean(row.seconds):.1f}",
        )
    lines = [
        f"{HEED} over {other}, paired bootstrap: NDCG@10 {interval(ndcg)}, HR@10 {interval(hr)}"
        for other, (hr, ndcg) in differences(table).items()
    ]
    return Group(grid, *lines)


def differences(table: Table) -> dict[str, tuple[PairedDifference, PairedDifference]]:
    """How much better Heed is than each other model, the first seed's cases paired: HR, NDCG."""
    if HEED not in table:
        return {}
    ours = table[HEED].test[0].ranks
    return {
        name: (
            paired_bootstrap(row.test[0].ranks, ours, hits, seed=0),
            paired_bootstrap(row.test[0].ranks, ours, ndcg_gains, seed=0),
        )
        for name, row in table.items()
        if name != HEED and len(ours)
    }


def as_json(task: EvaluationTask, table: Table, preset: str) -> dict[str, Any]:
    """Every figure, for machines."""
    return {
        "task": task.name,
        "users": task.train.n_users,
        "items": task.train.n_items,
        "events": task.events,
        "cases": len(task.test),
        "preset": preset,
        "models": {name: numbers(row) for name, row in table.items()},
        "heed_over": over(table),
    }


def over(table: Table) -> dict[str, Any]:
    """`differences`, for machines."""
    return {
        name: {"hr": hr._asdict(), "ndcg": ndcg._asdict()}
        for name, (hr, ndcg) in differences(table).items()
    }


def plot(task: EvaluationTask, table: Table, path: Path, data: str = "") -> None:
    """Bars of NDCG@10 and HR@10 with their standard errors, as a PNG.

    Raises:
        ModuleNotFoundError: without matplotlib, which the extra `plots` installs.
    """
    from matplotlib.figure import Figure

    rows = [(f"{name} (published)", hr, ndcg, 0.0, 0.0, "0.75")
            for name, hr, ndcg in PUBLISHED.get((data, task.name), ())]  # fmt: skip
    for name, row in table.items():
        colour = "tab:blue" if name.startswith(HEED) else "0.55"
        for label, found in ((name, row.test), (f"{name}, time told", row.told)):
            if found:
                hr, ndcg = _errors(found)
                rows.append((label, _mean(found, "hr"), _mean(found, "ndcg"), hr, ndcg, colour))
    figure = Figure(figsize=(11, 1.4 + 0.34 * len(rows)), layout="constrained")
    figure.suptitle(f"{data} {task.name}: the whole catalogue ranked".strip())
    left, right = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(rows))[::-1]
    for axes, title, at in ((left, "NDCG@10", 2), (right, "HR@10", 1)):
        values = [row[at] for row in rows]
        errors = [row[at + 2] for row in rows]
        bars = axes.barh(places, values, xerr=errors, color=[row[5] for row in rows])
        axes.bar_label(bars, labels=[f"{value:.3f}" for value in values], padding=4)
        axes.set_title(title)
        axes.set_yticks(places, [row[0] for row in rows])
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def pair(found: Sequence[RankingMetrics]) -> list[str]:
    """HR and NDCG with their standard errors, as cells."""
    hr, ndcg = _errors(found)
    return [f"{_mean(found, 'hr'):.4f} ±{hr:.4f}", f"{_mean(found, 'ndcg'):.4f} ±{ndcg:.4f}"]


def _errors(found: Sequence[RankingMetrics]) -> tuple[float, float]:
    """Standard errors of HR and NDCG: the seeds share their cases, so they do not shrink them."""
    hr, ndcg = np.mean([metrics.standard_errors() for metrics in found], axis=0)
    return float(hr), float(ndcg)


def _mean(found: Sequence[RankingMetrics], name: str) -> float:
    return float(np.mean([getattr(metrics, name) for metrics in found]))


def interval(found: PairedDifference) -> str:
    """A difference with its interval, as text."""
    return f"{found.difference:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"


def numbers(row: Row) -> dict[str, Any]:
    """One model's figures, for machines."""

    def each(found: Sequence[RankingMetrics]) -> list[dict[str, float]]:
        return [
            {"hr": one.hr, "ndcg": one.ndcg, "mrr": one.mrr, "coverage": one.coverage}
            for one in found
        ]

    return {
        "test": each(row.test),
        "time_told": each(row.told),
        "validation": each(row.validation),
        "seconds": row.seconds,
    }
