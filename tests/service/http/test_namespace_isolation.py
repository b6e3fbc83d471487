"""Isolation of namespaces, on every route: each answers as a service of its own would.

Two namespaces have equal ids with different contents. Every request goes to both of them in one
service, and to two services that have one of the contents each: the answers must be equal.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from service.domain.records import Event, Item, User
from service.http.routes import page
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.stores.sqlite.store import SQLiteStore
from tests.support import tiny
from tests.support.namespaced import NamespacedService, copy_namespace
from tests.support.tiny import AT, World, item_id

# Routes that are about the process and not about what is stored.
ABOUT_THE_PROCESS = {
    ("get", "/health/live"),
    ("get", "/health/ready"),
    ("get", "/metrics"),
    ("get", "/"),
    ("get", "/docs"),
    ("get", "/docs/{name}"),
    ("get", "/playground/settings.json"),
    ("get", "/playground/{name:path}"),
}
# What two runs of one service differ in.
VOLATILE = {"request_id", "created", "written_at"}
VECTOR = [0.0] * 255 + [1.0]
SPACE, MUSIC = item_id(0, 1), item_id(3, 2)
ASKED = {"user_id": "u1", "at": AT}


class Sent(NamedTuple):
    """A request: of the path `{words}` are filled in from what the namespace has."""

    method: str
    path: str
    body: Any = None
    kind: str = "application/json"


# By the route, what is sent; reads first, then writes, and deletions last.
READS: dict[tuple[str, str], list[Sent]] = {
    ("post", "/v1/score"): [
        Sent("POST", "/v1/score", {**ASKED, "item_ids": [SPACE, MUSIC, "own"], "explain": 5}),
        Sent("POST", "/v1/score", {"history": [{"item_id": SPACE}], "item_ids": [MUSIC]}),
    ],
    ("post", "/v1/recommend"): [
        Sent("POST", "/v1/recommend", {**ASKED, "limit": 9, "explain": 2, "fields": ["tags"]}),
        Sent("POST", "/v1/recommend", {"user_id": "profiled", "at": AT}),
        Sent("POST", "/v1/recommend", {"limit": 5, "at": AT}),
    ],
    ("post", "/v1/search"): [
        Sent("POST", "/v1/search", {"query": "rocket orbit", "facets": [{"field": "tags"}]}),
        Sent("POST", "/v1/search", {"query": "soup", "user_id": "u1", "at": AT, "explain": 2}),
        Sent("POST", "/v1/search", {"query": "{word} thing"}),
        Sent("POST", "/v1/search", {"query": "{other_word} thing"}),
        Sent("POST", "/v1/search", {"limit": 4, "sort": [{"field": "attributes.number"}]}),
    ],
    ("post", "/v1/attend"): [
        Sent("POST", "/v1/attend", {"memory": {"user_id": "u1"}, "query": {"item_id": SPACE}}),
        Sent("POST", "/v1/attend", {"memory": {"catalogue": True}, "query": {"text": "bread"}}),
    ],
    ("post", "/v1/popular"): [
        Sent("POST", "/v1/popular", {"limit": 9, "at": AT}),
        Sent("POST", "/v1/popular", {"by": "newest", "limit": 9}),
    ],
    ("post", "/v1/rows"): [Sent("POST", "/v1/rows", {**ASKED, "explain": 1})],
    ("get", "/v1/items/{item_id}/together"): [Sent("GET", f"/v1/items/{SPACE}/together")],
    ("post", "/v1/items/{item_id}/together"): [
        Sent("POST", f"/v1/items/{SPACE}/together", {"fields": ["tags"]})
    ],
    ("get", "/v1/items/{item_id}/audience"): [Sent("GET", f"/v1/items/{SPACE}/audience?at={AT}")],
    ("get", "/v1/items/{item_id}/events"): [Sent("GET", f"/v1/items/{SPACE}/events")],
    ("get", "/v1/users/{user_id}/affinities"): [
        Sent("GET", f"/v1/users/u1/affinities?field=categories&at={AT}")
    ],
    ("get", "/v1/items/{item_id}/similar"): [Sent("GET", f"/v1/items/{SPACE}/similar?limit=5")],
    ("post", "/v1/items/{item_id}/similar"): [
        Sent("POST", f"/v1/items/{SPACE}/similar", {"limit": 5, "fields": ["attributes"]})
    ],
    ("post", "/v1/batch"): [
        Sent(
            "POST",
            "/v1/batch",
            {
                "requests": [
                    {"path": "/v1/recommend", "body": ASKED},
                    {"path": f"/v1/items/{SPACE}"},
                    {"path": f"/v1/items/{SPACE}/audience", "body": {"at": AT}},
                    {"path": "/v1/scenarios/home", "body": {"at": AT}},
                ]
            },
        )
    ],
    ("post", "/v1/scenarios/{name}"): [Sent("POST", "/v1/scenarios/home", {"at": AT})],
    ("get", "/v1/scenarios/{name}"): [
        Sent("GET", "/v1/scenarios/home"),
        Sent("GET", "/v1/scenarios/own-{word}"),
        Sent("GET", "/v1/scenarios/own-{other_word}"),
    ],
    ("get", "/v1/scenarios"): [Sent("GET", "/v1/scenarios?limit=1"), Sent("GET", "/v1/scenarios")],
    ("get", "/v1/scenarios/{name}/versions"): [Sent("GET", "/v1/scenarios/home/versions")],
    ("get", "/v1/items"): [Sent("GET", "/v1/items?limit=3"), Sent("GET", "/v1/items?limit=99")],
    ("get", "/v1/items/{item_id}"): [
        Sent("GET", f"/v1/items/{SPACE}"),
        Sent("GET", "/v1/items/only-{word}"),
        Sent("GET", "/v1/items/only-{other_word}"),
    ],
    ("get", "/v1/users/{user_id}"): [Sent("GET", "/v1/users/profiled")],
    ("get", "/v1/users"): [Sent("GET", "/v1/users?limit=3"), Sent("GET", "/v1/users?limit=99")],
    ("get", "/v1/users/{user_id}/history"): [
        Sent("GET", "/v1/users/u1/history?limit=3"),
        Sent("GET", "/v1/users/u1/history?limit=99"),
        Sent("GET", "/v1/users/own-{other_word}/history"),
    ],
    ("get", "/v1/models"): [Sent("GET", "/v1/models")],
    ("get", "/v1/jobs"): [Sent("GET", "/v1/jobs")],
    ("get", "/v1/jobs/{job_id}"): [Sent("GET", "/v1/jobs/none")],
}
EVENT = {"user_id": "u1", "item_id": MUSIC, "timestamp": "2025-12-31T00:00:00Z"}
WRITES: dict[tuple[str, str], list[Sent]] = {
    ("post", "/v1/events"): [
        Sent("POST", "/v1/events", {"events": [{**EVENT, "event_id": "new", "type": "{word}"}]}),
    ],
    ("put", "/v1/users/{user_id}"): [
        Sent("PUT", "/v1/users/profiled", {"interests": ["violin {word}"]})
    ],
    ("post", "/v1/users/{user_id}/merge"): [Sent("POST", "/v1/users/u1/merge", {"from": "u2"})],
    ("post", "/v1/items"): [
        Sent("POST", "/v1/items", {"items": [{"item_id": SPACE, "title": "anew {word}"}]}),
        Sent(
            "POST",
            "/v1/items",
            '{"item_id": "streamed-{word}", "title": "rocket {word}"}\n',
            "application/x-ndjson",
        ),
    ],
    ("patch", "/v1/items/{item_id}"): [
        Sent("PATCH", f"/v1/items/{MUSIC}", {"title": "guitar {word}", "tags": ["{word}"]})
    ],
    ("put", "/v1/scenarios/{name}"): [
        Sent("PUT", "/v1/scenarios/home", {"question": "search", "query": "{word}"})
    ],
    ("post", "/v1/models/{version}/activate"): [Sent("POST", "/v1/models/{idle}/activate")],
    ("post", "/v1/jobs/{job_id}/cancel"): [Sent("POST", "/v1/jobs/none/cancel")],
    ("delete", "/v1/scenarios/{name}"): [Sent("DELETE", "/v1/scenarios/home")],
    ("delete", "/v1/users/{user_id}/history/{event_id}"): [
        Sent("DELETE", "/v1/users/u3/history/e3-4")
    ],
    ("delete", "/v1/users/{user_id}"): [Sent("DELETE", "/v1/users/u1")],
    ("delete", "/v1/items/{item_id}"): [Sent("DELETE", f"/v1/items/{SPACE}")],
}
# Reads that are compared after each write, and not only after all.
PROBES = [
    ("post", "/v1/recommend"),
    ("post", "/v1/search"),
    ("post", "/v1/popular"),
    ("get", "/v1/items"),
    ("get", "/v1/users/{user_id}"),
    ("get", "/v1/users/{user_id}/history"),
    ("get", "/v1/scenarios"),
    ("get", "/v1/models"),
]
APART = {("post", "/v1/models/train")}  # in a test of its own


class Content(NamedTuple):
    """A content for the ids that both have."""

    data: Path
    word: str  # in every title and many tags of this one alone
    other_word: str
    idle: str  # a model version that is not current

    def filled(self, sent: Sent) -> Sent:
        """Return a request with the words of this content."""

        def fill(text: str) -> str:
            for name in ("other_word", "word", "idle"):
                text = text.replace("{" + name + "}", getattr(self, name))
            return text

        body = sent.body
        if body is not None:
            body = fill(body) if isinstance(body, str) else json.loads(fill(json.dumps(body)))
        return sent._replace(path=fill(sent.path), body=body)


def populate(data: Path, word: str, seed: int) -> None:
    """Write items, events, profiles and scenarios whose ids do not depend on the seed."""

    async def write(store: SQLiteStore) -> None:
        items = [
            Item(each.item_id, title=f"{each.title} {word}", tags=(*each.tags, word),
                 categories=each.categories, attributes={**each.attributes, "word": word})
            for each in tiny.items(seed)
        ]  # fmt: skip
        await store.put_items([*items, Item("own", title=word), Item(f"only-{word}", title=word)])
        own = Event(f"own-{word}", "own", "e-own", timestamp=tiny.NOON - tiny.DAY)
        await store.append([*tiny.events(seed), own])
        await store.put_user(User("profiled", {"word": word}, (f"castle {word}",)))
        for name in ("home", f"own-{word}"):
            await store.put_scenario(name, {"question": "popular", "limit": 1 + seed})
        await store.begin_import(word)
        await store.close()

    data.mkdir()
    asyncio.run(write(SQLiteStore(data / STORE_FILE)))


@pytest.fixture
def contents(world: World, tmp_path: Path) -> tuple[Content, Content]:
    """Two contents, each with both models, of which another one is current."""
    made = []
    words = ("alphaword", "betaword")
    for seed, (word, other) in enumerate((words, words[::-1])):
        data = tmp_path / word
        populate(data, word, seed + 1)
        copied = world.copy(tmp_path / "copied")
        (copied / MODELS_FOLDER).rename(data / MODELS_FOLDER)
        made.append(Content(data, word, other, (world.second, world.first)[seed]))
        (tmp_path / "copied").rename(tmp_path / f"left-{word}")
    Registry(made[1].data / MODELS_FOLDER).activate(world.second)
    return made[0], made[1]


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of all services."""
    with asyncio.Runner() as runner:
        yield runner


def plain(answer: httpx.Response) -> Any:
    """Return the status and the body of an answer, without what two runs differ in."""

    def stripped(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: stripped(each) for name, each in node.items() if name not in VOLATILE}
        if isinstance(node, float):
            return round(node, 4)
        return [stripped(each) for each in node] if isinstance(node, list) else node

    return answer.status_code, stripped(answer.json()) if answer.content else None


def documented(app: FastAPI) -> set[tuple[str, str]]:
    """Return all routes of the document, and those of the page, which it leaves out."""
    shown = {(m, path) for path, ways in app.openapi()["paths"].items() for m in ways}
    hidden = {("get", route.path) for route in page.router.routes if isinstance(route, APIRoute)}
    return shown | hidden


def test_no_route_sees_or_changes_another_namespace(
    contents: tuple[Content, Content],
    runner: asyncio.Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On every route, each of two namespaces answers as a service with its content alone."""
    # Popularity is counted now and then, which would be at other moments in each service.
    monkeypatch.setattr("service.engine.engine._POPULARITY", 1e6)
    data = tmp_path / "together"
    shutil.copytree(contents[0].data, data)
    copy_namespace(contents[1].data, data, "other")
    together = NamespacedService(runner, data)
    known = READS.keys() | WRITES.keys() | APART | ABOUT_THE_PROCESS
    assert documented(together.app) == known, "the walk knows other routes than there are"
    alone = [
        NamespacedService(runner, shutil.copytree(each.data, tmp_path / f"alone-{each.word}"))
        for each in contents
    ]
    names = ("default", "other")

    expected: list[dict[str, Any]] = [{}, {}]  # of each service alone, since it was written to

    def compare(at: int, sent: Sent, *, reads: bool = True) -> Any:
        """Send a request to a namespace, and to the service that has its content alone."""
        own = contents[at].filled(sent)
        answer = together.ask(own.method, own.path, own.body, names[at], kind=own.kind)
        if not reads:
            expected[at].clear()
        if (key := repr(own)) not in expected[at]:
            expected[at][key] = plain(alone[at].ask(own.method, own.path, own.body, kind=own.kind))
        assert plain(answer) == expected[at][key], (names[at], own)
        assert answer.status_code < 500, answer.text
        if contents[at].other_word not in key:
            assert contents[at].other_word not in answer.text, (names[at], own)
        return plain(answer)

    every_read = [sent for reads in READS.values() for sent in reads]
    probes = [sent for route in PROBES for sent in READS[route]]
    try:
        differing = [sent for sent in every_read if compare(0, sent) != compare(1, sent)]
        assert len(differing) > 0.7 * len(every_read)  # so that a leak would show
        # A cursor of one namespace, sent to the other: a place in a list, and nothing more.
        for path in ("/v1/items", "/v1/users", "/v1/users/u1/history", "/v1/scenarios"):
            for at in (0, 1):
                _, page = compare(at, Sent("GET", f"{path}?limit=1"))
                sent = Sent("GET", f"{path}?limit=2&cursor={page['cursor']}")
                assert compare(1 - at, sent)[0] == 200
        for at in (0, 1):
            for writes in WRITES.values():
                for sent in writes:
                    compare(at, sent, reads=False)
                    for read in probes:
                        compare(1 - at, read)
            for read in every_read:
                compare(0, read)
                compare(1, read)
    finally:
        for service in (together, *alone):
            service.close()
