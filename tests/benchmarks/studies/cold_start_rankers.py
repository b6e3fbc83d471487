"""Cold-start splits of a task, and rankers that stand beside the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.evaluation.full_ranking import Ranker
from models.evaluation.splits import Holdout
from service.lab.protocols import EvaluationTask
from tests.support.small import newest_events

_NEWEST = 20  # events whose texts say what a user likes


class ColdItems(NamedTuple):
    """A task in which some items were never seen in training. All parts are over all N items."""

    hidden: NDArray[np.bool_]  # [N]
    train: Interactions  # without an event on a hidden item
    validation: Holdout | None  # likewise, nor a case whose target is hidden
    test: Holdout  # the cases whose target is hidden; what happened before them is whole

    def fitting(self) -> tuple[Interactions, Holdout | None]:
        """Training and validation over the items that are left, renumbered in their order."""
        rows = np.cumsum(~self.hidden, dtype=np.int32) - 1
        n_items = int((~self.hidden).sum())

        def over(log: Interactions) -> Interactions:
            return replace(log, items=rows[log.items].astype(np.int32), n_items=n_items)

        train, cases = over(self.train), self.validation
        if cases is None:
            return train, None
        history = train if cases.history is self.train else over(cases.history)
        targets = rows[cases.targets].astype(np.int32)
        return train, Holdout(cases.users, targets, cases.timestamps, history)


def cold_items(task: EvaluationTask, *, share: float = 0.1, seed: int = 0) -> ColdItems:
    """Hide a random share of a task's items from training, and judge by them alone.

    Raises ValueError for a share outside (0, 1).
    """
    if not 0 < share < 1:
        raise ValueError(f"share must lie in (0, 1), got {share}")
    n_items = task.train.n_items
    hidden = np.zeros(n_items, dtype=np.bool_)
    hidden[np.random.default_rng(seed).permutation(n_items)[: round(share * n_items)]] = True

    def without(log: Interactions) -> Interactions:
        return log.where(~hidden[log.items])

    train, validation = without(task.train), task.validation
    if validation is not None:
        history = train if validation.history is task.train else without(validation.history)
        validation = replace(validation.where(~hidden[validation.targets]), history=history)
    return ColdItems(hidden, train, validation, task.test.where(hidden[task.test.targets]))


# ------------------------------------------------------------------------------ rankers


@dataclass(frozen=True, slots=True, eq=False)
class Among:
    """Another ranker's order of some items; the others never stand before them."""

    ranker: Ranker
    items: NDArray[np.bool_]  # [N]

    def scores(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        """[B, n_items], -inf for what is not among the items."""
        scores = self.ranker.scores(history, users, request_times)
        return np.where(self.items, scores, np.float32(-np.inf))


@dataclass(frozen=True, slots=True, eq=False)
class Shortened:
    """Another ranker, which is shown each user's newest events and nothing else."""

    ranker: Ranker
    events: int

    def scores(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        """[B, n_items], the other's."""
        return self.ranker.scores(newest_events(history, self.events), users, request_times)


@dataclass(frozen=True, slots=True, eq=False)
class AtRandom:
    """An order for each user that nothing is known for."""

    seed: int = 0

    def scores(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32]:
        """[B, n_items] in [0, 1), the same again for a user."""
        drawn = [np.random.default_rng((self.seed, user)) for user in users.tolist()]
        rows = [each.random(history.n_items, dtype=np.float32) for each in drawn]
        return np.stack(rows) if rows else np.zeros((0, history.n_items), dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Likeness:
    """Similarity of an item's text to the texts of the user's newest items."""

    content: NDArray[np.float32]  # [N, D] unit vectors, zero without a text

    def scores(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32]:
        """[B, n_items] the sum of cosines to the newest events, dislikes aside."""
        history = history.liked()
        batch, events = history.gather(users, last=_NEWEST)
        liked = np.zeros((len(users), self.content.shape[1]), dtype=np.float32)
        np.add.at(liked, batch, self.content[history.items[events]])
        scores: NDArray[np.float32] = liked @ self.content.T
        return scores
