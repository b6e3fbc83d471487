"""The users for an item, best first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.attention.attend import AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint
from models.data.event_log import EventLog
from models.history.user_memory import UserMemory
from models.ranking.audiences import (
    AudienceScore,
    audience_score,
    candidate_users,
    reference_rows,
)
from models.ranking.explanation import Reason
from service.domain.queries import Contribution
from service.domain.ready_queries import AudienceQuery, AudienceUser
from service.engine.explanation.naming import remainder_of
from service.engine.explanation.reasons import foremost_reasons
from service.histories.event_columns import EventColumns

SCORED_USERS = 100  # at most


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Users whose scores are compared."""

    numbers: NDArray[np.int64]
    users: int  # number of those who may be in the audience


@dataclass(frozen=True, slots=True, eq=False)
class ScoredUser:
    """A user with the score of the item."""

    events: EventColumns
    score: AudienceScore
    reasons: Sequence[Reason]

    @property
    def total(self) -> float:
        """The score above the user's own level."""
        return float(self.score.scores.total[0]) - self.score.reference


def candidates(
    query: AudienceQuery, snapshot: Snapshot, log: EventLog, row: int, at: int
) -> Candidates:
    """Choose users to score: all where they are few, else those near the item by its neighbours."""
    own = log.of_item(row)
    excluded = np.zeros(0, np.int64)
    if query.exclude_seen:
        excluded = np.unique(own.users[own.timestamps <= at]).astype(np.int64)
    users = log.sizes[0] - len(excluded)
    has_later = log.span is not None and log.span[1] > at
    if has_later or users <= SCORED_USERS:
        every = np.unique(log.between(None, at).users).astype(np.int64)
        users = len(every) - len(excluded)
    if users <= SCORED_USERS:
        numbers = every[~np.isin(every, excluded)]
        return Candidates(numbers, len(numbers))
    numbers = candidate_users(snapshot, log, row, at=at, excluded=excluded, count=SCORED_USERS)
    return Candidates(numbers, users)


def score_users(
    query: AudienceQuery,
    snapshot: Snapshot,
    row: int,
    histories: Sequence[EventColumns],
    memory: Callable[[EventColumns], AbstractContextManager[UserMemory]],
    options: AttentionOptions,
) -> list[ScoredUser]:
    """Score an item for users, and return the best with their reasons.

    Users without a memory to attend to have no score. Ties are in the order of ids.
    """
    reference = reference_rows(snapshot)
    found: list[ScoredUser] = []
    for events in histories:
        checkpoint()
        with memory(events) as user:
            if len(user):
                scored = audience_score(snapshot, user, row, reference, options)
                found.append(ScoredUser(events, scored, ()))
    best = sorted(found, key=lambda each: (-each.total, each.events.user_id))[: query.limit]
    if not query.explain:
        return best
    explained = []
    for each in best:
        checkpoint()
        with memory(each.events) as user:
            (reasons,) = foremost_reasons(
                snapshot,
                user,
                each.events,
                np.array([row]),
                query.explain,
                options,
                partial=each.score.scores.partial,
            )
        explained.append(ScoredUser(each.events, each.score, reasons))
    return explained


def audience_user(
    snapshot: Snapshot,
    scored: ScoredUser,
    explanation: tuple[Contribution, ...] | None,
) -> AudienceUser:
    """Make the answer's entry of a user."""
    scores = scored.score.scores
    user: AudienceUser = {
        "user_id": scored.events.user_id,
        "score": scored.total,
        "parts": {
            **{name: float(part[0]) for name, part in scores.parts.items()},
            "reference": -scored.score.reference,
        },
        "reason": snapshot.memory_reason,
    }
    if explanation is not None:
        named = tuple(each for each in explanation if each.contribution > 0)
        user["explanation"] = named
        user["remainder"] = remainder_of(named, float(scores.personal[0]), scores.memory_rows)
    return user
