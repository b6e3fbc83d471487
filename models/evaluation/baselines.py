"""Baseline rankers: popularity, of all time and recent, personal repeats, transitions and EASE.

Each is fitted to a log, ignores dislikes, is deterministic, and satisfies
`models.evaluation.full_ranking.Ranker`. Only `WeekPopularity` uses the times of requests. Fitting
is collective over the shards of the log, and so are the scores of `WeekPopularity`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from models.compute.device import SINGLE_PROCESS, Processes
from models.data.interactions import Interactions
from models.evaluation.full_ranking import Ranker
from models.recommender.co_occurrence import MAX_EASE_ITEMS, RIDGE, ease_weights, transition_matrix
from models.recommender.recommender import BOUGHT_BEFORE, EASE_NAME, TRANSITIONS

_DEPTH = (
    20  # of `item_transitions`: newest items that count, and the largest distance within a pair
)
_DECAY = 0.7  # of an item's weight for each newer one
_DAMPING = 0.2  # exponent of the popularity that scores are divided by

_WEEK = 7 * 86_400 * 1_000_000  # microseconds
_MAX_TIME = 2**62  # microseconds: beyond all times
_COUNTS = 2**20  # of items in weeks that are held at once

# By which names popularity is reported; the others' are those of `baseline_model`.
POPULARITY, WEEK = "popularity", "popularity of 7 days"


def baseline_makers(
    log: Interactions, *, exclude_seen: bool
) -> dict[str, Callable[[Interactions], Ranker]]:
    """Return the baselines that suit a log: by name, how to fit each to the training events.

    `log` has all events: the popularity of 7 days reads those before each request. With
    `exclude_seen` items of the user's history are no candidates, so that taking them again is no
    baseline.
    """
    makers: dict[str, Callable[[Interactions], Ranker]] = {POPULARITY: popularity}
    times, shards = log.timestamps, log.shards
    first = shards.min(int(times.min(initial=_MAX_TIME)))
    if first < shards.max(int(times.max(initial=-_MAX_TIME))):
        makers[WEEK] = partial(WeekPopularity.fit, log=log)
    if not exclude_seen:
        makers[BOUGHT_BEFORE] = repeats
    if log.n_items <= MAX_EASE_ITEMS:
        makers[EASE_NAME] = ease
    return makers | {TRANSITIONS: item_transitions}


Users = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Baseline:
    """Scores [B, n_items] by a function of a history and rows of its users [B]."""

    n_items: int
    score: Callable[[Interactions, Users], NDArray[np.float32]]

    def scores(
        self, history: Interactions, users: Users, _times: object = None, /
    ) -> NDArray[np.float32]:
        _same_catalogue(history, self.n_items)
        return self.score(history, users)


def popularity(log: Interactions) -> Baseline:
    """Rank items by their number of events, the same for all users."""
    counts = log.liked().total_item_counts().astype(np.float32)
    return Baseline(
        log.n_items, lambda _, users: np.broadcast_to(counts, (len(users), len(counts)))
    )


@dataclass(frozen=True, slots=True, eq=False)
class WeekPopularity:
    """Ranks items by the events of all users in the 7 days before the request, then by popularity.

    Only events strictly before the request are read. A request without a time is at the time of the
    user's newest event.
    """

    items: NDArray[np.int32]  # [E] of all users' events, oldest first
    timestamps: NDArray[np.int64]  # [E] microseconds UTC
    share: NDArray[np.float32]  # [n_items] popularity, below 1
    shards: Processes = SINGLE_PROCESS  # items and timestamps are those of one

    @classmethod
    def fit(cls, train: Interactions, log: Interactions) -> Self:
        """Sort the events of `log` by time, and count those of `train` for the popularity.

        `log` has the events of the time of the requests, `train` those before the test.
        """
        events = log.liked()
        order = np.argsort(events.timestamps, kind="stable")
        share = _popularity_share(train)
        return cls(events.items[order], events.timestamps[order], share, log.shards)

    def scores(
        self, history: Interactions, users: NDArray[np.int32], times: NDArray[np.int64] | None, /
    ) -> NDArray[np.float32]:
        """The counts of the week + popularity in [0, 1), [B, n_items].

        Collective over the shards: each counts its events before the requests of all.
        """
        _same_catalogue(history, len(self.share))
        if times is None:
            # Without a history, a week before all events.
            times = np.full(len(users), np.iinfo(np.int64).min + _WEEK)
            batch, newest = history.gather(users, last=1)
            times[batch] = history.timestamps[newest]
        scores = np.tile(self.share, (len(users), 1))
        rows = max(1, _COUNTS // max(1, len(self.share)))
        for shard, asked in enumerate(self.shards.gather_objects(times)):
            for start in range(0, len(asked), rows):
                counts = self.shards.sum(self._week_counts(asked[start : start + rows]))
                if shard == self.shards.index:
                    scores[start : start + rows] += counts
        return scores

    def _week_counts(self, times: NDArray[np.int64]) -> NDArray[np.int32]:
        """Count this shard's events of each item in the weeks before some times, [n, n_items]."""
        counts = np.zeros((len(times), len(self.share)), dtype=np.int32)
        starts, stops = np.searchsorted(self.timestamps, [times - _WEEK, times])
        for row, week in enumerate(map(slice, starts, stops)):
            counts[row] = np.bincount(self.items[week], minlength=len(self.share))
        return counts


def repeats(log: Interactions) -> Baseline:
    """Rank items by the user's own number of events, then by popularity in [0, 1)."""
    share = _popularity_share(log)

    def score(history: Interactions, users: Users) -> NDArray[np.float32]:
        batch, events = history.gather(users)
        liked = ~history.disliked[events]
        flat = batch[liked] * len(share) + history.items[events[liked]]
        own = np.bincount(flat, minlength=len(users) * len(share))
        return own.reshape(len(users), len(share)).astype(np.float32) + share

    return Baseline(log.n_items, score)


def item_transitions(log: Interactions) -> Baseline:
    """Rank items by their transition counts from the user's last items.

    score(c) = sum over k < 20 of 0.7**k * M[item k from the end, c] / (count(c) + 5)**0.2, where M
    sums 1 / distance over pairs at most 20 apart; 0 for an empty history. Memory: 160 * E bytes at
    most.
    """
    damp = ((log.liked().total_item_counts() + 5.0) ** -_DAMPING).astype(np.float32)
    matrix = transition_matrix(log, window=_DEPTH, power=1.0)  # sparse [n_items, n_items]

    def score(history: Interactions, users: Users) -> NDArray[np.float32]:
        batch, events = history.gather(users, last=_DEPTH)
        age = history.offsets[users[batch] + 1] - 1 - events  # 0 = the user's newest event
        recent = torch.sparse_coo_tensor(
            torch.from_numpy(np.stack([batch, history.items[events].astype(np.int64)])),
            torch.from_numpy((_DECAY**age).astype(np.float32)),
            (len(users), history.n_items),
            check_invariants=True,
        )
        with warnings.catch_warnings():  # torch multiplies in CSR, which it calls a beta
            warnings.filterwarnings("ignore", "Sparse CSR tensor support")
            sums: NDArray[np.float32] = torch.sparse.mm(recent, matrix).to_dense().numpy()
        return sums * damp

    return Baseline(log.n_items, score)


def ease(log: Interactions, *, ridge: float = RIDGE) -> Baseline:
    """Rank items by the sum of their EASE weights from the user's items, in any order.

    See `models.recommender.co_occurrence`; errors as in `ease_weights`.
    """
    weights = ease_weights(log, ridge=ridge)

    def score(history: Interactions, users: Users) -> NDArray[np.float32]:
        batch, events = history.gather(users)
        taken = np.zeros((len(users), history.n_items), dtype=np.float32)
        liked = ~history.disliked[events]
        taken[batch[liked], history.items[events[liked]]] = 1.0
        # torch.mm instead of numpy: one threading policy for all heavy products
        return torch.mm(torch.from_numpy(taken), weights).numpy()

    return Baseline(log.n_items, score)


def _popularity_share(log: Interactions) -> NDArray[np.float32]:
    """The events of each item divided by one more than the most of any, [n_items]."""
    counts = log.liked().total_item_counts()
    share: NDArray[np.float32] = (counts / (counts.max(initial=0) + 1)).astype(np.float32)
    return share


def _same_catalogue(history: Interactions, n_items: int) -> None:
    if history.n_items != n_items:
        raise ValueError(f"fitted on {n_items} items, the history has {history.n_items}")
