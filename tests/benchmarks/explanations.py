"""Explanations compared with leaving events out of the whole model, over the users of a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory
from models.ranking.contributions import contributions
from models.ranking.explanation import TargetRows, effects_of, explain, scores_without
from models.ranking.recommend import recommend
from models.ranking.scoring import score
from service.domain.errors import Invalid
from tests.benchmarks.harness.data import prepare_data, users_by_events
from tests.benchmarks.harness.jobs import load_data
from tests.benchmarks.harness.tables import print_machine, rounds_of, table

Floats = NDArray[np.float64]

_FEWEST, _MOST = 6, 1_000  # events of a case: older events of a longer history are collapsed
_LIST = 10  # items of a list, of which a case explains one
_NAMED = 2  # reasons of an item


class Case(NamedTuple):
    """One item of one user's recommendations, with n events and profile entries."""

    remainder: float  # |contributions + prior - score|
    contributed: Floats  # [n] contributions
    estimated: Floats  # [n] estimated effects
    exact: Floats  # [n] effects by leaving out
    explain_ms: float  # ten reasons of each of ten items
    effects_ms: float  # estimated effects besides


def explanations(
    data: Annotated[Path, typer.Option("--data", help="With a trained model.")],
    cases: Annotated[int, typer.Option(min=1, help="Users, of each one item is explained.")] = 150,
) -> None:
    """Compare contributions and effects with leaving each event out of the whole model."""
    print_machine("one thread")
    rng = np.random.default_rng(0)
    with prepare_data(data) as ground:
        counts = users_by_events(ground.data)
        able = sorted(user for user, count in counts.items() if _FEWEST <= count <= _MOST)
        if not able:
            raise Invalid("", f"{data} has no user with {_FEWEST} to {_MOST} events")
        drawn = [able[at] for at in rng.permutation(len(able))[:cases]]
        loaded = load_data(ground.data, drawn)
    users = list(loaded.users.values())
    found = [_case(loaded.snapshot, users[n], rng) for n in rounds_of(len(users), "explaining")]

    def mean(of: Callable[[Case], float]) -> str:
        return f"{np.nanmean([of(case) for case in found]):.3f}"

    named = [_named(case) for case in found]
    raising = sum(int((case.exact[at] > 0).sum()) for case, at in zip(found, named, strict=True))
    table(
        f"Explanations of {len(found)} recommendations, {data}",
        ("figure", ""),
        (
            ("largest |contributions + prior - score|", f"{max(c.remainder for c in found):.1e}"),
            ("contributions and exact effects, Pearson",
             mean(lambda c: _pearson(c.contributed, c.exact))),
            ("contributions and exact effects, Spearman",
             mean(lambda c: _spearman(c.contributed, c.exact))),
            ("contributions with the sign of the exact effect",
             mean(lambda c: float(((c.contributed > 0) == (c.exact > 0)).mean()))),
            ("estimated and exact effects, Pearson",
             mean(lambda c: _pearson(c.estimated, c.exact))),
            ("estimated and exact effects, Spearman",
             mean(lambda c: _spearman(c.estimated, c.exact))),
            (f"first {_NAMED} reasons without which the score is lower",
             f"{raising} of {sum(map(len, named))}"),
            ("ten reasons of ten items, CPU ms", mean(lambda c: c.explain_ms)),
            ("their effects besides, CPU ms", mean(lambda c: c.effects_ms)),
        ),
    )  # fmt: skip


def _case(snapshot: Snapshot, user: UserMemory, rng: np.random.Generator) -> Case:
    ranked = recommend(
        snapshot,
        user,
        limit=_LIST,
        allowed=snapshot.is_known(np.arange(len(snapshot.catalogue))),
        excluded=user.history.rows[user.history.rows >= 0].astype(np.int64),
    )
    row = int(ranked.rows[rng.integers(len(ranked.rows))])
    made = contributions(snapshot, user, torch.tensor([row]))
    contributed = made.each[0].double().numpy()
    total = float(score(snapshot, user, np.array([row])).total[0])
    named = TargetRows(made, 0, row, np.arange(len(user.source)))
    (effects,) = effects_of(snapshot, user, [named])
    sources = user.source.tolist()
    less = scores_without(snapshot, user, {source: [row] for source in sources})
    plain = _seconds(lambda: explain(snapshot, user, ranked.rows, _LIST))
    both = _seconds(lambda: explain(snapshot, user, ranked.rows, _LIST, effects="estimate"))
    return Case(
        abs(contributed.sum() + float(snapshot.tables.prior[row]) - total),
        contributed,
        np.array([effect for effect, _ in effects]),
        np.array([total - less[source, row] for source in sources]),
        1e3 * plain,
        1e3 * (both - plain),
    )


def _named(case: Case) -> NDArray[np.int64]:
    """Return the places of the events that are named as reasons: the largest contributions."""
    places = np.argsort(-case.contributed, kind="stable")[:_NAMED]
    return places[case.contributed[places] > 0]


def _seconds(job: Callable[[], object]) -> float:
    """Return the CPU time of a job, its second run."""
    job()
    start = time.process_time()
    job()
    return time.process_time() - start


def _pearson(one: Floats, other: Floats) -> float:
    """Return the correlation of two columns; nan if one is constant."""
    if len(one) < 2 or not one.std() or not other.std():
        return float("nan")
    return float(np.corrcoef(one, other)[0, 1])


def _spearman(one: Floats, other: Floats) -> float:
    ranks = (np.argsort(np.argsort(column)).astype(np.float64) for column in (one, other))
    return _pearson(*ranks)
