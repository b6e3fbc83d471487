"""Shared by the HTTP tests: a small engine in memory, and a client that drives the real app."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import httpx
from fastapi import FastAPI

from service.domain.errors import Conflict, Invalid, NotFound
from service.domain.keys import ApiKey, Rate, Scope, issue_key
from service.domain.records import Event, Item, ItemPatch, Scenario, User
from service.domain.settings import Settings
from service.engine.engine import Engine, LiveScenarios
from service.http.app import create_app
from service.jobs.job import Job
from service.runtime.tracing import Measurement, StageClock
from service.snapshots.registry import Version, version_document
from service.stores.base import Store
from service.stores.values import AppendResult, PatchResult

_ROW = {
    "event_id": "e0",
    "item_id": "a",
    "title": "A",
    "type": "view",
    "timestamp": "1970-01-01T00:00:00.000001Z",
    "events": 1,
    "weight": 0.5,
    "contribution": -0.25,
    "effect": 1.25,
    "effect_is_exact": False,
}
_ATTENDED = {
    "rows": [1, 0],
    "weights": [[0.75, 0.25]],
    "context": [0.5, -1.0],
    "mass": [1.0],
    "retrieval": "exact",
    "degraded": False,
    "ids": None,
    "model_version": None,
    "events": None,
}
_ABOUT_AN_ITEM = ("similar_items", "items_together", "item_audience", "item_events")
T = TypeVar("T")


class FakeEngine:
    """Keeps everything in dicts, answers plausibly and remembers what it was asked.

    It is an engine and its parts at once.
    """

    rate_windows = None
    settings = Settings()

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        self.events: dict[str, list[Event]] = {}
        self.users: dict[str, User] = {}
        self.saved: dict[str, list[Scenario]] = {}
        self.scenarios = LiveScenarios(cast(Store, self))
        self.asked: list[Any] = []
        self.about: list[str] = []  # the items and users that these were about
        self.arrived = asyncio.Semaphore(0)  # one for each question asked
        self.batches: list[int] = []
        self.raises: Exception | None = None
        self.gate: asyncio.Event | None = None  # when set, questions wait for it
        self.is_ready = True
        self.closed = False
        self.trained: list[Mapping[str, Any]] = []
        self.api_keys: dict[str, ApiKey] = {}
        self.changes_of_keys = 0

    executor = None  # the event loop's own
    store = live = catalogue = jobs = property(lambda self: self)
    model_version = "v1"

    # ------------------------------------------------------------------ API keys

    def issue(self, *scopes: Scope, rate: Rate | None = None, expires: int | None = None) -> str:
        """Store a key with these scopes and return its token; `expires` may be in the past."""
        key, token = issue_key("shop", frozenset(scopes), 0, expires=expires, rate=rate)
        self.change(key)
        return token

    def change(self, key: ApiKey) -> None:
        self.api_keys[key.key_id] = key
        self.changes_of_keys += 1

    async def keys_version(self) -> int:
        return self.changes_of_keys

    def announced_keys(self) -> int:
        return self.changes_of_keys

    async def key(self, key_id: str) -> ApiKey | None:
        return self.api_keys.get(key_id)

    # ------------------------------------------------------------------ parts

    async def _work(self, query: Any) -> None:
        self.asked.append(query)
        self.arrived.release()
        if self.raises is not None:
            raise self.raises
        if self.gate is not None:
            await self.gate.wait()

    async def put_items(self, items: Sequence[Item]) -> int:
        await self._work(items)
        for index, item in enumerate(items):
            if item.title == "refused by the engine":
                raise Invalid(f"/items/{index}/title", "the engine does not want it")
        self.batches.append(len(items))
        self.items.update({item.item_id: item for item in items})
        return len(items)

    async def patch_items(
        self, patches: Sequence[ItemPatch], *, create: bool = True
    ) -> PatchResult:
        created = []
        for patch in patches:
            item = self.items.get(patch.item_id)
            if item is None:
                created.append(patch.item_id)
            if item is None and not create:
                raise NotFound(f"no item {patch.item_id!r}")
            self.items[patch.item_id] = patch.apply(item)
        return PatchResult(len(patches), tuple(created))

    async def get_items(self, item_ids: Sequence[str]) -> list[Item | None]:
        return [self.items.get(item_id) for item_id in item_ids]

    async def unknown_items(self, item_ids: Iterable[str]) -> list[str]:
        return [item_id for item_id in dict.fromkeys(item_ids) if item_id not in self.items]

    async def delete_item(self, item_id: str) -> bool:
        return self.items.pop(item_id, None) is not None

    async def page_items(
        self, *, cursor: str | None, limit: int, hidden: bool = False
    ) -> tuple[list[Item], str | None]:
        items = [item for item in self.items.values() if item.hidden or not hidden]
        return _page(items, cursor, limit)

    async def page_users(
        self, *, cursor: str | None, limit: int, prefix: str
    ) -> tuple[list[User], str | None]:
        users = [user for user in self.users.values() if user.user_id.startswith(prefix)]
        return _page(users, cursor, limit)

    async def event_counts(self, user_ids: Sequence[str]) -> list[int]:
        return [len(self.events.get(user_id, [])) for user_id in user_ids]

    async def append(self, events: Sequence[Event]) -> AppendResult:
        await self._work(events)
        known = {e.event_id for stored in self.events.values() for e in stored}
        stored = 0
        for event in events:
            if event.event_id is None or event.event_id not in known:
                event_id = event.event_id or f"auto-{sum(map(len, self.events.values()))}"
                row = replace(event, event_id=event_id, timestamp=event.timestamp or 0)
                self.events.setdefault(event.user_id, []).append(row)
                known.add(event_id)
                stored += 1
        return AppendResult(stored, len(events) - stored)

    async def put_scenario(self, name: str, body: Mapping[str, Any]) -> Scenario:
        versions = self.saved.setdefault(name, [])
        versions.append(Scenario(name, len(versions) + 1, 0, body))
        return versions[-1]

    async def scenario(self, name: str) -> Scenario | None:
        versions = self.saved.get(name)
        return versions[-1] if versions and versions[-1].body is not None else None

    async def delete_scenario(self, name: str) -> bool:
        last = await self.scenario(name)
        if last is not None:
            self.saved[name].append(Scenario(name, last.version + 1, 0, None))
        return last is not None

    async def page_scenarios(
        self, *, cursor: str | None, limit: int
    ) -> tuple[list[Scenario], str | None]:
        versions = [each[-1] for each in self.saved.values() if each[-1].body is not None]
        return _page(versions, cursor, limit)

    async def page_scenario_versions(
        self, name: str, *, cursor: str | None, limit: int
    ) -> tuple[list[Scenario], str | None]:
        return _page(self.saved.get(name, [])[::-1], cursor, limit)

    async def put_user(self, user: User) -> None:
        self.users[user.user_id] = user

    async def get_user(self, user_id: str) -> User | None:
        return self.users.get(user_id)

    async def page(
        self, user_id: str, *, cursor: str | None, limit: int
    ) -> tuple[list[Event], str | None]:
        return _page(self.events.get(user_id, [])[::-1], cursor, limit)

    async def delete_event(self, user_id: str, event_id: str) -> bool:
        events = self.events.get(user_id, [])
        self.events[user_id] = [e for e in events if e.event_id != event_id]
        return len(self.events[user_id]) < len(events)

    async def forget(self, user_id: str) -> int:
        self.users.pop(user_id, None)
        return len(self.events.pop(user_id, []))

    async def merge(self, user_id: str, source: str) -> int:
        moved = self.events.pop(source, [])
        self.events.setdefault(user_id, []).extend(replace(e, user_id=user_id) for e in moved)
        return len(moved)

    async def ask(
        self,
        answer: Callable[..., object],
        question: Any,
        stages: StageClock,
        *,
        about: str = "",
        shown: Sequence[str] = (),
    ) -> Mapping[str, Any]:
        """Answer as the questions themselves would, from the few items there are."""
        question.check(self.settings)
        with stages("store"):
            await self._work(question)
        with stages("attend"):
            return self._answer(answer.__name__, question, about, shown)

    def _answer(
        self, name: str, question: Any, about: str, shown: Sequence[str]
    ) -> Mapping[str, Any]:
        self.about.append(about)
        if name == "attend_memory":
            return dict(_ATTENDED)
        if name == "user_affinities":
            values = [
                {"value": "jazz", "mass": 0.5, "score": 1.0, "events": 3},
                {"value": "rock", "mass": 0.25, "score": None, "events": 1},
            ]
            return {"field": question.field, "values": values, **self._made()}
        if name in _ABOUT_AN_ITEM and about not in self.items:
            raise NotFound(f"There is no item {about!r}.")
        if name == "item_events":
            event = {"user_id": "u", "type": "view", "timestamp": "1970-01-01T00:00:00.000001Z"}
            return {"events": [event][: question.limit], "total": 1, "degraded": False}
        if name == "item_audience":
            user = {
                "user_id": "u",
                "score": 1.0,
                "parts": {"attention": 1.0},
                "reason": "personal",
                "explanation": [_ROW],
            }
            return {"users": [user], "scored": 1, "candidates": 1, **self._made()}
        excluded = {about, *getattr(question, "exclude", ()), *shown}
        ids = [i for i in self.items if i not in excluded][: getattr(question, "limit", None)]
        items = self._answered(getattr(question, "item_ids", ids), question)
        if name == "answer_rows":
            reason = {
                "kind": "because",
                "text": "Because you viewed A",
                "item_id": "a",
                "event_ids": ["e0"],
            }
            return {"rows": [{"reason": reason, "items": items}], **self._made()}
        return {"items": items, **self._made()}

    def _made(self) -> dict[str, Any]:
        return {"model_version": self.model_version, "retrieval": "exact", "degraded": False}

    def _answered(self, ids: Sequence[str], question: Any) -> list[dict[str, Any]]:
        parts = {"attention": 0.75, "prior": 0.25}
        items = [{"item_id": i, "title": "", "score": 1.0, "parts": parts} for i in ids]
        if getattr(question, "explain", 0) or hasattr(question, "rows"):
            items = [{**item, "explanation": [_ROW]} for item in items]
        return items

    async def start(self, options: Mapping[str, Any]) -> str:
        if self.trained:
            raise Conflict("A training is running: job-1.")
        self.trained.append(options)
        return "job-1"

    async def get(self, job_id: str) -> Job:
        if job_id != "job-1":
            raise NotFound(f"There is no job {job_id!r}.")
        return Job(job_id, "running", {}, 1, progress={"stage": "training", "step": 1})

    async def latest(self, limit: int) -> list[Job]:
        return [await self.get("job-1")][:limit]

    async def cancel(self, job_id: str) -> Job:
        return await self.get(job_id)

    async def models(self) -> list[Mapping[str, Any]]:
        return [version_document(Version("v1", current=True, metadata={"metrics": {"ndcg": 0.2}}))]

    async def activate(self, version: str) -> Mapping[str, Any]:
        await self._work(version)
        if version != "v1":
            raise NotFound(f"There is no version {version!r}.")
        return {"model_version": version, "previous": "v1"}

    async def ready(self) -> tuple[bool, Mapping[str, Any]]:
        return self.is_ready, {"store": self.is_ready, "model": "v1"}

    async def measure(self) -> list[Measurement]:
        hits = Measurement("cache_hits_total", "counter", "Hits.", 3.0, {"cache": "history"})
        return [Measurement("items", "gauge", "Items.", len(self.items)), hits]

    async def close(self) -> None:
        self.closed = True


def _page(rows: list[T], cursor: str | None, limit: int) -> tuple[list[T], str | None]:
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 9):
        raise Invalid("/cursor", "is not a cursor of this list")
    start = int(cursor or 0)
    return rows[start : start + limit], str(start + limit) if start + limit < len(rows) else None


class Client:
    """A synchronous face on httpx's client and the event loop it lives in."""

    def __init__(self, app: FastAPI, engine: FakeEngine, runner: asyncio.Runner) -> None:
        self.app = app
        self.engine = engine
        self.runner = runner
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        methods = ("GET", "POST", "PUT", "PATCH", "DELETE")
        self.get, self.post, self.put, self.patch, self.delete = (
            partial(self.request, method) for method in methods
        )

    def request(self, method: str, url: str, **more: Any) -> httpx.Response:
        return self.runner.run(self.http.request(method, url, **more))

    def raw(self, url: str, body: bytes | str) -> httpx.Response:
        """Post bytes that are called JSON, whatever they are."""
        return self.post(url, content=body, headers={"content-type": "application/json"})


@contextmanager
def serving(**settings: Any) -> Iterator[Client]:
    """The real app around a fake engine, started and stopped as a server would."""
    engine = FakeEngine()
    engine.settings = Settings(**{"embedding_dim": 4, "deadline": 30, **settings})
    app = create_app(engine.settings, engine=cast(Engine, engine))
    with asyncio.Runner() as runner:
        lifespan = app.router.lifespan_context(app)
        runner.run(lifespan.__aenter__())
        client = Client(app, engine, runner)
        try:
            yield client
        finally:
            runner.run(client.http.aclose())
            runner.run(lifespan.__aexit__(None, None, None))
