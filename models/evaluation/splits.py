"""Splits of a log into training events and held-out cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.data.vocabulary import is_first_occurrence, user_item_keys


@dataclass(frozen=True, slots=True, eq=False)
class Holdout:
    """Cases to rank: `users[m]` took `targets[m]` at `timestamps[m]`.

    `history` holds each user's visible events, none from the target's time on. A user may have
    several cases, or none.
    """

    users: NDArray[np.int32]  # [M] rows of history
    targets: NDArray[np.int32]  # [M] item rows
    timestamps: NDArray[np.int64]  # [M] microseconds UTC: the target's own time
    history: Interactions

    def __len__(self) -> int:
        return len(self.users)

    def where(self, keep: NDArray[np.bool_]) -> Holdout:
        return Holdout(self.users[keep], self.targets[keep], self.timestamps[keep], self.history)

    def targets_seen(self) -> NDArray[np.bool_]:
        """[M] whether the target is among the user's visible events."""
        n = self.history.n_items
        seen = user_item_keys(self.history.users, self.history.items, n)
        return np.isin(user_item_keys(self.users, self.targets, n), seen)

    def new_to_user(self) -> Holdout:
        return self.where(~self.targets_seen())

    def gaps(self) -> NDArray[np.int64]:
        """[M] microseconds from the newest visible event to the target; -1 without any."""
        ends = self.history.offsets[self.users + 1]
        known = ends > self.history.offsets[self.users]
        gaps = np.full(len(self), -1, dtype=np.int64)
        gaps[known] = self.timestamps[known] - self.history.timestamps[ends[known] - 1]
        return gaps


class Split(NamedTuple):
    train: Interactions
    validation: Holdout
    test: Holdout


def leave_one_out(log: Interactions) -> Split:
    """Take each user's last event as the test case, the one before it as the validation case.

    The history of a test case includes the validation event. Users with fewer than three events
    are only trained on (the rule of SASRec's reference code, Kang & McAuley 2018). Dislikes are no
    cases and do not count for the rule; those after a case are dropped.
    """
    held = log.liked().lengths >= 3
    before_test, test = _hold_last(log, held)
    train, validation = _hold_last(before_test, held)
    return Split(train, validation, test)


def leave_last_basket_out(log: Interactions) -> tuple[Interactions, Holdout]:
    """Take each user's last basket, the liked items with the last timestamp, as test cases.

    Only of users with earlier events and three liked events in all; everything else is as in
    `leave_one_out`. Every item counts once.
    """
    liked = ~log.disliked
    last = np.full(log.n_users, np.iinfo(np.int64).min)
    np.maximum.at(last, log.users[liked], log.timestamps[liked])
    first = log.timestamps[np.minimum(log.offsets[:-1], max(0, len(log) - 1))] if len(log) else last
    held = (log.liked().lengths >= 3) & (first < last)
    rest = log.where(~held[log.users] | (log.timestamps < last[log.users]))
    cases = np.flatnonzero(held[log.users] & liked & (log.timestamps == last[log.users]))
    cases = cases[
        is_first_occurrence(user_item_keys(log.users[cases], log.items[cases], log.n_items))
    ]
    return rest, Holdout(log.users[cases], log.items[cases], log.timestamps[cases], rest)


def draw_cases(cases: Holdout, most: int, seed: int) -> Holdout:
    """Draw at most `most` cases; fewer are among more of the same seed.

    Collective over the shards of the log: each keeps its own of all cases that are drawn.
    """
    shards = cases.history.shards
    rng = np.random.default_rng(seed)
    if shards.count > 1:
        counts = shards.gather(np.array([len(cases)]))
        most = _draw_shares(counts, most, rng)[shards.index]
        rng = np.random.default_rng((seed, shards.index))
    chosen = np.zeros(len(cases), dtype=np.bool_)
    chosen[rng.permutation(len(cases))[:most]] = True
    return cases.where(chosen)


def _draw_shares(
    counts: NDArray[np.int64], most: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw from groups of `counts` things without putting back: how many are of each, [n]."""
    left = counts.copy()
    for drawn in rng.random(min(most, int(counts.sum()))).tolist():
        ends = np.cumsum(left)
        left[np.searchsorted(ends, int(drawn * ends[-1]), side="right")] -= 1
    return counts - left


def _hold_last(log: Interactions, held: NDArray[np.bool_]) -> tuple[Interactions, Holdout]:
    """Move the last liked event of every user in `held` [U] from the log to the cases."""
    last = np.zeros(log.n_users, dtype=np.int64)
    liked = ~log.disliked
    np.maximum.at(last, log.users[liked], log.positions[liked])
    rest = log.where(~held[log.users] | (log.positions < last[log.users]))
    users = np.flatnonzero(held).astype(np.int32)
    events = log.offsets[users] + last[users]
    return rest, Holdout(users, log.items[events], log.timestamps[events], rest)
