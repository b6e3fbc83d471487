"""A real server under random operations, kills and restarts, beside a model of dicts.

HEED_STATE_STEPS, 50 by default, is the number of steps.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

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
from tests.support.server import PATIENCE, Server
from tests.support.store_model import Notebook
from tests.support.tiny import GENRES, World, item_id

STEPS = int(os.environ.get("HEED_STATE_STEPS", "50"))
STEPS_OF_A_RUN = 50
TRAININGS_OF_A_RUN = 1

USERS = st.sampled_from([f"s{n}" for n in range(5)])
ITEMS = st.sampled_from([item_id(g, n) for g in range(len(GENRES)) for n in range(3)] + ["new-1"])
TIMES = st.integers(0, 59)
EVENT_IDS = st.integers(0, 60).map(lambda n: f"id-{n}")
STRANGERS = 40  # users of the small world, who stay as they are


class Machine(RuleBasedStateMachine):
    """The server and the model, which must agree after every step."""

    world: World
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.model = Notebook()
        self.titles: dict[str, str] = {}
        self.touched: set[str] = set()
        self.trained = 0
        data = self.folder / "data"
        shutil.rmtree(data, ignore_errors=True)
        self.world.copy(data)
        self.versions = [self.world.first, self.world.second]
        self._serve()

    def _serve(self) -> None:
        self.server = Server(self.folder / "data")
        self.http = self.server.client()

    def teardown(self) -> None:
        """Stop the server."""
        self.http.close()
        self.server.terminate()
        self.server.wait()

    def _post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    @initialize()
    def begin(self) -> None:
        """Start from the small world."""
        assert self.http.get("/health/ready").status_code == 200

    @rule(user=USERS, item=ITEMS, second=TIMES, name=EVENT_IDS, again=st.booleans())
    def append(self, user: str, item: str, second: int, name: str, again: bool) -> None:
        """Append an event, alone or twice; the same id with another body conflicts."""
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
        answer = self._post("/v1/events", {"events": [body] * (1 + again)})
        try:
            stored, duplicates = self.model.append(events)
        except Conflict:
            assert answer.status_code == 409, answer.text
            return
        assert answer.json() == {"stored": stored, "duplicates": duplicates}
        self.touched.add(user)

    @rule(user=USERS, name=EVENT_IDS)
    def delete_event(self, user: str, name: str) -> None:
        """Delete an event, which may not be there."""
        status = self.http.delete(f"/v1/users/{user}/history/{name}").status_code
        assert (status < 300) == self.model.delete_event(user, name)

    @rule(user=USERS)
    def forget(self, user: str) -> None:
        """Forget a user."""
        self.model.forget(user)
        self.http.delete(f"/v1/users/{user}").raise_for_status()

    @rule(user=USERS, source=USERS)
    def merge(self, user: str, source: str) -> None:
        """Merge a user into another."""
        answer = self._post(f"/v1/users/{user}/merge", {"from": source})
        if user == source:
            assert answer.status_code == 422
        else:
            answer.raise_for_status()
            self.model.merge(user, source)
            self.touched.add(user)

    @rule(user=USERS, interests=st.lists(st.sampled_from(GENRES), max_size=2, unique=True))
    def put_user(self, user: str, interests: list[str]) -> None:
        """Replace a profile."""
        self.http.put(f"/v1/users/{user}", json={"interests": interests}).raise_for_status()
        self.model.profiles[user] = User(user, {}, tuple(interests))

    @rule(name=st.sampled_from(["new-1", "new-2", "new-3"]), word=st.sampled_from(["emu", "gnu"]))
    def put_item(self, name: str, word: str) -> None:
        """Insert or replace an item."""
        self._post("/v1/items", {"items": [{"item_id": name, "title": word}]}).raise_for_status()
        self.titles[name] = word

    @rule(name=st.sampled_from(["new-1", "new-2", "new-3"]))
    def delete_item(self, name: str) -> None:
        """Remove an item, which may not be there."""
        status = self.http.delete(f"/v1/items/{name}").status_code
        assert (status < 300) == (self.titles.pop(name, None) is not None)

    @rule(user=USERS)
    def recommend(self, user: str) -> None:
        """Recommend: items that are there and not seen, explained by the user's own events."""
        answer = self._post("/v1/recommend", {"user_id": user, "limit": 20, "explain": 5}).json()
        own = {event.event_id for event in self.model.history(user)}
        seen = {event.item_id for event in self.model.history(user)}
        for item in answer["items"]:
            assert item["item_id"] not in seen
            assert not item["item_id"].startswith("new-") or item["item_id"] in self.titles
            for reason in item.get("explanation", []):
                assert reason["event_id"] is None or reason["event_id"] in own

    @rule(word=st.sampled_from(["emu", "gnu"]))
    def search(self, word: str) -> None:
        """Search by a word that only inserted items have."""
        answer = self._post("/v1/search", {"query": f'"{word}"', "limit": 20}).json()
        found = {item["item_id"] for item in answer["items"]}
        assert found == {name for name, title in self.titles.items() if title == word}

    @rule(pick=st.integers(0, 9))
    def swap(self, pick: int) -> None:
        """Serve another version."""
        version = self.versions[pick % len(self.versions)]
        answer = self._post(f"/v1/models/{version}/activate", {})
        assert answer.json()["model_version"] == version

    @precondition(lambda self: self.trained < TRAININGS_OF_A_RUN)
    @rule(wanted=st.integers(0, 7))
    def train(self, wanted: int) -> None:
        """Train one epoch, now and then; what it publishes serves, what is rejected does not."""
        if wanted:
            return
        self.trained += 1
        answer = self._post("/v1/models/train", {"options": {"epochs": 1}})
        assert answer.status_code == 202, answer.text
        job, until = answer.headers["location"], time.monotonic() + PATIENCE
        while (done := self.http.get(job).json())["state"] in ("queued", "running"):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert done["state"] == "succeeded", done
        version = (done["result"] or {}).get("version")
        if version is not None:
            self.versions.append(version)
            assert self._post("/v1/recommend", {"limit": 1}).json()["model_version"] == version

    @rule(gently=st.booleans(), wanted=st.integers(0, 3))
    def restart(self, gently: bool, wanted: int) -> None:
        """Kill the server, or stop it, and start it again, now and then."""
        if wanted:
            return
        self.http.close()
        if gently:
            self.server.terminate()
            assert self.server.wait() == 0
        else:
            self.server.kill()
        self._serve()
        for user in sorted(self.touched):
            self._compare(user)
        stranger = self.http.get("/v1/users/u7/history", params={"limit": 100}).json()
        assert len(stranger["events"]) == 12

    @invariant()
    def agrees(self) -> None:
        """The users' histories and profiles are those of the model."""
        for user in sorted(self.touched)[:2]:
            self._compare(user)

    def _compare(self, user: str) -> None:
        answer = self.http.get(f"/v1/users/{user}/history", params={"limit": 1000})
        found = [event["event_id"] for event in answer.json().get("events", [])]
        assert found[::-1] == [event.event_id for event in self.model.history(user)]


def test_a_server_agrees_with_a_model_of_dicts(world: World, tmp_path: Path) -> None:
    """Writes, forgets, merges, swaps, trainings, kills and restarts leave what the model has."""
    machine: type[Machine] = type("Machine", (Machine,), {"world": world, "folder": tmp_path})
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
