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

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.data.event_log import EventLog, LoggedEvents
from models.data.vocabulary import user_item_keys
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
        row: of the item.
        at: the time of the request, microseconds UTC.
        excluded: numbers of users that are left out.
        count: the most users.
    """
    own = _newest(log.of_item(row), at)
    users = np.unique(own.users)
    together = log.of_users(users)
    together = together.take(together.timestamps <= at)
    size = int(together.items.max(initial=row)) + 1
    pairs = np.unique(user_item_keys(together.users, together.items, size))
    of_items = np.bincount(pairs % size, minlength=size)
    of_items[row] = 0
    near = np.argsort(-of_items, kind="stable")[:_NEIGHBOURS]
    near = near[of_items[near] > 0]
    alike: dict[int, float] = {}
    if snapshot.catalogue.has_content[row]:
        found = similar(
            snapshot,
            row,
            limit=_NEIGHBOURS,
            allowed=snapshot.catalogue.servable,
            spaces=("content",),
        )
        cosines = (spaces["content"].cosine for spaces in found.spaces)
        alike = dict(zip(found.rows.tolist(), cosines, strict=True))
    takers, worth = [np.zeros(0, np.int64)], [np.zeros(0)]
    for other in {*near.tolist(), *alike}:
        of_other = np.unique(_newest(log.of_item(other), at).users).astype(np.int64)
        if not len(of_other):
            continue
        cosine = max(0.0, alike.get(other, 0.0))
        if other < size:
            cosine += float(of_items[other]) / (max(1, len(users)) * len(of_other)) ** 0.5
        takers.append(of_other)
        worth.append(np.full(len(of_other), cosine))
    numbers, place = np.unique(np.concatenate(takers), return_inverse=True)
    total = np.bincount(place, np.concatenate(worth), minlength=len(numbers))
    total[np.isin(numbers, excluded)] = 0.0
    best = np.argsort(-total, kind="stable")[:count]
    return numbers[best[total[best] > 0]]


def _newest(events: LoggedEvents, at: int) -> LoggedEvents:
    """Return the newest events until a time."""
    events = events.take(events.timestamps <= at)
    if len(events.users) <= _EVENTS:
        return events
    return events.take(np.argpartition(-events.timestamps, _EVENTS)[:_EVENTS])
