"""The users for an item, and what a user attends to by the values of a field."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.catalogue.facets import FacetValue
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint
from models.ranking.audiences import (
    AudienceScore,
    affinities,
    audience_score,
    candidate_users,
    reference_rows,
)
from models.ranking.explanation import Reason
from service.domain.records import check_finite
from service.domain.timestamps import to_rfc3339
from service.engine.explanation import (
    Contribution,
    foremost_reasons,
    name_reasons,
    remainder_of,
    write_explanation,
)
from service.engine.pipeline import Request, attended
from service.histories.event_columns import EventColumns
from service.questions.answers import AffinitiesOut, AffinityOut, AudienceOut, AudienceUserOut
from service.questions.asked import attention_options
from service.questions.ready import AffinitiesParams, AudienceParams

SCORED_USERS = 100  # at most


class ScoredUser(NamedTuple):
    """A user with the score of the item."""

    events: EventColumns
    score: AudienceScore
    reasons: Sequence[Reason] = ()

    @property
    def total(self) -> float:
        """The score above the user's own level."""
        return float(self.score.scores.total[0]) - self.score.reference


async def item_audience(request: Request[AudienceParams]) -> AudienceOut:
    """Rank users for an item. Raises `NotFound` where it cannot be scored."""
    question, store = request.question, request.parts.store
    request.options = attention_options(question.as_retrieval, request.parts.settings)
    await request.open_log()
    snapshot, row = request.snapshot, request.item_row(request.about)
    numbers, users = await request.compute(lambda: _candidates(request, row), stage="count")
    with request.stages("store"):
        names = await store.user_ids(numbers.tolist())
        histories = [await request.load(name) for name in names if name is not None]
    scored = await request.compute(lambda: _best_users(request, row, histories))
    request.degraded = any(events.is_stale for events in histories)
    entries = list[AudienceUserOut]()
    with request.stages("explain"):
        for user in scored:
            await asyncio.sleep(0)  # let other tasks run
            named = await name_reasons(store, snapshot, user.events, [user.reasons])
            request.degraded = request.degraded or named.is_degraded
            reasons = named.of_items[0] if question.explain else None
            entries.append(audience_user(snapshot, user, reasons))
    check_finite("scores", [entry["score"] for entry in entries])
    return {
        "users": entries,
        "model_version": snapshot.version,
        "scored": len(histories),
        "candidates": users,
        "degraded": request.is_degraded(with_log=True),
        **attended([user.score.scores for user in scored]),  # type: ignore[typeddict-item]
    }


def _candidates(request: Request[AudienceParams], row: int) -> tuple[NDArray[np.int64], int]:
    """Choose users to score, by number, of how many: all of few, else those near the item."""
    log, at = request.log, request.until
    taken = log.of_item(row)
    excluded = np.zeros(0, np.int64)
    if request.question.exclude_seen:
        excluded = np.unique(taken.users[taken.timestamps <= at]).astype(np.int64)
    users = log.sizes[0] - len(excluded)
    has_later = log.span is not None and log.span[1] > at
    if has_later or users <= SCORED_USERS:
        every = np.unique(log.between(None, at).users).astype(np.int64)
        users = len(every) - len(excluded)
    if users <= SCORED_USERS:
        numbers = every[~np.isin(every, excluded)]
        return numbers, len(numbers)
    numbers = candidate_users(
        request.snapshot, log, row, at=at, excluded=excluded, count=SCORED_USERS
    )
    return numbers, users


def _best_users(
    request: Request[AudienceParams], row: int, histories: Sequence[EventColumns]
) -> list[ScoredUser]:
    """Score an item for users, and return the best with their reasons.

    Users without a memory to attend to have no score. Ties are in the order of ids.
    """
    question, snapshot, options = request.question, request.snapshot, request.options
    memory, reference = request.parts.memories.memory, reference_rows(snapshot)
    scored: list[ScoredUser] = []
    for events in histories:
        checkpoint()
        with memory(snapshot, events, options, now=request.now) as user:
            if len(user):
                score = audience_score(snapshot, user, row, reference, options)
                scored.append(ScoredUser(events, score))
    best = sorted(scored, key=lambda user: (-user.total, user.events.user_id))[: question.limit]
    if not question.explain:
        return best
    explained = []
    for events, score, _ in best:
        checkpoint()
        with memory(snapshot, events, options, now=request.now) as user:
            (reasons,) = foremost_reasons(
                snapshot,
                user,
                events,
                np.array([row]),
                question.explain,
                options,
                partial=score.scores.partial,
            )
        explained.append(ScoredUser(events, score, reasons))
    return explained


def audience_user(
    snapshot: Snapshot, scored: ScoredUser, explanation: tuple[Contribution, ...] | None
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
        named = tuple(reason for reason in explanation if reason.contribution > 0)
        user["explanation"] = write_explanation(named)
        user["remainder"] = remainder_of(named, float(scores.personal[0]), scores.memory_rows)
    return user


async def user_affinities(request: Request[AffinitiesParams]) -> AffinitiesOut:
    """Return the values of a field by the attention that a user's events on them have."""
    question = request.question
    options = attention_options(question.as_retrieval, request.parts.settings)
    await request.open(request.about, options=options)
    snapshot, field = request.snapshot, question.field
    ranked, scores = await request.compute(
        lambda: affinities(snapshot, request.every_row(), field, question.limit, options)
    )
    check_finite("masses", [value.mass for value in ranked])
    check_finite("scores", [value.score or 0.0 for value in ranked])
    values: list[AffinityOut] = [
        {
            "value": _json_value(field, value.value),
            "mass": value.mass,
            "score": value.score,
            "events": value.rows,
        }
        for value in ranked
    ]
    return {
        "field": field,
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
