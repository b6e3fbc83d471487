"""Answers to ready questions: what everybody takes, by item and by user."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from models.catalogue.snapshot import Snapshot
from models.data.event_log import EventLog
from service.domain.queries import Answer
from service.domain.ready_queries import PopularQuery, RowsAnswer, RowsQuery, TogetherQuery
from service.domain.stage_clock import StageClock
from service.engine.compose import Parts
from service.engine.naming import name_reasons
from service.engine.questions.personal_pool import PersonalPool, personal_pool
from service.engine.questions.popular import popular_items
from service.engine.questions.recommend import excluded_rows
from service.engine.questions.rows import HomePage
from service.engine.questions.together import together
from service.engine.selection.answer_fields import add_fields
from service.engine.selection.item_selection import select_items
from service.histories.event_columns import EMPTY

T = TypeVar("T")

_POOLED = 2  # items that are ranked for a page, for each that it shows
MOST_POOLED = 150


class ReadyAnswers:
    """Answers from the event log in RAM, which is never older than the store."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def popular(self, query: PopularQuery, stages: StageClock) -> Answer:
        """Rank items by the events of everybody."""
        at, requester = _time(query.requester.at), query.requester
        with stages("store"):
            events = EMPTY
            if query.exclude_seen and requester.user_id is not None:
                events = await self._parts.memories.load(requester, at)
            log, snapshot = await self._open()
        types = self._parts.event_log.type_codes(query.types)

        def rank() -> Answer:
            selection = select_items(snapshot, query.filter, query.facets)
            excluded = excluded_rows(query, snapshot, events)
            return popular_items(query, snapshot, log, types, selection, excluded, at)

        answer = await self._compute("count", rank, stages)
        return await self._completed(answer, query.fields, stages)

    async def together(self, query: TogetherQuery, stages: StageClock) -> Answer:
        """Rank the items that are taken with one. Raises `NotFound`."""
        with stages("store"):
            log, snapshot = await self._open()
        types = self._parts.event_log.type_codes(query.types)

        def rank() -> Answer:
            selection = select_items(snapshot, query.filter)
            return together(query, snapshot, log, types, selection, _time(query.at))

        answer = await self._compute("count", rank, stages)
        return await self._completed(answer, query.fields, stages)

    async def rows(self, query: RowsQuery, stages: StageClock) -> RowsAnswer:
        """Make the rows of a home page."""
        requester, memories = query.requester, self._parts.memories
        at = _time(requester.at)
        with stages("store"):
            events = await memories.load(requester, at)
            log, snapshot = await self._open()
        selection = await self._compute(
            "filter", lambda: select_items(snapshot, query.filter), stages
        )
        excluded = snapshot.catalogue.rows(sorted(query.exclude)).astype(np.int64)
        excluded = excluded[excluded >= 0]

        def rank() -> PersonalPool:
            with memories.memory(snapshot, requester, events, at) as user:
                return personal_pool(
                    snapshot,
                    user,
                    events,
                    memories.options(requester),
                    allowed=selection.allowed,
                    excluded=excluded,
                    size=min(MOST_POOLED, _POOLED * query.rows * query.limit),
                    limit=query.limit,
                )

        pool = await self._compute("attend", rank, stages)
        with stages("explain"):
            named = await name_reasons(self._parts.store, snapshot, events, pool.reasons)
        types = self._parts.event_log.type_codes(None)
        page = HomePage(query, snapshot, log, types, events, selection, excluded, at)
        rows = await self._compute("count", lambda: page.rows(pool, named), stages)
        if query.fields:
            with stages("store"):
                for row in rows:
                    await add_fields(Answer(row.items, ""), self._parts.store, query.fields)
        return RowsAnswer(
            rows, snapshot.version, self._parts.live.degraded, selection.warnings or None
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
            await self._parts.live.refresh_popularity()
            snapshot = self._parts.live.snapshot
        return log, snapshot

    async def _compute(self, stage: str, work: Callable[[], T], stages: StageClock) -> T:
        with stages(stage):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._parts.executor, work)

    async def _completed(
        self, answer: Answer, fields: tuple[str, ...], stages: StageClock
    ) -> Answer:
        with stages("store"):
            await add_fields(answer, self._parts.store, fields)
        return replace(answer, degraded=self._parts.live.degraded)


def _time(at: int | None) -> int:
    return time.time_ns() // 1_000 if at is None else at
