"""Real servers under random operations, kills and restarts, beside a model of dicts.

HEED_STATE_STEPS, 50 by default, is the number of steps.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import httpx
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from service.domain.errors import Conflict
from service.domain.records import Event, User
from service.maintenance.copying import copy_store
from service.runtime.data_layout import STORE_FILE
from service.stores.postgres.store import PostgresStore
from service.stores.sqlite.store import SQLiteStore
from tests.support.server import Server
from tests.support.store_model import Notebook
from tests.support.tiny import GENRES, World, item_id
from tests.support.waiting import eventually

STEPS = int(os.environ.get("HEED_STATE_STEPS", "50"))
STEPS_OF_A_RUN = 50
TRAININGS_OF_A_RUN = 1

USERS = st.sampled_from([f"s{n}" for n in range(5)])
ITEMS = st.sampled_from([item_id(g, n) for g in range(len(GENRES)) for n in range(3)] + ["new-1"])
TIMES = st.integers(0, 59)
EVENT_IDS = st.integers(0, 60).map(lambda n: f"id-{n}")
NEW_ITEMS = st.sampled_from(["new-1", "new-2", "new-3"])
REPLICAS = st.integers(0, 1)  # the server that is called: the only one, where there is one


Starts = Sequence[Callable[[], Server]]


class StatePlace(Protocol):
    """A place in which servers begin with the small world, as often as one asks."""

    world: World

    def begin(self, folder: Path) -> Starts:
        """Lay the world out again; return what starts each server, again after it has ended."""


class FilesPlace:
    """A data directory, and the one server of it."""

    def __init__(self, world: World) -> None:
        self.world = world

    def begin(self, folder: Path) -> Starts:
        data = folder / "data"
        shutil.rmtree(data, ignore_errors=True)
        self.world.copy(data)
        return [partial(Server, data)]


class DatabasePlace:
    """Two servers, with data directories of their own, over one database.

    Args:
        world: its models are in the directory of the first server.
        create_database: makes an empty one, and returns its URL.
    """

    def __init__(self, world: World, create_database: Callable[[], str]) -> None:
        self.world = world
        self._create_database = create_database

    def begin(self, folder: Path) -> Starts:
        url = self._create_database()
        asyncio.run(_copy(self.world.data / STORE_FILE, url))
        places = [folder / f"data-{number}" for number in range(2)]
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        self.world.copy(places[0])
        (places[0] / STORE_FILE).unlink()
        places[1].mkdir()
        return [partial(Server, place, store=url) for place in places]


async def _copy(path: Path, url: str) -> None:
    source, target = SQLiteStore(path), PostgresStore(url)
    await copy_store(source, target, "the small world")
    await target.close()
    await source.close()


class Machine(RuleBasedStateMachine):
    """The servers and the model, which must agree after every step.

    What one server has acknowledged about a user, each of them has in the next answer. Another
    server's changes of the catalogue and of the model that serves are followed in a while.
    """

    place: StatePlace
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.model = Notebook()
        self.titles: dict[str, str] = {}
        self.touched: set[str] = set()
        self.trained = 0
        self.starts = self.place.begin(self.folder)
        self.servers: list[Server] = []
        self.clients: list[httpx.Client] = []
        for start in self.starts:
            self.servers.append(start())
            self.clients.append(self.servers[-1].client())
        self.wrote_item = self.clients[0]
        world = self.place.world
        self.versions = [world.first, world.second]
        for version in reversed(self.versions):  # which shares it among the servers
            self.clients[0].post(f"/v1/models/{version}/activate", json={}).raise_for_status()
        self._await_version(world.first)

    def teardown(self) -> None:
        for client in self.clients:
            client.close()
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.wait()

    def _at(self, replica: int) -> httpx.Client:
        return self.clients[replica % len(self.clients)]

    def _follows(self, http: httpx.Client, holds: Callable[[], bool]) -> None:
        """Assert what holds at once where the catalogue was last written, elsewhere in a while."""
        if not holds():
            assert http is not self.wrote_item
            eventually(holds)

    def _await_version(self, version: str) -> None:
        for http in self.clients:
            eventually(partial(_serves, http, version))

    @initialize()
    def begin(self) -> None:
        """Start from the small world."""
        for client in self.clients:
            assert client.get("/health/ready").status_code == 200

    @rule(at=REPLICAS, user=USERS, item=ITEMS, second=TIMES, name=EVENT_IDS, again=st.booleans())
    def append(self, at: int, user: str, item: str, second: int, name: str, again: bool) -> None:
        """Append an event once or twice; the same id with another body conflicts."""
        event = Event(user, item, name, "view", 1.0, 1_700_000_000_000_000 + second * 1_000_000)
        body = {
            "user_id": user,
            "item_id": item,
            "event_id": name,
            "type": "view",
            "timestamp": f"2023-11-14T22:13:{20 + second:02}Z"
            if second < 40
            else f"2023-11-14T22:14:{second - 40:02}Z",
        }
        events = [event] * (1 + again)
        answer = self._at(at).post("/v1/events", json={"events": [body] * (1 + again)})
        try:
            stored, duplicates = self.model.append(events)
        except Conflict:
            assert answer.status_code == 409, answer.text
            return
        counts = answer.json()
        assert (counts["stored"], counts["duplicates"]) == (stored, duplicates)
        self.touched.add(user)

    @rule(at=REPLICAS, user=USERS, name=EVENT_IDS)
    def delete_event(self, at: int, user: str, name: str) -> None:
        """Delete an event, which may not be there."""
        status = self._at(at).delete(f"/v1/users/{user}/history/{name}").status_code
        assert (status < 300) == self.model.delete_event(user, name)

    @rule(at=REPLICAS, user=USERS)
    def forget(self, at: int, user: str) -> None:
        self.model.forget(user)
        self._at(at).delete(f"/v1/users/{user}").raise_for_status()

    @rule(at=REPLICAS, user=USERS, source=USERS)
    def merge(self, at: int, user: str, source: str) -> None:
        answer = self._at(at).post(f"/v1/users/{user}/merge", json={"from": source})
        if user == source:
            assert answer.status_code == 422
        else:
            answer.raise_for_status()
            self.model.merge(user, source)
            self.touched.add(user)

    @rule(
        at=REPLICAS,
        user=USERS,
        interests=st.lists(st.sampled_from(GENRES), max_size=2, unique=True),
    )
    def put_user(self, at: int, user: str, interests: list[str]) -> None:
        http = self._at(at)
        http.put(f"/v1/users/{user}", json={"interests": interests}).raise_for_status()
        self.model.profiles[user] = User(user, {}, tuple(interests))

    @rule(at=REPLICAS, name=NEW_ITEMS, word=st.sampled_from(["emu", "gnu"]))
    def put_item(self, at: int, name: str, word: str) -> None:
        http = self._at(at)
        http.post(
            "/v1/items", json={"items": [{"item_id": name, "title": word}]}
        ).raise_for_status()
        self.titles[name] = word
        self.wrote_item = http

    @rule(at=REPLICAS, name=NEW_ITEMS)
    def delete_item(self, at: int, name: str) -> None:
        """Remove an item, which may not be there."""
        http = self._at(at)
        status = http.delete(f"/v1/items/{name}").status_code
        assert (status < 300) == (self.titles.pop(name, None) is not None)
        self.wrote_item = http

    @rule(at=REPLICAS, user=USERS)
    def recommend(self, at: int, user: str) -> None:
        """Recommend: items that are there and not seen, explained by the user's own events."""
        http = self._at(at)
        own = {event.event_id for event in self.model.history(user)}
        seen = {event.item_id for event in self.model.history(user)}

        def has_only_items_of_the_catalogue() -> bool:
            body = {"user_id": user, "limit": 20, "explain": 5}
            items = http.post("/v1/recommend", json=body).json()["items"]
            assert not {item["item_id"] for item in items} & seen
            for item in items:
                for reason in item.get("explanation", []):
                    assert reason["event_id"] is None or reason["event_id"] in own
            named = {item["item_id"] for item in items}
            return {name for name in named if name.startswith("new-")} <= self.titles.keys()

        self._follows(http, has_only_items_of_the_catalogue)

    @rule(at=REPLICAS, word=st.sampled_from(["emu", "gnu"]))
    def search(self, at: int, word: str) -> None:
        """Search by a word that only inserted items have."""
        http = self._at(at)
        titled = {name for name, title in self.titles.items() if title == word}

        def finds() -> bool:
            body = {"query": f'"{word}"', "limit": 20}
            items = http.post("/v1/search", json=body).json()["items"]
            return {item["item_id"] for item in items} == titled

        self._follows(http, finds)

    @rule(at=REPLICAS, pick=st.integers(0, 9))
    def swap(self, at: int, pick: int) -> None:
        version = self.versions[pick % len(self.versions)]
        answer = self._at(at).post(f"/v1/models/{version}/activate", json={})
        assert answer.json()["model_version"] == version
        self._await_version(version)

    @precondition(lambda self: self.trained < TRAININGS_OF_A_RUN)
    @rule(at=REPLICAS, wanted=st.integers(0, 7))
    def train(self, at: int, wanted: int) -> None:
        """Train one epoch, now and then; what it publishes serves, what is rejected does not."""
        if wanted:
            return
        self.trained += 1
        http = self._at(at)
        answer = http.post("/v1/models/train", json={"options": {"epochs": 1}})
        assert answer.status_code == 202, answer.text
        job = answer.headers["location"]
        eventually(lambda: http.get(job).json()["state"] not in ("queued", "running"))
        done = http.get(job).json()
        assert done["state"] == "succeeded", done
        version = (done["result"] or {}).get("version")
        if version is not None:
            self.versions.append(version)
            assert _serves(http, version)
            self._await_version(version)

    @rule(at=REPLICAS, gently=st.booleans(), wanted=st.integers(0, 3))
    def restart(self, at: int, gently: bool, wanted: int) -> None:
        """Kill a server, or stop it, and start it again, now and then."""
        if wanted:
            return
        number = at % len(self.servers)
        self.clients[number].close()
        if gently:
            self.servers[number].terminate()
            assert self.servers[number].wait() == 0
        else:
            self.servers[number].kill()
        self.servers[number] = self.starts[number]()
        self.clients[number] = self.servers[number].client()
        for user in sorted(self.touched):
            self._compare(user)
        stranger = self.clients[number].get("/v1/users/u7/history", params={"limit": 100}).json()
        assert len(stranger["events"]) == 12

    @invariant()
    def agrees(self) -> None:
        """The users' histories and profiles are those of the model."""
        for user in sorted(self.touched)[:2]:
            self._compare(user)

    def _compare(self, user: str) -> None:
        for http in self.clients:
            answer = http.get(f"/v1/users/{user}/history", params={"limit": 1000})
            found = [event["event_id"] for event in answer.json().get("events", [])]
            assert found[::-1] == [event.event_id for event in self.model.history(user)]


def run_machine(place: StatePlace, folder: Path) -> None:
    """Run the machine on the servers of a place, HEED_STATE_STEPS steps in all."""
    machine: type[Machine] = type("Machine", (Machine,), {"place": place, "folder": folder})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(1, STEPS // STEPS_OF_A_RUN),
            stateful_step_count=STEPS_OF_A_RUN,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[*HealthCheck],
        ),
    )


def _serves(http: httpx.Client, version: str) -> bool:
    answer = http.post("/v1/recommend", json={"limit": 1}).json()
    return bool(answer["model_version"] == version)
