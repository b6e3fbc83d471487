"""Steps that answers have in common: read events and a snapshot, compute, add fields of items."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from models.attention.attention_options import AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory
from service.domain.queries import Answer, Requester
from service.domain.stage_clock import StageClock
from service.engine.compose import Parts
from service.engine.selection.answer_fields import add_fields
from service.histories.event_columns import EventColumns
from service.histories.memory_provider import LONG

T = TypeVar("T")

# Targets times rows that are attended on the event loop, in a millisecond or two: less than going
# to a thread and back takes on a busy machine.
_ON_LOOP = 120_000


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
            events = await self._parts.memories.load(requester, at)
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

        size: targets times rows, or items that a filter looks at; inf = not known.
        """
        with stages(stage):
            if size <= _ON_LOOP:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._parts.executor, work)

    async def filter(
        self, snapshot: Snapshot, work: Callable[[], T], stages: StageClock, evaluates: bool
    ) -> T:
        """Do work that may evaluate filters; where `evaluates` is false, do it at once, untimed."""
        if not evaluates:
            return work()
        return await self.compute(stages, work, len(snapshot.catalogue), stage="filter")

    async def complete(self, answer: Answer, fields: Sequence[str], stages: StageClock) -> Answer:
        """Return an answer with fields of its items, where they are asked for."""
        if not fields:
            return answer
        with stages("store"):
            return await add_fields(answer, self._parts.store, fields)


def request_time(at: int | None) -> int:
    """Return the time that a request is answered as of, in microseconds UTC; by default now."""
    return time.time_ns() // 1_000 if at is None else at
