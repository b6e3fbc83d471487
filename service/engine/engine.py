"""The service without HTTP: its parts in operation, training jobs and model versions."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from cachetools import LRUCache

from models.text.encoders import TextEncoder
from service.domain.errors import Corrupt, Incompatible, ModelRejected, NotFound, StoreUnreachable
from service.domain.records import Scenario
from service.domain.settings import Settings
from service.engine import monitoring
from service.engine.compose import Parts, compose
from service.engine.monitoring import measure
from service.engine.pipeline import Request
from service.jobs.job import Job, training_command
from service.jobs.runner import JobRunner
from service.questions.scalars import Checked
from service.runtime.logs import REPEATED
from service.runtime.tracing import Measurement, StageClock
from service.snapshots.live_snapshot import Served
from service.snapshots.registry import version_document
from service.stores.base import Store

_log = logging.getLogger(__name__)

Q = TypeVar("Q", bound=Checked)
T = TypeVar("T")

_POPULARITY = 30.0  # seconds between two countings, and more where counting takes long
_STORE_POLL = 0.1  # seconds between two looks at what other processes wrote to the catalogue
_FORGETTING = 1.0  # seconds between two looks for users who were forgotten
_POLL = 0.5  # seconds between two looks at what other processes made current


_REMEMBERED = 256  # names


class CurrentScenario(NamedTuple):
    """A scenario, and whether it may be of an earlier version."""

    scenario: Scenario
    is_stale: bool  # the store cannot be reached: it may have another version by now


class LiveScenarios:
    """Reads and writes the version in use of each scenario of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: LRUCache[str, Scenario] = LRUCache(_REMEMBERED)

    async def read(self, name: str) -> Scenario:
        """Return the version in use. Raises `NotFound` and `StoreUnreachable`."""
        found = await self._store.scenario(name)
        if found is None:
            self._known.pop(name, None)
            raise NotFound(f"no scenario {name!r}")
        self._known[name] = found
        return found

    async def current(self, name: str) -> CurrentScenario:
        """Return the version in use, or the last one known while the store cannot be reached.

        Raises:
            NotFound: there is no such scenario.
            StoreUnreachable: nothing is known of it.
        """
        try:
            return CurrentScenario(await self.read(name), is_stale=False)
        except StoreUnreachable:
            if name not in self._known:
                raise
            return CurrentScenario(self._known[name], is_stale=True)

    async def put(self, name: str, body: Mapping[str, Any]) -> Scenario:
        """Store a version, which is in use from then on. Raises as `Store.put_scenario` does."""
        stored = self._known[name] = await self._store.put_scenario(name, body)
        return stored

    async def delete(self, name: str) -> None:
        """Delete a scenario, whose versions remain.

        Raises `NotFound`, and `Conflict` where another one falls back to it.
        """
        is_deleted = await self._store.delete_scenario(name)
        self._known.pop(name, None)
        if not is_deleted:
            raise NotFound(f"no scenario {name!r}")


class Engine:
    """Runs the service.

    Routes `ask` questions and `scenarios`, read and write `store`, write items to `live`, which
    refreshes the catalogue with them, and start trainings in `jobs`.
    """

    def __init__(self, parts: Parts) -> None:
        self.store = parts.store
        self.scenarios = LiveScenarios(parts.store)
        self.parts = parts
        self.executor = parts.executor  # where requests are computed, beside the event loop
        self.live = parts.live
        # Has other processes `LiveSnapshot.follow_registry`, before an activation is answered.
        self.announce: Callable[[], Awaitable[object]] | None = None
        settings = parts.settings
        self.jobs = JobRunner(
            settings.data,
            partial(training_command, settings.data.resolve(), settings.encoder),
            store=parts.store,
            on_success=self._serve_trained,
            threads=os.cpu_count() or 1,
        )
        self._watches: list[asyncio.Task[None]] = []

    async def ask(
        self,
        answer: Callable[[Request[Q]], Awaitable[T]],
        question: Q,
        stages: StageClock | None = None,
        *,
        about: str = "",
        shown: Sequence[str] = (),
    ) -> T:
        """Answer a question by the function for its kind, such as `recommend_items`.

        `about` is the item or the user that it is about; items `shown` before this answer count for
        its quotas. Raises `Invalid` for a question whose parts do not go together, and what
        `answer` raises.
        """
        question.check(self.parts.settings)
        request = Request(self.parts, question, stages or StageClock(), about)
        request.shown = shown
        return await answer(request)

    async def open(self) -> None:
        """Load what is served, or else close the engine.

        Raises `Corrupt` or `ModelRejected`, naming the file at fault.
        """
        try:
            await self.live.open()
        except BaseException:
            await self.close()
            raise
        torch.set_num_threads(1)  # of this thread: what it computes itself takes no time
        self.parts.event_log.begin()
        self._watches = [
            asyncio.create_task(_repeat(_POPULARITY, self.live.refresh_popularity)),
            asyncio.create_task(_repeat(_POLL, self.live.follow_registry, rest=0)),
            asyncio.create_task(_repeat(_POLL, self.parts.search.follow)),
            asyncio.create_task(_repeat(_STORE_POLL, self.live.catalogue.follow)),
            asyncio.create_task(_repeat(_FORGETTING, self.parts.memories.drop_forgotten)),
            asyncio.create_task(_repeat(_FORGETTING, self.store.clean_up)),
        ]

    async def close(self) -> None:
        """Stop the training, finish the work in hand and close the store."""
        for watch in self._watches:
            watch.cancel()
        await self.jobs.close()
        await self.parts.close()

    @property
    def is_busy(self) -> bool:
        """True while work goes on that closing would undo: a training, an activation."""
        return self.jobs.is_running or self.live.is_activating

    def abandon(self) -> None:
        """Kill the training, without waiting for anything: the process is about to end."""
        self.jobs.kill()

    async def models(self) -> list[Mapping[str, Any]]:
        """The versions on disk with their metrics, oldest first."""
        versions = await asyncio.to_thread(self.parts.registry.versions)
        return [version_document(version) for version in versions]

    async def activate(self, version: str) -> Mapping[str, Any]:
        """Serve this version. Raises `NotFound`, `ModelRejected`."""
        before = self.live.snapshot.version
        try:
            snapshot = await self.live.activate(version)
        except (Corrupt, Incompatible) as error:
            raise ModelRejected(error.detail) from error
        if self.announce is not None:
            await self.announce()
        return {"model_version": snapshot.version, "previous": before}

    async def ready(self) -> tuple[bool, Mapping[str, Any]]:
        """True if requests can be answered, and the result of each check (`monitoring.check`)."""
        return await monitoring.check(self.store, self.live, self.parts.settings.data)

    async def unknown_items(self, item_ids: Iterable[str]) -> list[str]:
        """Return the ids that the catalogue does not have, in their order and each once.

        The live catalogue may lag behind what another process has stored, so the store decides.
        """
        ids = list(dict.fromkeys(item_ids))
        catalogue = self.live.snapshot.catalogue
        rows = catalogue.rows(ids)
        known = rows >= 0
        known[known] = catalogue.present[rows[known]]
        doubtful = [i for i, is_known in zip(ids, known, strict=True) if not is_known]
        items = await self.store.get_items(doubtful) if doubtful else []
        return [i for i, item in zip(doubtful, items, strict=True) if item is None]

    async def typical_user(self) -> str | None:
        """A user with some 100 events, for examples; not the most active of all."""
        columns = await asyncio.to_thread(lambda: next(iter(self.store.scan(20_000)), None))
        if columns is None:
            return None
        events = np.bincount(columns.users, minlength=len(columns.user_ids))
        return columns.user_ids[int(np.argmin(np.abs(events - 100)))]

    async def measure(self) -> list[Measurement]:
        """Measure the parts, for metrics."""
        return await measure(self.parts, self.jobs, await self.ready())

    async def _serve_trained(self, job: Job) -> None:
        """Serve what a training published, if it is better than what is served."""
        result = job.result or {}
        version = result.get("version")
        if isinstance(version, str) and result["verdict"]["is_served"]:
            await self.activate(version)


async def open_engine(
    settings: Settings,
    *,
    encoder: TextEncoder | None = None,
    preloaded: Served | None = None,
) -> Engine:
    """Open an engine, ready to answer. Raises what `compose` and `LiveSnapshot.open` raise."""
    engine = Engine(compose(settings, encoder=encoder, preloaded=preloaded))
    await engine.open()
    return engine


async def _repeat(
    seconds: float, work: Callable[[], Awaitable[object]], *, rest: float = 100
) -> None:
    """Repeat work, `seconds` later at least; log a failure once, and try again.

    Work that takes long is done seldom: after `rest` times as long as it took. That is 0 for work
    that takes long only if there is something to do.
    """
    took, task = 0.0, object()
    what = f"{work.__qualname__} failed; earlier data serve, and it is tried again"
    try:
        while True:
            await asyncio.sleep(max(seconds, rest * took))
            started = time.monotonic()
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - the next try may succeed
                REPEATED.failed(_log, task, what, error)
                took = 0.0  # a hung server does not delay the next try
            else:
                REPEATED.succeeded(_log, task)
                took = time.monotonic() - started
    finally:
        REPEATED.ended(task)
