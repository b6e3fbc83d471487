"""Steps that answers have in common: read events and a snapshot, compute, add fields of items."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from models.attention.attend import AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import watched
from models.history.user_memory import UserMemory
from service.domain.errors import StoreUnreachable
from service.domain.queries import Answer, AnswerItem, Requester
from service.domain.records import Item
from service.domain.stage_clock import StageClock
from service.engine.compose import Parts
from service.engine.selection.answer_fields import add_fields
from service.histories.event_columns import EventColumns
from service.histories.memory_provider import LONG
from service.runtime.work_queue import current_turn

T = TypeVar("T")

# Targets times rows that are attended on the event loop, in a millisecond or two: less than going
# to a thread and back takes on a busy machine.
_ON_LOOP = 120_000
_MERGED = 200  # of these, that merging one event of a session takes as long as
_STORED = 20  # cost of reading one field of an item, in comparisons


class OpenRequest(NamedTuple):
    """What the answer to one request is computed from."""

    requester: Requester
    snapshot: Snapshot
    events: EventColumns
    at: int  # microseconds UTC
    options: AttentionOptions

    def size(self, targets: int) -> float:
        """Return the targets times the rows; inf where that does not say how long they take."""
        events = len(self.events)
        # Other requests may hold the lock of a long history, which is collapsed.
        is_known = not self.requester.explain and events < LONG
        return targets * max(1, events) if is_known else math.inf


class RequestSteps:
    """Steps of requests over the parts of the service, which are timed as stages."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def open(self, requester: Requester, stages: StageClock) -> OpenRequest:
        """Read the events of a requester and the snapshot."""
        at = request_time(requester.at)
        with stages("store"):
            # The events first: their items are then in the catalogue that is read after them.
            size = _MERGED * len(requester.history or ())
            merge = partial(self.compute, stages, size=size, stage="merge")
            events = await self._parts.memories.load(requester, at, merge)
            snapshot = await self._parts.live.current()
        return OpenRequest(requester, snapshot, events, at, self._parts.memories.options(requester))

    async def attend(
        self,
        request: OpenRequest,
        stages: StageClock,
        work: Callable[[UserMemory], T],
        size: float = math.inf,
    ) -> T:
        """Do work with the requester's memory; `size` as for `compute`."""
        requester, snapshot, events, at, _ = request

        def attend() -> T:
            with self._parts.memories.memory(snapshot, requester, events, at) as user:
                return work(user)

        return await self.compute(stages, attend, size)

    async def compute(
        self,
        stages: StageClock,
        work: Callable[[], T],
        size: float = math.inf,
        *,
        stage: str = "attend",
    ) -> T:
        """Do work on a thread, or on the event loop where it takes less than going there and back.

        size: targets times rows, or items times conditions; inf = not known.
        """
        turn = current_turn.get()
        with stages(stage):
            on_loop, executor = size <= _ON_LOOP, self._parts.executor
            if turn is None:  # outside of a request
                run = asyncio.get_running_loop().run_in_executor
                return work() if on_loop else await run(executor, work)
            if turn.is_long or not on_loop:
                return await turn.run(executor, partial(watched, turn.look, work))
            with turn.computing():
                return work()

    async def filter(
        self, snapshot: Snapshot, work: Callable[[], T], stages: StageClock, compared: float
    ) -> T:
        """Do work that makes `compared` comparisons with each item; 0 = at once and untimed."""
        if not compared:
            return work()
        return await self.compute(stages, work, compared * len(snapshot.catalogue), stage="filter")

    async def complete(self, answer: Answer, fields: Sequence[str], stages: StageClock) -> Answer:
        """Return an answer with fields of its items, where they are asked for."""
        if not fields:
            return answer
        add = partial(add_fields, names=fields)
        return await self.add_stored(answer, add, stages, len(fields), stage="store")

    async def add_stored(
        self,
        answer: Answer,
        add: Callable[[Sequence[AnswerItem], Sequence[Item | None]], None],
        stages: StageClock,
        size: float,
        *,
        stage: str,
    ) -> Answer:
        """Add stored data of its items to an answer; `size` is the work for each item.

        If the store cannot be reached, the answer stays without them, and is degraded.
        """
        with stages("store"):
            try:
                ids = [item["item_id"] for item in answer.items]
                stored = await self._parts.store.get_items(ids)
            except StoreUnreachable:
                return replace(answer, degraded=True)
        work = partial(add, answer.items, stored)
        await self.compute(stages, work, _STORED * size * len(stored), stage=stage)
        return answer


def request_time(at: int | None) -> int:
    """Return the time that a request is answered as of, in microseconds UTC; by default now."""
    return time.time_ns() // 1_000 if at is None else at
