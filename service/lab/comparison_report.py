"""Report of a comparison: table, sentences, JSON and plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table as RichTable

from models.evaluation.full_ranking import (
    CaseValues,
    PairedDifference,
    RankingMetrics,
    Ranks,
    bootstrap,
    hits,
    ndcg_gains,
    share_of_users,
)
from service.domain.timestamps import to_rfc3339
from service.lab.comparison import Comparison, ModelResults, new_items_table
from service.lab.protocols import EvaluationTask, Slice, of_new_items, slice_cases
from service.training.judgement import HEED
from service.training.train_and_publish import share_of

# HR@10 and NDCG@10 as published in papers and repositories, by data set and protocol.
PUBLISHED: Mapping[tuple[str, str], Sequence[tuple[str, float, float]]] = {
    ("ml-1m", "leave-one-out"): (
        ("SASRec, binary cross-entropy", 0.239, 0.126),
        ("BERT4Rec", 0.284, 0.154),
        ("gSASRec", 0.300, 0.173),
        ("SASRec, full cross-entropy", 0.3152, 0.1821),
        ("SASRec, 3,000 negatives", 0.3159, 0.1857),
    ),
    ("ml-1m", "hstu"): (
        # By the authors of eSASRec (2025), on events in order.
        ("SASRec, sampled softmax", 0.2929, 0.1684),
        ("HSTU", 0.3037, 0.1719),
        ("eSASRec", 0.3133, 0.1772),
        ("FuXi-alpha", 0.3164, 0.1813),
        # HSTU's preprocessing sorts unstably: a quarter of the users have another last event.
        ("HSTU, other order of events", 0.3097, 0.1720),
        ("HSTU-large, other order of events", 0.3294, 0.1893),
        ("HSTU, mixture of logits, other order of events", 0.3412, 0.1979),
    ),
    # By the authors of eSASRec (2025), and as reported by others.
    ("amazon-beauty", "leave-one-out"): (
        ("S3-Rec", 0.0647, 0.0327),
        ("TIGER", 0.0648, 0.0384),
        ("ActionPiece", 0.0775, 0.0424),
        ("HSTU", 0.0788, 0.0439),
        ("FuXi-alpha", 0.0809, 0.0451),
        ("DuoRec", 0.0845, 0.0443),
        ("SASRec, sampled softmax", 0.0921, 0.0531),
        ("eSASRec", 0.0928, 0.0523),
    ),
}


def render_table(task: EvaluationTask, table: Comparison, data: str = "") -> RenderableType:
    """Render the models side by side, then their differences to Heed and metrics by slice.

    If users take items again, a second table has the same models' metrics for new items. Errors
    are standard errors over cases.
    """
    said = [summarise(task, table)]
    if others := sorted(set(table[HEED].served) - {HEED}):
        said.append(f"{', '.join(others)} ranks better in validation: heed serves it instead.")
    other: list[RenderableType] = []
    if (asked := of_new_items(task)) is not None:
        new = new_items_table(table)
        other = [_metrics_table(asked, new, data), *_difference_lines(new)]
    grid = _metrics_table(task, table, data)
    return Group(grid, *said, *_difference_lines(table), *other, _slice_table(task, table))


def _metrics_table(task: EvaluationTask, table: Comparison, data: str) -> RichTable:
    date = "" if task.date is None else f", trained before {to_rfc3339(task.date)}"
    grid = RichTable(
        title=f"{task.train.n_users:,} users, {task.train.n_items:,} items, "
        f"{len(task.log):,} events; {task.name}, {len(task.test):,} cases{date}, "
        "the whole catalogue ranked"
    )
    grid.add_column("model")
    headings = ("HR@10", "NDCG@10", "HR@10 at time", "NDCG@10 at time", "MRR", "coverage")
    for heading in (*headings, "val NDCG@10", "fit s"):
        grid.add_column(heading, justify="right")
    for name, hr, ndcg in PUBLISHED.get((data, task.name), ()):
        grid.add_row(f"[dim]{name} (published)[/]", f"{hr:.4f}", f"{ndcg:.4f}")
    for name, row in table.items():
        label = f"{name}, mean of {len(row.test)} seeds" if len(row.test) > 1 else name
        grid.add_row(
            label,
            *metric_cells(row.test),
            *(metric_cells(row.test_with_time) if row.test_with_time else ("", "")),
            f"{_mean(row.test, 'mrr'):.4f}",
            f"{_mean(row.test, 'coverage'):.3f}",
            f"{_mean(row.validation, 'ndcg'):.4f}" if row.validation else "",
            f"{np.mean(row.seconds):.1f}",
        )
    return grid


def _difference_lines(table: Comparison) -> list[str]:
    return [
        f"{HEED}{label} over {other}, paired bootstrap: NDCG@10 {format_interval(ndcg)}, "
        f"HR@10 {format_interval(hr)}"
        for label, at_time in (("", False), (" at time", True))
        for other, (hr, ndcg) in differences(table, at_time=at_time).items()
    ]


def summarise(task: EvaluationTask, table: Comparison) -> str:
    """Say in sentences for how many customers Heed and the best baseline are right."""
    is_basket = len(np.unique(task.test.users)) < len(task.test)
    right = "basket holds one of" if is_basket else "item is one of"
    customers, beside = _shares(task, table)
    said = f"For {customers} the next {right} the ten recommended; {beside}."
    if (asked := of_new_items(task)) is None:
        return said
    taken = "next basket holds" if is_basket else "next item is"
    customers, beside = _shares(asked, new_items_table(table))
    return (
        f'{said} That is with "exclude_seen": false. By default, what a customer had is left out: '
        f"for {customers} whose {taken} something new to them, it is among the ten recommended; "
        f"{beside}."
    )


def _shares(task: EvaluationTask, table: Comparison) -> tuple[str, str]:
    """Say for how many customers a target is among the first ten of Heed, and of the best baseline.

    Ablations are left out.
    """
    users = len(np.unique(task.test.users))
    shares = {
        name: float(np.mean([share_of_users(task.test.users, run.ranks) for run in row.test]))
        for name, row in table.items()
        if name == HEED or not name.startswith(HEED)
    }
    heed = share_of(users, shares.pop(HEED), "customers")
    best = max(shares, key=shares.__getitem__)
    count, *_ = share_of(users, shares[best]).split()
    return heed, f"for {count} with the best baseline, {best}"


def differences(
    table: Comparison, *, at_time: bool = False
) -> dict[str, tuple[PairedDifference, PairedDifference]]:
    """Return Heed's paired differences to each other model in HR and NDCG.

    The values of a case are averaged over seeds. With `at_time`, models that use the target's time
    are given it.
    """

    def values(row: ModelResults) -> tuple[CaseValues, CaseValues]:
        found = (at_time and row.test_with_time) or row.test
        return _case_means(found, hits), _case_means(found, ndcg_gains)

    heed = table[HEED]
    if not heed.test[0].n_cases or (at_time and not heed.test_with_time):
        return {}
    ours = values(heed)
    return {
        name: (bootstrap(ours[0] - hr), bootstrap(ours[1] - ndcg))
        for name, row in table.items()
        if name != HEED
        for hr, ndcg in [values(row)]
    }


def _slice_table(task: EvaluationTask, table: Comparison) -> RichTable:
    """Render NDCG@10 by slice of the cases, at the target's time; ablations are left out."""
    rows = {
        name: ModelResults(row.test_with_time or row.test)
        for name, row in table.items()
        if not name.startswith(f"{HEED} without")
    }
    title = "NDCG@10 by slice; models that use the target's time are given it"
    grid = RichTable("", "cases", *rows, title=title)
    grid.columns[0].no_wrap = True
    for column in grid.columns[1:]:
        column.justify = "right"
    before = None
    for each, metrics in _sliced(task, rows):
        if each.by not in {before, "all"}:
            grid.add_section()
            grid.add_row(f"[dim]{each.by}[/]")
        cells = (f"{ndcg:.4f}" for _, ndcg in metrics.values())
        grid.add_row(each.label, f"{each.n_cases:,}", *cells)
        before = each.by
    return grid


def _sliced(
    task: EvaluationTask, table: Comparison
) -> Iterator[tuple[Slice, dict[str, tuple[float, float]]]]:
    """Iterate over the slices of the test cases, with HR and NDCG of each model."""
    values = {
        label: (_case_means(found, hits), _case_means(found, ndcg_gains))
        for label, found in _variants(table)
    }
    for each in slice_cases(task.every_event, task.test):
        yield (
            each,
            {
                label: (
                    float(np.average(hr, weights=each.weights)),
                    float(np.average(ndcg, weights=each.weights)),
                )
                for label, (hr, ndcg) in values.items()
            },
        )


def _variants(table: Comparison) -> Iterator[tuple[str, Sequence[RankingMetrics]]]:
    """Iterate over the models, and those that were also given the target's time."""
    for name, row in table.items():
        yield name, row.test
        if row.test_with_time:
            yield f"{name}, at time", row.test_with_time


def _case_means(
    found: Sequence[RankingMetrics], metric: Callable[[Ranks], CaseValues]
) -> CaseValues:
    """Average a metric of each case over the seeds, [M]."""
    means: CaseValues = np.mean([metric(each.ranks) for each in found], axis=0)
    return means


def to_json(task: EvaluationTask, table: Comparison, preset: str) -> dict[str, Any]:
    asked = of_new_items(task)
    new = {} if asked is None else _figures(new_items_table(table))
    return {
        "task": task.name,
        "users": task.train.n_users,
        "items": task.train.n_items,
        "events": len(task.log),
        "cases": len(task.test),
        "date": None if task.date is None else to_rfc3339(task.date),
        "preset": preset,
        **_figures(table),
        **({} if asked is None else {"new_items": {"cases": len(asked.test), **new}}),
        "slices": [
            {
                "by": each.by,
                "slice": each.label,
                "cases": each.n_cases,
                "models": {
                    label: {"hr": hr, "ndcg": ndcg} for label, (hr, ndcg) in metrics.items()
                },
            }
            for each, metrics in _sliced(task, table)
        ],
    }


def _figures(table: Comparison) -> dict[str, Any]:
    """Return the metrics of each model, and Heed's differences to it."""

    def runs(metrics: Sequence[RankingMetrics]) -> list[dict[str, float]]:
        names = ("hr", "ndcg", "mrr", "coverage")
        return [{name: getattr(run, name) for name in names} for run in metrics]

    def over(*, at_time: bool) -> dict[str, Any]:
        return {
            name: {"hr": hr._asdict(), "ndcg": ndcg._asdict()}
            for name, (hr, ndcg) in differences(table, at_time=at_time).items()
        }

    return {
        "models": {
            name: {
                "test": runs(row.test),
                "test_with_time": runs(row.test_with_time),
                "validation": runs(row.validation),
                "served": row.served,
                "seconds": row.seconds,
            }
            for name, row in table.items()
        },
        "heed_over": over(at_time=False),
        "heed_over_at_time": over(at_time=True),
    }


def draw_plot(task: EvaluationTask, table: Comparison, path: Path, data: str = "") -> None:
    """Draw NDCG@10 and HR@10 with their standard errors as bars, into a PNG.

    Raises:
        ModuleNotFoundError: without matplotlib, which the extra `plots` installs.
    """
    from matplotlib.figure import Figure

    rows = [(f"{name} (published)", hr, ndcg, 0.0, 0.0, "0.75")
            for name, hr, ndcg in PUBLISHED.get((data, task.name), ())]  # fmt: skip
    for label, found in _variants(table):
        colour = "tab:blue" if label.startswith(HEED) else "0.55"
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


def metric_cells(found: Sequence[RankingMetrics]) -> list[str]:
    hr, ndcg = _errors(found)
    return [f"{_mean(found, 'hr'):.4f} ±{hr:.4f}", f"{_mean(found, 'ndcg'):.4f} ±{ndcg:.4f}"]


def _errors(found: Sequence[RankingMetrics]) -> tuple[float, float]:
    """Average the standard errors of HR and NDCG: seeds share cases and do not shrink them."""
    hr, ndcg = np.mean([metrics.standard_errors() for metrics in found], axis=0)
    return float(hr), float(ndcg)


def _mean(found: Sequence[RankingMetrics], name: str) -> float:
    return float(np.mean([getattr(metrics, name) for metrics in found]))


def format_interval(found: PairedDifference) -> str:
    return f"{found.difference:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
