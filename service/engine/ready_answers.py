"""Answers to ready questions: what everybody takes, by item and by user."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from models.catalogue.facets import FacetValue
from models.catalogue.snapshot import Snapshot
from models.data.event_log import EventLog
from models.history.user_memory import UserMemory, build_memory
from models.ranking.ready.affinities import ValueAffinity, affinities
from models.ranking.scoring import Scores
from service.domain.errors import StoreUnreachable
from service.domain.queries import Answer, Requester
from service.domain.ready_queries import (
    AffinitiesAnswer,
    AffinitiesQuery,
    Affinity,
    AudienceAnswer,
    AudienceQuery,
    ItemEvent,
    ItemEventsAnswer,
    PopularQuery,
    RowsAnswer,
    RowsQuery,
    TogetherQuery,
)
from service.domain.stage_clock import StageClock
from service.domain.steering import Steering
from service.domain.timestamps import MAX_TIMESTAMP, to_rfc3339
from service.engine.compose import Parts
from service.engine.explanation.naming import name_events, name_reasons
from service.engine.questions.audience import (
    ScoredUser,
    audience_user,
    candidates,
    score_users,
)
from service.engine.questions.personal_pool import PersonalPool, personal_pool, showable_items
from service.engine.questions.popular import popular_items
from service.engine.questions.recommend import excluded_rows
from service.engine.questions.rows import HomePage
from service.engine.questions.score import item_row
from service.engine.questions.together import known_row, together
from service.engine.request_steps import OpenRequest, RequestSteps, request_time
from service.engine.selection.item_selection import (
    Counted,
    ItemSelection,
    count_items,
    select_items,
)
from service.engine.selection.steering import SteeredItems, steer_items
from service.histories.event_columns import EMPTY

_POOLED = 2  # items that are ranked for a page, for each that it shows
MOST_POOLED = 150


class ReadyAnswers:
    """Answers from the event log in RAM, which is never older than a store that answers."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._steps = parts, RequestSteps(parts)

    async def popular(self, query: PopularQuery, stages: StageClock) -> Answer:
        """Rank items by the events of everybody."""
        at, requester = request_time(query.requester.at), query.requester
        with stages("store"):
            events = EMPTY
            if query.exclude_seen and requester.user_id is not None:
                events = await self._parts.memories.load(requester, at)
            log, snapshot = await self._open()
        types = self._parts.event_log.type_codes(query.types)

        def rank() -> Answer:
            selection = select_items(snapshot, query.filter, query.facets)
            steered = steer_items(
                snapshot,
                query.steering,
                allowed=selection.allowed,
                exclude=query.exclude,
                limit=query.limit,
            )
            selection = selection.with_warnings(steered.warnings)
            excluded = excluded_rows(query, snapshot, events)
            return popular_items(query, snapshot, log, types, selection, steered, excluded, at)

        answer = await self._steps.compute(stages, rank, stage="count")
        answer = replace(answer, degraded=events.is_stale)
        return await self._completed(answer, query.fields, stages)

    @property
    def _is_degraded(self) -> bool:
        return self._parts.live.degraded or self._parts.event_log.is_stale

    async def together(self, query: TogetherQuery, stages: StageClock) -> Answer:
        """Rank the items that are taken with one. Raises `NotFound`."""
        with stages("store"):
            log, snapshot = await self._open()
        types = self._parts.event_log.type_codes(query.types)

        def rank() -> Answer:
            selection = select_items(snapshot, query.filter, query.facets)
            return together(query, snapshot, log, types, selection, _until(query.at))

        answer = await self._steps.compute(stages, rank, stage="count")
        return await self._completed(answer, query.fields, stages)

    async def rows(self, query: RowsQuery, stages: StageClock) -> RowsAnswer:
        """Make the rows of a home page."""
        requester, memories = query.requester, self._parts.memories
        at = request_time(requester.at)
        with stages("store"):
            events = await memories.load(requester, at)
            log, snapshot = await self._open()

        excluded = snapshot.catalogue.rows(sorted(query.exclude)).astype(np.int64)
        excluded = excluded[excluded >= 0]

        def select() -> tuple[ItemSelection, SteeredItems, Counted | None]:
            selection = select_items(snapshot, query.filter, query.facets)
            steered = steer_items(
                snapshot,
                Steering(query.rules, at_most=query.at_most),
                allowed=selection.allowed,
                limit=query.limit,
            )
            if (buried := steered.steering.buried) is not None:
                selection = replace(selection, allowed=selection.allowed & ~buried)
            counted = None
            if query.facets:
                mask = showable_items(selection.allowed, events, excluded)
                counted = count_items(snapshot, mask, query.facets)
            return selection.with_warnings(steered.warnings), steered, counted

        selection, steered, counted = await self._steps.compute(stages, select, stage="filter")

        def rank(user: UserMemory) -> PersonalPool:
            return personal_pool(
                snapshot,
                user,
                events,
                options,
                allowed=selection.allowed,
                excluded=excluded,
                size=min(MOST_POOLED, _POOLED * query.rows * query.limit),
                limit=query.limit,
                steering=steered.steering,
            )

        options = memories.options(requester)
        request = OpenRequest(requester, snapshot, events, at, options)
        pool = await self._steps.attend(request, stages, rank)
        with stages("explain"):
            named = await name_events(self._parts.store, snapshot, events, pool.reasons)
        types = self._parts.event_log.type_codes(None)
        page = HomePage(query, snapshot, log, types, events, selection, steered, excluded, at)
        rows = await self._steps.compute(
            stages, lambda: page.rows(pool, named.of_items), stage="count"
        )
        items = [item for row in rows for item in row.items]
        added = await self._steps.complete(Answer(items, ""), query.fields, stages)
        return RowsAnswer(
            rows,
            snapshot.version,
            self._is_degraded or named.is_degraded or added.degraded,
            selection.warnings or None,
            *((None, None) if counted is None else (counted.total, counted.facets)),
            **_attended([pool.fresh.scores]),
        )

    async def audience(self, query: AudienceQuery, stages: StageClock) -> AudienceAnswer:
        """Rank users for an item. Raises `NotFound` where it cannot be scored."""
        at, memories = request_time(query.at), self._parts.memories
        one = Requester(retrieval=query.retrieval, at=query.at)
        with stages("store"):
            log, snapshot = await self._open()
        row = item_row(snapshot, query.item_id)
        found = await self._steps.compute(
            stages,
            lambda: candidates(query, snapshot, log, row, _until(query.at)),
            stage="count",
        )
        with stages("store"):
            names = await self._parts.store.user_ids(found.numbers.tolist())
            requesters = [replace(one, user_id=name) for name in names if name is not None]
            histories = [await memories.load(requester, at) for requester in requesters]

        def rank() -> list[ScoredUser]:
            return score_users(
                query,
                snapshot,
                row,
                histories,
                lambda events: memories.memory(snapshot, one, events, at),
                memories.options(one),
            )

        scored = await self._steps.compute(stages, rank)
        is_degraded = self._is_degraded or any(events.is_stale for events in histories)
        users = []
        with stages("explain"):
            for each in scored:
                await asyncio.sleep(0)  # let other tasks run
                named = await name_reasons(self._parts.store, snapshot, each.events, [each.reasons])
                is_degraded = is_degraded or named.is_degraded
                reasons = named.of_items[0] if query.explain else None
                users.append(audience_user(snapshot, each, reasons))
        return AudienceAnswer(
            users,
            snapshot.version,
            len(histories),
            found.users,
            is_degraded,
            **_attended([each.score.scores for each in scored]),
        )

    async def item_events(self, item_id: str, limit: int, stages: StageClock) -> ItemEventsAnswer:
        """Return the newest events of an item. Raises `NotFound`."""
        with stages("store"):
            log, snapshot = await self._open()
            own = log.of_item(known_row(snapshot, log, item_id))
            newest = own.take(np.argsort(-own.timestamps, kind="stable")[:limit])
            names = await self._parts.store.user_ids(newest.users.tolist())
        types = self._parts.event_log.loaded.types
        events = [
            ItemEvent(user_id=name, type=types.id(code), timestamp=time)
            for name, code, time in zip(
                names, newest.types.tolist(), newest.timestamps.tolist(), strict=True
            )
            if name is not None  # forgotten since the log was read
        ]
        return ItemEventsAnswer(events, len(own.users), self._is_degraded)

    async def affinities(self, query: AffinitiesQuery, stages: StageClock) -> AffinitiesAnswer:
        """Return the values of a field by the attention that a user's events on them have."""
        requester = Requester(query.user_id, retrieval=query.retrieval, at=query.at)
        request = await self._steps.open(requester, stages)
        _, snapshot, events, at, options = request

        def rank() -> tuple[list[ValueAffinity], Scores]:
            # Every event is a row, in a long history too.
            history = self._parts.memories.history(snapshot, events, requester)
            user = build_memory(snapshot, history, at)
            return affinities(snapshot, user, query.field, query.limit, options)

        found, scores = await self._steps.compute(stages, rank)
        values = [
            Affinity(_json_value(query.field, each.value), each.mass, each.score, each.rows)
            for each in found
        ]
        degraded = self._parts.live.degraded or events.is_stale
        return AffinitiesAnswer(
            query.field, values, snapshot.version, degraded, **_attended([scores])
        )

    # ------------------------------------------------------------------ the parts

    async def _open(self) -> tuple[EventLog, Snapshot]:
        """Return the log, and a snapshot that has its items."""
        log = await self._parts.event_log.current()
        snapshot = await self._parts.live.current()
        if not snapshot.catalogue.present.any() and len(snapshot.catalogue) < len(
            self._parts.live.vocabulary
        ):
            # Without any catalogue, the items are those of the events.
            try:
                await self._parts.live.refresh_popularity()
            except StoreUnreachable:
                self._parts.event_log.is_stale = True
            snapshot = self._parts.live.snapshot
        return log, snapshot

    async def _completed(
        self, answer: Answer, fields: tuple[str, ...], stages: StageClock
    ) -> Answer:
        answer = await self._steps.complete(answer, fields, stages)
        return replace(answer, degraded=answer.degraded or self._is_degraded)


def _until(at: int | None) -> int:
    """Return the time until which events count; without one all do, since clocks may be ahead."""
    return MAX_TIMESTAMP if at is None else at


def _attended(every: Sequence[Scores]) -> dict[str, Any]:
    """Return how the memories behind some scores were attended, as fields of an answer."""
    own = [scores for scores in every if scores.memory_rows]
    if not own:
        return {}
    return {
        "retrieval": next((each.mode for each in own if each.mode != "exact"), "exact"),
        "rows_scanned": round(sum(each.rows_scanned for each in own) / len(own)),
        "memory_rows": round(sum(each.memory_rows for each in own) / len(own)),
    }


def _json_value(field: str, value: FacetValue) -> FacetValue:
    """Return a value as it is answered: times are not numbers there."""
    if field == "published_at" and isinstance(value, int):
        return to_rfc3339(value)
    return value
