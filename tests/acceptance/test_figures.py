"""Baseline figures on MovieLens 100k, recomputed from the raw file in plain loops.

Nothing of Heed but the fetching has a part in it: events are read, thinned, split, counted and
ranked here in plain loops and float64, from the definitions.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.data.vocabulary import Vocabulary
from models.evaluation.baselines import ease, item_transitions, popularity
from models.evaluation.full_ranking import Ranker, RankingMetrics, evaluate
from service.datasets.movielens import fetch as fetch_movielens
from service.lab.protocols import EvaluationTask, leave_one_out_5_core

README = (Path(__file__).parents[2] / "README.md").read_text()
NAMES = ("popularity", "EASE", "transition counts")  # the columns of the README's table
TOLERANCE = 1e-4  # of scores in float32, relative

Scores = NDArray[np.float64]


class Case(NamedTuple):
    """Items of one user, oldest first; the last is the test case, and the others are learned."""

    user: str
    items: Sequence[int]

    @property
    def seen(self) -> Sequence[int]:
        return self.items[:-1]


class Figures(NamedTuple):
    """Metrics of a ranker, and lower and upper bounds of each rank from the loops."""

    heed: RankingMetrics
    surely: NDArray[np.int64]
    possibly: NDArray[np.int64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where MovieLens 100k lies, fetched."""
    cache = tmp_path_factory.mktemp("cache")
    fetch_movielens("ml-100k", cache)
    return cache


@pytest.fixture(scope="module")
def task(folder: Path) -> EvaluationTask:
    """Leave-one-out over the 5-core, as `heed benchmark` has it."""
    users, items = Vocabulary(), Vocabulary()
    events = list(fetch_movielens("ml-100k", folder).events())
    log = Interactions.from_columns(
        [users.add(event.user_id) for event in events],
        [items.add(event.item_id) for event in events],
        [event.timestamp or 0 for event in events],
        n_users=len(users),
        n_items=len(items),
    )
    return leave_one_out_5_core(log)


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[Case]:
    """The cases of leave-one-out over the 5-core, read from the raw file.

    Users come as the file first names them, whether or not that rating is kept.
    """
    (path,) = folder.rglob("ml-100k.inter")
    with path.open(newline="") as file:
        rows = [(row[0], row[1], int(row[3])) for row in list(csv.reader(file, "excel-tab"))[1:]]
    by_user: dict[str, list[tuple[int, int]]] = {row[0]: [] for row in rows}
    while True:
        users, films = Counter(row[0] for row in rows), Counter(row[1] for row in rows)
        kept = [row for row in rows if users[row[0]] >= 5 and films[row[1]] >= 5]
        if len(kept) == len(rows):
            break
        rows = kept
    numbers = {film: number for number, film in enumerate(dict.fromkeys(row[1] for row in rows))}
    for user, film, time in rows:
        by_user[user].append((time, numbers[film]))
    return [
        Case(user, [film for _, film in sorted(did, key=lambda each: each[0])])
        for user, did in by_user.items()
        if did
    ]


@pytest.fixture(scope="module")
def figures(task: EvaluationTask, cases: list[Case]) -> dict[str, Figures]:
    """Every baseline by both ways."""
    fits: list[Callable[[Interactions], Ranker]]
    fits = [popularity, ease, item_transitions]
    slow = (by_popularity(cases), by_ease(cases), by_transitions(cases))
    return {
        name: Figures(
            evaluate(fit(task.every_event), task.test, exclude_seen=True),
            *ahead(scores, cases),
        )
        for name, fit, scores in zip(NAMES, fits, slow, strict=True)
    }


def n_items(cases: list[Case]) -> int:
    return 1 + max(max(case.items) for case in cases)


def by_popularity(cases: list[Case]) -> Scores:
    """How often each film was rated before the cases, for everyone."""
    counts = Counter(film for case in cases for film in case.seen)
    row = [float(counts[film]) for film in range(n_items(cases))]
    return np.array([row] * len(cases))


def by_ease(cases: list[Case]) -> Scores:
    """B = I - P diag(P)^-1 with P = (X'X + 200 I)^-1, from what was seen before the case."""
    n = n_items(cases)
    seen = np.zeros((len(cases), n))
    for row, case in enumerate(cases):
        seen[row, list(case.seen)] = 1
    inverse = np.linalg.inv(seen.T @ seen + 200 * np.eye(n))
    weights: Scores = np.eye(n) - inverse / np.diag(inverse)
    return seen @ weights


def by_transitions(cases: list[Case]) -> Scores:
    """What followed the twenty newest: 1 / distance up to twenty, times .7 for each step back."""
    n = n_items(cases)
    counts = Counter(film for case in cases for film in case.seen)
    follows = np.zeros((n, n))
    for case in cases:
        for place, film in enumerate(case.seen):
            for distance, later in enumerate(case.seen[place + 1 : place + 21], 1):
                follows[film, later] += 1 / distance
    damp = np.array([(counts[film] + 5) ** -0.2 for film in range(n)])
    rows = [
        sum((0.7**age * follows[film] for age, film in enumerate(case.seen[::-1][:20])), 0 * damp)
        for case in cases
    ]
    scores: Scores = np.array(rows) * damp
    return scores


def ahead(scores: Scores, cases: list[Case]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return lower and upper bounds of the number of unseen films ranked above each target."""
    surely, possibly = [], []
    for row, case in zip(scores, cases, strict=True):
        target = case.items[-1]
        rivals = np.array(sorted(set(range(len(row))) - set(case.seen) - {target}))
        margin = TOLERANCE * max(abs(row[target]), np.abs(row).max() * 1e-2)
        surely.append(int((row[rivals] > row[target] + margin).sum()))
        possibly.append(int((row[rivals] >= row[target] - margin).sum()))
    return np.array(surely), np.array(possibly)


def test_holdouts_agree(task: EvaluationTask, cases: list[Case]) -> None:
    """The protocol and the loops agree on users, items, events and history lengths."""
    assert (task.train.n_users, task.train.n_items) == (len(cases), n_items(cases))
    assert task.train.n_items == len({film for case in cases for film in case.items})
    assert len(task.log) == sum(len(case.items) for case in cases)
    lengths = sorted(len(case.seen) for case in cases)
    assert sorted(task.every_event.lengths.tolist()) == lengths


@pytest.mark.parametrize("name", NAMES)
def test_ranks_are_those_of_loops(
    figures: dict[str, Figures], task: EvaluationTask, cases: list[Case], name: str
) -> None:
    """Each rank lies within the bounds of the loops, which differ only by float32 rounding."""
    found = figures[name]
    assert task.test.users.tolist() == list(range(len(cases)))
    ranks = found.heed.ranks
    assert (found.surely <= ranks).all()
    assert (ranks <= found.possibly).all()
    assert (found.surely == found.possibly).mean() > (0 if name == "popularity" else 0.9)
    if name == "popularity":  # whole numbers: ties are ties, and count against us
        assert (ranks == found.possibly).all()


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_those_of_loops_and_of_the_readme(
    figures: dict[str, Figures], name: str
) -> None:
    """HR@10 and NDCG@10 lie within the bounds of the loops and equal the README's table."""
    found = figures[name]
    hits = [[rank < 10 for rank in ranks] for ranks in (found.possibly, found.surely)]
    gains = [
        [1 / math.log2(rank + 2) if rank < 10 else 0.0 for rank in ranks]
        for ranks in (found.possibly, found.surely)
    ]
    assert np.mean(hits[0]) <= found.heed.hr <= np.mean(hits[1])
    assert np.mean(gains[0]) - 1e-9 <= found.heed.ndcg <= np.mean(gains[1]) + 1e-9
    (row,) = re.findall(r"^\| MovieLens 100k .*$", README, re.MULTILINE)
    shown = [cell.strip(" *") for cell in row.strip("|").split("|")][1 + NAMES.index(name)]
    hr, ndcg = (float(number) for number in shown.split("/"))
    assert found.heed.hr == pytest.approx(hr, abs=6e-4)
    assert found.heed.ndcg == pytest.approx(ndcg, abs=6e-4)
