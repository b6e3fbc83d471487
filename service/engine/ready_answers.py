"""Answers to ready questions: what everybody takes, by item and by user."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from models.catalogue.snapshot import Snapshot
from models.data.event_log import EventLog
from service.domain.queries import Answer
from service.domain.ready_queries import PopularQuery, TogetherQuery
from service.domain.stage_clock import StageClock
from service.engine.compose import Parts
from service.engine.questions.popular import popular_items
from service.engine.questions.recommend import excluded_rows
from service.engine.questions.together import together
from service.engine.selection.answer_fields import add_fields
from service.engine.selection.item_selection import select_items
from service.histories.event_columns import EMPTY

T = TypeVar("T")


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
