"""Namespaces: which engines are open in a process, and how each is opened and closed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from service.domain.errors import Busy, HeedError, NotFound
from service.domain.names import DEFAULT_NAMESPACE, is_name
from service.domain.settings import Settings
from service.engine.compose import Parts, compose
from service.engine.engine import Engine
from service.runtime.data_layout import StoreToken, without_folders
from service.runtime.logs import REPEATED, log_failure
from service.runtime.threads import ExecutorShare
from service.runtime.work_queue import place_left
from service.stores.namespace_directory import NamespaceDirectory, open_directory

_log = logging.getLogger(__name__)

_SWEEP = 1.0  # seconds between two looks at what was removed, and at what each cache holds
_RETRY = 5.0  # seconds after a namespace could not be opened, before it is tried again

OnOpen = Callable[[str, Engine], None]
OnRemove = Callable[[str], None]


def compose_engine(
    settings: Settings,
    directory: NamespaceDirectory,
    name: str,
    token: StoreToken | None,
    shared: Parts,
) -> Engine:
    """Wire the engine of a namespace, whose encoder and executor are those of `shared` parts.

    This creates files that are missing, so that removals wait for it. Raises what `compose` raises,
    and `NotFound` for a namespace that was removed, or created again.
    """
    with directory.held(name, token) as folder:
        parts = compose(
            settings.model_copy(update={"data": folder}),
            encoder=shared.embeddings.encoder,
            executor=ExecutorShare(shared.executor),
        )
        return Engine(parts)


@dataclass(eq=False)
class _Entry:
    """A namespace that is open, or being opened."""

    name: str
    token: StoreToken | None  # of the store that is opened
    opening: asyncio.Task[Engine]
    users: int = 0  # requests that use it now, or wait for it
    retired: bool = False  # it is closed when the last of them is done


@dataclass(frozen=True)
class _Failure:
    """A namespace that could not be opened."""

    token: StoreToken | None
    at: float  # of the monotonic clock
    state: str


class Namespaces:
    """The engines of a process by namespace.

    The engine of `default` is open all the time; it lends its text encoder and the threads of its
    executor to the others. At most `max_open_namespaces` of these are open, and what cannot be
    opened fails only its own requests.
    """

    def __init__(self, settings: Settings, default: Engine) -> None:
        self.default = default
        self._settings = settings
        self._directory = open_directory(settings.data, settings.store)
        self._entries: dict[str, _Entry] = {}  # least recently used first
        self._failures: dict[str, _Failure] = {}
        # Ids by name of all namespaces that were used, open or closed.
        self._known: dict[str, str | None] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._forgetting: dict[str, asyncio.Task[None]] = {}
        self._is_divided = False  # whether the caches share their bytes
        self._freed = asyncio.Event()  # set when a namespace may have become unused
        self._tasks: list[asyncio.Task[None]] = []
        self._on_open: list[OnOpen] = []
        self._on_remove: list[OnRemove] = []

    def begin(self) -> None:
        """Watch for removed namespaces, and open all that exist if there is room for them."""
        self._tasks = [asyncio.create_task(self._sweep()), asyncio.create_task(self._open_all())]

    def on_open(self, prepare: OnOpen) -> None:
        """Call `prepare` with each engine before it answers, also with those that are open."""
        self._on_open.append(prepare)
        for name, engine in self.engines().items():
            prepare(name, engine)

    def on_remove(self, forget: OnRemove) -> None:
        """Call `forget` with the name of each namespace that was used and is removed."""
        self._on_remove.append(forget)

    def engines(self) -> dict[str, Engine]:
        """Return the engines that are open, by the names of their namespaces."""
        names = (DEFAULT_NAMESPACE, *self._entries)
        return {name: engine for name in names if (engine := self.engine(name)) is not None}

    def has_served(self, name: str) -> bool:
        """Return True for a namespace that was used here and is not known to be removed."""
        return name == DEFAULT_NAMESPACE or name in self._known

    def engine(self, name: str) -> Engine | None:
        """Return the engine of a namespace, None where it is not open."""
        if name == DEFAULT_NAMESPACE:
            return self.default
        entry = self._entries.get(name)
        return None if entry is None else _opened(entry)

    def refresh(self, name: str) -> None:
        """Close a namespace that was removed, even if a later one has its name."""
        with suppress(NotFound):
            self._find(name)

    async def when_opened(self, name: str) -> Engine | None:
        """Return the engine of a namespace once it is open; None where it is not being opened."""
        if (entry := self._entries.get(name)) is not None:
            await asyncio.wait([entry.opening])
        return self.engine(name)

    def is_another(self, name: str, namespace_id: str) -> bool:
        """Report whether the namespace of a name has another id than this."""
        if name == DEFAULT_NAMESPACE or not is_name(name):
            return False
        return self._directory.namespace_id(name) not in (None, namespace_id)

    def is_gone(self, name: str, namespace_id: str | None) -> bool:
        """Report whether a namespace was removed; with an id, whether the one with that id was."""
        if name == DEFAULT_NAMESPACE or not is_name(name):
            return False
        found = self._directory.namespace_id(name)
        return found is None or namespace_id not in (None, found)

    @asynccontextmanager
    async def lease(self, name: str, namespace_id: str | None = None) -> AsyncIterator[Engine]:
        """Yield the engine of a namespace, which stays open until the block ends.

        Requests for one namespace share its opening, which goes on when they are given up. A
        namespace of this name with another id is refused.

        Raises:
            NotFound: there is no such namespace, or it was removed.
            Unavailable: it cannot be opened.
        """
        if name == DEFAULT_NAMESPACE:
            yield self.default
            return
        entry = await self._enter(name, namespace_id)
        try:
            if not entry.opening.done():
                async with place_left():
                    await asyncio.shield(entry.opening)
            yield await entry.opening
        finally:
            entry.users -= 1
            self._freed.set()
            if entry.retired and not entry.users:
                self._close(entry)

    async def ready(self, name: str = DEFAULT_NAMESPACE) -> tuple[bool, Mapping[str, Any]]:
        """Report whether a namespace answers, and the checks of its parts."""
        engine = self.engine(name)
        if engine is not None:
            return await engine.ready()
        return name not in self._failures, {}  # the next request opens it

    async def ready_others(self) -> Mapping[str, Any]:
        """Return the checks of each namespace in use but `default`.

        One that cannot be served has an `error` instead.
        """
        others: dict[str, Any] = {}
        for other, engine in self.engines().items():
            if other != DEFAULT_NAMESPACE:
                others[other] = dict((await engine.ready())[1])
        for other, failure in self._failures.items():
            others[other] = {"error": without_folders(failure.state, self._settings.data)}
        return others

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for entry in list(self._entries.values()):
            self._retire(entry)
            if entry.users:  # by requests that outlast the time to drain
                self._close(entry)
        ending = *self._closing.values(), *self._forgetting.values()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.to_thread(self._directory.close)
        await self.default.close()

    # ------------------------------------------------------------------ opening

    async def _enter(self, name: str, namespace_id: str | None) -> _Entry:
        """Return the entry of a namespace, counted as used, once there is room for it."""
        while True:
            token = self._find(name)
            if token is not None and namespace_id not in (None, token[2]):
                raise NotFound(f"there is no namespace {name!r} that this key is for")
            entry = self._entries.pop(name, None)
            if entry is None:
                self._check_failure(name)
                if not self._make_room():
                    self._freed.clear()
                    await self._freed.wait()
                    continue
                entry = _Entry(name, token, asyncio.create_task(self._open(name, token)))
                entry.opening.add_done_callback(partial(self._settle, entry))
            self._entries[name] = entry  # the most recently used
            self._known[name] = self._directory.namespace_id(name) if token is None else token[2]
            entry.users += 1
            return entry

    def _find(self, name: str) -> StoreToken | None:
        """Return the token of a namespace's store; retire what is open of an earlier one.

        Raises `NotFound` for a namespace that is missing.
        """
        token = self._directory.token(name) if is_name(name) else None
        entry = self._entries.get(name)
        if entry is not None and entry.token != token:
            self._retire(entry, removed=True)
        failure = self._failures.get(name)
        if failure is not None and failure.token != token:
            del self._failures[name]  # another file may be a good one
        found = self._directory.namespace_id(name) if token is None and is_name(name) else None
        namespace_id = found if token is None else token[2]
        if name in self._known and self._known[name] != namespace_id:
            del self._known[name]
            if namespace_id is None:
                self._forgetting[name] = asyncio.create_task(self._forget(name))
            for forget in self._on_remove:
                forget(name)
        if namespace_id is None:
            raise NotFound(f"there is no namespace {name[:80]!r}")
        return token

    async def _forget(self, name: str) -> None:
        """Remove what this machine keeps of a namespace that is gone."""
        try:
            await asyncio.to_thread(self._directory.forget, name)
        except (HeedError, OSError) as error:
            _log.warning("the folder of the removed namespace %s is still here: %s", name, error)
        del self._forgetting[name]

    def _check_failure(self, name: str) -> None:
        """Raise `Unavailable` for a namespace that could not be opened a moment ago."""
        failure = self._failures.get(name)
        if failure is not None and (left := failure.at + _RETRY - time.monotonic()) > 0:
            raise _unavailable(name, left)

    def _make_room(self) -> bool:
        """Retire unused namespaces until one more may be open; False where all are in use."""
        for entry in list(self._entries.values()):
            if len(self._entries) < self._settings.max_open_namespaces:
                break
            engine = _opened(entry)
            if engine is not None and not entry.users and not engine.is_busy:
                self._retire(entry)
        return len(self._entries) < self._settings.max_open_namespaces

    async def _open(self, name: str, token: StoreToken | None) -> Engine:
        if (closing := self._closing.get(name)) is not None:
            await asyncio.wait([closing])
        started = time.monotonic()
        try:
            engine = await self._open_engine(name, token)
        except NotFound:
            raise
        except Exception as error:
            state = error.state if isinstance(error, HeedError) else "an unexpected error"
            self._failures[name] = _Failure(token, time.monotonic(), state)
            unexpected = None if isinstance(error, HeedError) else error
            _log.error("namespace %s is not served: %s", name, error, exc_info=unexpected)
            raise _unavailable(name, _RETRY) from error
        self._failures.pop(name, None)
        for prepare in self._on_open:
            prepare(name, engine)
        _log.info("namespace %s opened in %.0f ms", name, 1e3 * (time.monotonic() - started))
        return engine

    async def _open_engine(self, name: str, token: StoreToken | None) -> Engine:
        """Open an engine, with its files read on other threads than the event loop's."""
        settings, directory, shared = self._settings, self._directory, self.default.parts
        composing = asyncio.create_task(
            asyncio.to_thread(compose_engine, settings, directory, name, token, shared)
        )
        try:
            engine = await asyncio.shield(composing)
        except asyncio.CancelledError:
            # A thread cannot be interrupted, and what it has opened must be closed.
            await (await composing).close()
            raise
        await engine.open()
        return engine

    def _settle(self, entry: _Entry, _: asyncio.Task[Engine]) -> None:
        """Divide the caches again once a namespace is open; forget one that could not be opened."""
        if _opened(entry) is not None:
            self._divide_caches()
        elif self._entries.get(entry.name) is entry:
            del self._entries[entry.name]
        self._freed.set()

    async def _open_all(self) -> None:
        """Open all namespaces, one after the other, if they are few."""
        names = await asyncio.to_thread(self._directory.names)
        if len(names) > self._settings.max_open_namespaces:
            return
        for name in names:
            try:
                async with self.lease(name):
                    pass
            except HeedError:
                continue  # it is logged

    # ------------------------------------------------------------------ closing

    def _retire(self, entry: _Entry, *, removed: bool = False) -> None:
        """Let no further request use an entry, and close it when it is unused."""
        if self._entries.get(entry.name) is entry:
            del self._entries[entry.name]
        engine = _opened(entry)
        if removed:
            _log.info("namespace %s was removed", entry.name)
            if engine is not None:
                engine.parts.embeddings.detach()
        entry.retired = True
        if not entry.users:
            self._close(entry)

    def _close(self, entry: _Entry) -> None:
        self._closing[entry.name] = task = asyncio.create_task(_close_opened(entry))

        def forget(_: asyncio.Task[None]) -> None:
            if self._closing.get(entry.name) is task:
                del self._closing[entry.name]
            self._divide_caches()

        task.add_done_callback(forget)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP)
            for name in list(self._known):
                try:
                    self._find(name)
                except NotFound:
                    continue
                except (HeedError, OSError) as error:
                    what = "removed namespaces are not looked for; it is tried again"
                    REPEATED.failed(_log, (self, name), what, error)
                else:
                    REPEATED.succeeded(_log, (self, name))
            self._divide_caches()
            self._freed.set()  # a training may have ended

    def _divide_caches(self) -> None:
        """Let each namespace's cache use what the others leave free, and its equal share always."""
        engines = list(self.engines().values())
        if len(engines) == 1 and not self._is_divided:
            return
        self._is_divided = len(engines) > 1
        total = self._settings.history_cache_bytes
        held = [engine.parts.memories.cached_bytes for engine in engines]
        for engine, size in zip(engines, held, strict=True):
            free = total - (sum(held) - size)
            engine.parts.memories.resize_cache(max(total // len(engines), free))


async def _close_opened(entry: _Entry) -> None:
    entry.opening.cancel()  # no effect where it is done
    await asyncio.wait([entry.opening])
    engine = _opened(entry)
    if engine is not None:
        try:
            await engine.close()
        except Exception as error:  # noqa: BLE001 - the other namespaces go on
            log_failure(_log, f"namespace {entry.name} was not closed", error)


def _opened(entry: _Entry) -> Engine | None:
    """Return the engine of an entry, None while it is being opened and where that has failed."""
    task = entry.opening
    if not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result()


def _unavailable(name: str, seconds: float) -> Busy:
    return Busy(f"the namespace {name!r} cannot be served now; the service's log says why", seconds)
