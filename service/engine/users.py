"""The users for an item, and what a user attends to by the values of a field."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.attention.attend import AttentionOptions
from models.catalogue.facets import FacetValue
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint
from models.data.event_log import EventLog
from models.history.user_memory import UserMemory
from models.ranking.audiences import (
    AudienceScore,
    ValueAffinity,
    affinities,
    audience_score,
    candidate_users,
    reference_rows,
)
from models.ranking.explanation import Reason
from models.ranking.scoring import Scores
from service.domain.records import check_finite
from service.domain.timestamps import to_rfc3339
from service.engine.explanation import (
    Contribution,
    ExplanationWriter,
    foremost_reasons,
    name_reasons,
    remainder_of,
)
from service.engine.pipeline import Request, attended
from service.histories.event_columns import EventColumns
from service.questions.answers import AffinitiesOut, AffinityOut, AudienceOut, AudienceUserOut
from service.questions.asked import attention_options
from service.questions.ready import AffinitiesParams, AudienceParams

SCORED_USERS = 100  # at most


async def item_audience(request: Request[AudienceParams]) -> AudienceOut:
    """Rank users for an item. Raises `NotFound` where it cannot be scored."""
    question, memories = request.question, request.parts.memories
    request.options = attention_options(question.as_retrieval, request.parts.settings)
    await request.open_log()
    snapshot, row = request.snapshot, request.item_row(request.about)
    chosen = await request.compute(
        lambda: candidates(question, snapshot, request.log, row, request.until), stage="count"
    )
    with request.stages("store"):
        names = await request.parts.store.user_ids(chosen.numbers.tolist())
        histories = [await request.load(name) for name in names if name is not None]

    def rank() -> list[ScoredUser]:
        return score_users(
            question,
            snapshot,
            row,
            histories,
            lambda events: memories.memory(snapshot, events, request.options, now=request.now),
            options=request.options,
        )

    scored = await request.compute(rank)
    request.degraded = any(events.is_stale for events in histories)
    users = list[AudienceUserOut]()
    with request.stages("explain"):
        for each in scored:
            await asyncio.sleep(0)  # let other tasks run
            named = await name_reasons(request.parts.store, snapshot, each.events, [each.reasons])
            request.degraded = request.degraded or named.is_degraded
            reasons = named.of_items[0] if question.explain else None
            users.append(audience_user(snapshot, each, reasons))
    check_finite("scores", [user["score"] for user in users])
    return {
        "users": users,
        "model_version": snapshot.version,
        "scored": len(histories),
        "candidates": chosen.users,
        "degraded": request.is_degraded(with_log=True),
        **attended([each.score.scores for each in scored]),  # type: ignore[typeddict-item]
    }


async def user_affinities(request: Request[AffinitiesParams]) -> AffinitiesOut:
    """Return the values of a field by the attention that a user's events on them have."""
    question = request.question
    options = attention_options(question.as_retrieval, request.parts.settings)
    await request.open(request.about, options=options)
    snapshot = request.snapshot

    def rank() -> tuple[list[ValueAffinity], Scores]:
        user = request.every_row()
        return affinities(snapshot, user, question.field, question.limit, options)

    ranked, scores = await request.compute(rank)
    check_finite("masses", [each.mass for each in ranked])
    check_finite("scores", [each.score or 0.0 for each in ranked])
    values: list[AffinityOut] = [
        {
            "value": _json_value(question.field, each.value),
            "mass": each.mass,
            "score": each.score,
            "events": each.rows,
        }
        for each in ranked
    ]
    return {
        "field": question.field,
        "values": values,
        "model_version": snapshot.version,
        "degraded": request.is_degraded(),
        **attended([scores]),  # type: ignore[typeddict-item]
    }


def _json_value(field: str, value: FacetValue) -> FacetValue:
    """Return a value as it is answered: times are not numbers there."""
    if field == "published_at" and isinstance(value, int):
        return to_rfc3339(value)
    return value


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
    question: AudienceParams, snapshot: Snapshot, log: EventLog, row: int, at: int
) -> Candidates:
    """Choose users to score: all where they are few, else those near the item by its neighbours."""
    own = log.of_item(row)
    excluded = np.zeros(0, np.int64)
    if question.exclude_seen:
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
    question: AudienceParams,
    snapshot: Snapshot,
    row: int,
    histories: Sequence[EventColumns],
    memory: Callable[[EventColumns], AbstractContextManager[UserMemory]],
    *,
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
    best = sorted(found, key=lambda each: (-each.total, each.events.user_id))[: question.limit]
    if not question.explain:
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
                question.explain,
                options,
                partial=each.score.scores.partial,
            )
        explained.append(ScoredUser(each.events, each.score, reasons))
    return explained


def audience_user(
    snapshot: Snapshot,
    scored: ScoredUser,
    explanation: tuple[Contribution, ...] | None,
) -> AudienceUserOut:
    """Make the answer's entry of a user."""
    scores = scored.score.scores
    user: AudienceUserOut = {
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
        user["explanation"] = ExplanationWriter().write(named)
        user["remainder"] = remainder_of(named, float(scores.personal[0]), scores.memory_rows)
    return user
