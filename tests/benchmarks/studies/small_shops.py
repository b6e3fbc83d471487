"""What small shops are served, beside the best baseline: customers drawn anew from a data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from models.data.interactions import Interactions
from models.evaluation.baselines import baseline_makers
from models.evaluation.full_ranking import (
    PairedDifference,
    RankingMetrics,
    bootstrap,
    evaluate,
    hits,
    ndcg_gains,
)
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import Holdout
from models.training.presets import choose_preset
from service.lab.comparison import split_newest
from service.lab.comparison_report import format_interval
from service.training.judgement import judge
from service.training.train_and_publish import fit_model
from service.training.training_corpus import StageProgressCallback, TrainingCorpus

NEXT, NEW = "next", "new to the customer"


class Outcome(NamedTuple):
    """What is served to a sample of customers, beside the best baseline of the test."""

    customers: int
    events: int
    question: str  # `NEXT` or `NEW`
    served: str  # as `heed train` chooses it
    similarity: float  # weight of the item similarities
    cases: int
    ours: RankingMetrics
    best: str  # the baseline with the highest NDCG in the test
    theirs: RankingMetrics
    hr: PairedDifference
    ndcg: PairedDifference

    @property
    def holds(self) -> bool:
        """Whether what is served is above the best baseline, or equal within the bootstrap."""
        return min(self.hr.high, self.ndcg.high) >= 0


def draw(log: Interactions, of: int, customers: int, seed: int) -> Interactions:
    """Draw `of` customers of a log, and keep the events of the first so many of them; 0 = all."""
    if not customers:
        return log
    drawn = np.random.default_rng(seed).permutation(log.n_users)[:of][:customers]
    return log.where(np.isin(log.users, drawn))


def study(
    log: Interactions, corpus: TrainingCorpus, seed: int, progress: StageProgressCallback
) -> list[Outcome]:
    """Train and choose on all but the newest events of each customer, and test on these.

    Where customers take items again, the same model is also asked for what is new to them. Nothing
    is chosen by the test but the baseline that is named as the best there.
    """
    (task,) = split_newest(log)
    content = corpus.content[task.items]
    preset = choose_preset(len(log), task.train.n_items)
    every = task.every_event
    assert task.validation is not None
    plan = preset.plan(task.train, content, task.validation, every_event=every, seed=seed)
    fitted = fit_model(plan, progress)
    found = judge(fitted, exclude_seen=task.exclude_seen, progress=progress)
    questions: list[tuple[str, Holdout, bool]] = [(NEXT, task.test, task.exclude_seen)]
    if not task.exclude_seen:
        questions.append((NEW, task.test.where(~task.test.targets_seen()), True))
    outcomes = []
    for question, cases, new_only in questions:
        ours = evaluate(ModelRanker(found.model, content), cases, exclude_seen=new_only)
        baselines = {
            name: evaluate(make(every), cases, exclude_seen=new_only)
            for name, make in baseline_makers(task.log, exclude_seen=new_only).items()
        }
        best = max(baselines, key=lambda name: baselines[name].ndcg)
        theirs = baselines[best]
        outcomes.append(
            Outcome(
                task.train.n_users, len(log), question, found.served, fitted.weights.similarity,
                len(cases), ours, best, theirs,
                _difference(hits(ours.ranks), hits(theirs.ranks)),
                _difference(ndcg_gains(ours.ranks), ndcg_gains(theirs.ranks)),
            )
        )  # fmt: skip
    return outcomes


def _difference(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> PairedDifference:
    return bootstrap(ours - theirs)


def shown(found: Sequence[Outcome], data: str) -> Table:
    """Render a row for each sample and question."""
    title = f"{data}: what is served, and the best baseline of the test, HR@10 / NDCG@10"
    headings = ("customers", "events", "question", "cases", "served", "similarity", "heed",
                "best baseline", "over it, HR@10", "over it, NDCG@10", "holds")  # fmt: skip
    grid = Table(*headings, title=title)
    for one in found:
        grid.add_row(
            f"{one.customers:,}",
            f"{one.events:,}",
            one.question,
            f"{one.cases:,}",
            one.served,
            f"{one.similarity:g}",
            f"{one.ours.hr:.4f} / {one.ours.ndcg:.4f}",
            f"{one.theirs.hr:.4f} / {one.theirs.ndcg:.4f} {one.best}",
            format_interval(one.hr),
            format_interval(one.ndcg),
            "yes" if one.holds else "no",
        )
    return grid


def as_json(found: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the figures as JSON values."""
    return [
        {
            "customers": one.customers, "events": one.events, "question": one.question,
            "cases": one.cases, "served": one.served, "similarity": one.similarity,
            "heed": {"hr": one.ours.hr, "ndcg": one.ours.ndcg},
            "best_baseline": {"name": one.best, "hr": one.theirs.hr, "ndcg": one.theirs.ndcg},
            "over_it": {"hr": one.hr._asdict(), "ndcg": one.ndcg._asdict()}, "holds": one.holds,
        }
        for one in found
    ]  # fmt: skip
