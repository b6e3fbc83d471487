"""The audience of an item: users to whom it is more likely than other items are.

Scores of one item for several users are not comparable: each user's are up to a constant of the
softmax over items that the model was trained with. The level of a user is estimated on the same
reference items for everybody:

    score_u(item) - log mean_r exp score_u(r)

which is log P(item | u) up to a constant of the item, as far as the reference stands for all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.data.event_log import EventLog, LoggedEvents
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.user_memory import UserMemory
from models.ranking.scoring import Scores, score
from models.ranking.similar_items import similar

REFERENCE = 128  # items, evenly among all that are servable
_NEIGHBOURS = 50  # items of each kind, by which candidates are found
_EVENTS = 5_000  # of one item that are read, the newest


class AudienceScore(NamedTuple):
    """The score of an item for one user, and the level of the user's scores."""

    scores: Scores  # of the item alone
    reference: float  # log mean exp of the scores of the reference items


def reference_rows(snapshot: Snapshot) -> NDArray[np.int64]:
    """Return the reference items, evenly among the servable ones."""
    rows = np.flatnonzero(snapshot.catalogue.servable & snapshot.has_vector)
    return rows[np.linspace(0, len(rows) - 1, min(len(rows), REFERENCE)).astype(np.int64)]


@torch.inference_mode()
def audience_score(
    snapshot: Snapshot,
    user: UserMemory,
    row: int,
    reference: NDArray[np.int64],
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> AudienceScore:
    """Score an item for a user, and the reference items [R]."""
    own = score(snapshot, user, np.array([row]), options)
    totals = score(snapshot, user, reference, options).total.double()
    level = torch.logsumexp(totals, 0) - np.log(max(1, len(reference)))
    return AudienceScore(own, float(level) if len(reference) else 0.0)


def candidate_users(
    snapshot: Snapshot, log: EventLog, row: int, *, at: int, excluded: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """Return the numbers of users that are likely to be in the audience of an item.

    These are the users with most events, each item once, on its neighbours: items that are taken
    by the same users, by the cosine of their sets of users, and items of similar content, by the
    cosine of their embeddings.

    Args:
        snapshot: the catalogue.
        log: all events.
        row: of the item.
        at: the time of the request, microseconds UTC.
        excluded: numbers of users that are left out.
        count: the most users.
    """
    worth: dict[int, float] = {}
    own = _newest(log.of_item(row), at)
    together = log.of_users(np.unique(own.users))
    together = together.take(together.timestamps <= at)
    pairs = np.unique(np.stack([together.users, together.items]), axis=1)
    of_items = np.bincount(pairs[1], minlength=row + 1)
    of_items[row] = 0
    near = np.argsort(-of_items, kind="stable")[:_NEIGHBOURS]
    users = max(1, len(np.unique(own.users)))
    for other in near[of_items[near] > 0].tolist():
        size = max(1, len(np.unique(_newest(log.of_item(other), at).users)))
        worth[other] = float(of_items[other]) / (users * size) ** 0.5
    if snapshot.catalogue.has_content[row]:
        alike = similar(
            snapshot,
            row,
            limit=_NEIGHBOURS,
            allowed=snapshot.catalogue.servable,
            spaces=("content",),
        )
        for other, spaces in zip(alike.rows.tolist(), alike.spaces, strict=True):
            worth[other] = worth.get(other, 0.0) + max(0.0, spaces["content"].cosine)
    found, sums = [np.zeros(0, np.int64)], [np.zeros(0)]
    for other, value in worth.items():
        takers = np.unique(_newest(log.of_item(other), at).users).astype(np.int64)
        found.append(takers)
        sums.append(np.full(len(takers), value))
    numbers, place = np.unique(np.concatenate(found), return_inverse=True)
    total = np.bincount(place, np.concatenate(sums), minlength=len(numbers))
    total[np.isin(numbers, excluded)] = 0.0
    best = np.argsort(-total, kind="stable")[:count]
    return numbers[best[total[best] > 0]]


def _newest(events: LoggedEvents, at: int) -> LoggedEvents:
    """Return the newest events until a time."""
    events = events.take(events.timestamps <= at)
    if len(events.users) <= _EVENTS:
        return events
    return events.take(np.argpartition(-events.timestamps, _EVENTS)[:_EVENTS])
