"""Explanations compared with leaving events out of the whole model, over the users of a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table

from models.catalogue.snapshot import Snapshot
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, build_memory
from models.ranking.contributions import contributions
from models.ranking.explanation import effects_of, explain, scores_without
from models.ranking.recommend import recommend
from models.ranking.scoring import score
from service.domain.settings import Settings
from service.engine.compose import compose
from tests.benchmarks.workload.questions import AT

Floats = NDArray[np.float64]

FEWEST = 6  # events of a case: of fewer, five deleted leave nothing
_LIST = 10  # items of a list, of which a case explains one
_DELETED = 5  # events
_RANDOM = 5  # draws of events to delete


@dataclass(frozen=True, slots=True)
class Case:
    """One item of one user's recommendations."""

    events: int
    remainder: float  # |contributions + prior - score|
    contributed: Floats  # [n] contribution of each event and profile entry
    estimated: Floats  # [n] estimated effects
    exact: Floats  # [n] effects by leaving out
    contributed_loss: float  # of the score without the five of largest contribution
    greedy_loss: float  # without five, each chosen for what the score then loses most by
    random_loss: float  # without five drawn ones, mean
    explain_ms: float  # ten reasons of each of ten items
    effects_ms: float  # the same with estimated effects, more than that


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over cases, but for the largest remainder."""

    cases: int
    events: float
    remainder: float
    contribution_pearson: float
    contribution_spearman: float
    contribution_signs: float  # share of the contributions that have the sign of the exact effect
    effect_pearson: float
    effect_spearman: float
    strongest_among_three: float  # of the estimated effects, the event of largest exact effect
    deletion: float  # loss by contributions over greedy loss, both summed over cases
    random_deletion: float
    explain_ms: float
    effects_ms: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def measure(
    data: Path, cases: int, seed: int = 0, progress: Callable[[int], None] | None = None
) -> Figures:
    """Explain one recommended item of each of some drawn users, and leave every event out.

    Args:
        data: a data directory; a long history's older events are collapsed, such users are left
            out.
        cases: number of users.
        seed: of the users and the items.
        progress: called with the number of cases done.
    """
    rng = np.random.default_rng(seed)

    async def load() -> tuple[Snapshot, list[UserHistory]]:
        parts = compose(Settings.read({"data": data}), threads=1)
        try:
            await parts.live.open()
            histories: list[UserHistory] = []
            users = list(parts.store.scan_user_ids())
            for at in rng.permutation(len(users)):
                events = await parts.memories.load(users[at], now=AT)
                if FEWEST <= len(events.rows) <= 1_000:
                    histories.append(parts.memories.history(parts.live.snapshot, events))
                if len(histories) == cases:
                    break
            return parts.live.snapshot, histories
        finally:
            await parts.close()

    snapshot, histories = asyncio.run(load())
    found = []
    for done, history in enumerate(histories, 1):
        found.append(_case(snapshot, history, rng))
        if progress is not None:
            progress(done)
    return summarise(found)


def _case(snapshot: Snapshot, history: UserHistory, rng: np.random.Generator) -> Case:
    at = int(history.timestamps.max()) + 3_600_000_000  # an hour after the newest event
    user = build_memory(snapshot, history, at)
    allowed = snapshot.is_known(np.arange(len(snapshot.catalogue)))
    ranked = recommend(
        snapshot,
        user,
        limit=_LIST,
        allowed=allowed,
        excluded=history.rows[history.rows >= 0].astype(np.int64),
    )
    row = int(ranked.rows[rng.integers(len(ranked.rows))])
    made = contributions(snapshot, user, torch.tensor([row]))
    total = float(score(snapshot, user, np.array([row])).total[0])
    prior = float(snapshot.tables.prior[row])
    every = np.arange(len(user.source))
    ((effects,),) = effects_of(snapshot, user, [made], [[every]])
    exact = _losses(snapshot, user, row, total)
    contributed = made.each[0].double().numpy()
    order = user.source[np.argsort(-contributed, kind="stable")]
    plain = _seconds(lambda: explain(snapshot, user, ranked.rows, _LIST))
    both = _seconds(lambda: explain(snapshot, user, ranked.rows, _LIST, effects="estimate"))
    events = user.source[user.source >= 0]
    drawn = [rng.choice(events, min(_DELETED, len(events)), replace=False) for _ in range(_RANDOM)]
    return Case(
        len(history.rows),
        abs(contributed.sum() + prior - total),
        contributed,
        np.array([effect for effect, _ in effects]),
        exact,
        total - _total_without(snapshot, history, at, order[:_DELETED], row),
        total - _greedy(snapshot, history, at, row),
        total - float(np.mean([_total_without(snapshot, history, at, d, row) for d in drawn])),
        1e3 * plain,
        1e3 * (both - plain),
    )


def _losses(snapshot: Snapshot, user: UserMemory, row: int, total: float) -> Floats:
    """Return what the score loses without each row of the memory."""
    sources = user.source.tolist()
    less = scores_without(snapshot, user, {source: [row] for source in sources})
    return np.array([total - less[source, row] for source in sources])


def _total_without(
    snapshot: Snapshot, history: UserHistory, at: int, sources: NDArray[np.int64], row: int
) -> float:
    """Return the score without several events and profile entries."""
    for source in sorted(sources.tolist(), reverse=True):  # from the end: places stay
        history = history.without(source)
    user = build_memory(snapshot, history, at)
    return float(score(snapshot, user, np.array([row])).total[0])


def _greedy(snapshot: Snapshot, history: UserHistory, at: int, row: int) -> float:
    """Return the score without five rows, each chosen for the lowest score without it."""
    total = 0.0
    for _ in range(_DELETED):
        user = build_memory(snapshot, history, at)
        total = float(score(snapshot, user, np.array([row])).total[0])
        losses = _losses(snapshot, user, row, total)
        if not len(losses):
            break
        best = int(losses.argmax())
        total -= float(losses[best])
        history = history.without(int(user.source[best]))
    return total


def _seconds(job: Callable[[], object]) -> float:
    """Return the CPU time of a job, its second run."""
    job()
    start = time.process_time()
    job()
    return time.process_time() - start


def summarise(cases: Sequence[Case]) -> Figures:
    """Reduce cases to their figures."""

    def mean(of: Callable[[Case], float]) -> float:
        return float(np.nanmean([of(case) for case in cases]))

    greedy = sum(case.greedy_loss for case in cases)
    return Figures(
        cases=len(cases),
        events=mean(lambda case: case.events),
        remainder=max(case.remainder for case in cases),
        contribution_pearson=mean(lambda case: pearson(case.contributed, case.exact)),
        contribution_spearman=mean(lambda case: pearson(*_ranks(case.contributed, case.exact))),
        contribution_signs=mean(
            lambda case: float(((case.contributed > 0) == (case.exact > 0)).mean())
        ),
        effect_pearson=mean(lambda case: pearson(case.estimated, case.exact)),
        effect_spearman=mean(lambda case: pearson(*_ranks(case.estimated, case.exact))),
        strongest_among_three=mean(
            lambda case: float(case.exact.argmax() in np.argsort(-case.estimated)[:3])
        ),
        deletion=sum(case.contributed_loss for case in cases) / greedy,
        random_deletion=sum(case.random_loss for case in cases) / greedy,
        explain_ms=mean(lambda case: case.explain_ms),
        effects_ms=mean(lambda case: case.effects_ms),
    )


def pearson(one: Floats, other: Floats) -> float:
    """Return the correlation of two columns; nan where one is constant."""
    if len(one) < 2 or not one.std() or not other.std():
        return float("nan")
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(*columns: Floats) -> tuple[Floats, ...]:
    return tuple(np.argsort(np.argsort(column)).astype(np.float64) for column in columns)


def shown(found: Figures, data: Path) -> Table:
    """Make the table of the report."""
    table = Table(title=f"Explanations of {found.cases} recommendations, {data}")
    table.add_column("figure")
    table.add_column("", justify="right")
    rows = [
        ("events a case", f"{found.events:.0f}"),
        ("largest |contributions + prior - score|", f"{found.remainder:.1e}"),
        ("contributions and exact effects, Pearson", f"{found.contribution_pearson:.3f}"),
        ("contributions and exact effects, Spearman", f"{found.contribution_spearman:.3f}"),
        ("contributions with the sign of the exact effect", f"{found.contribution_signs:.3f}"),
        ("estimated and exact effects, Pearson", f"{found.effect_pearson:.4f}"),
        ("estimated and exact effects, Spearman", f"{found.effect_spearman:.3f}"),
        ("strongest event among the first three estimates", f"{found.strongest_among_three:.3f}"),
        ("loss without the five largest contributions / greedy five", f"{found.deletion:.3f}"),
        ("loss without five drawn events / greedy five", f"{found.random_deletion:.3f}"),
        ("ten reasons of ten items, CPU ms", f"{found.explain_ms:.1f}"),
        ("their effects besides, CPU ms", f"{found.effects_ms:.1f}"),
    ]
    for row in rows:
        table.add_row(*row)
    return table
