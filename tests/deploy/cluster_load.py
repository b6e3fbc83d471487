"""Clients of a cluster while its containers are killed: they write, ask, and note every answer."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from typing import NamedTuple, Self

import httpx

from tests.support.server import stored_events

USERS = 20
ITEMS = 50
_PAUSE = 0.1  # seconds between two requests of a client
_RETRY = 0.2  # seconds until a write that was not acknowledged is sent again
_TIMEOUT = 10.0  # seconds


class Attempt(NamedTuple):
    """One request: when it ended, on the clock of `time.monotonic`, and with what."""

    at: float
    is_write: bool
    succeeded: bool
    degraded: bool
    outcome: str  # the status, or the error of the connection


class Summary(NamedTuple):
    """Requests of one kind in a span of time."""

    attempts: int
    failed: Counter[str]
    degraded: int
    longest_gap: float  # seconds between two successes, or from one to an end of the span


class ClusterLoad:
    """Threads that write events and score items through the balancer, until the block ends.

    Each event has an id of its own, and is sent with it again until it is acknowledged.

    Attributes:
        acknowledged: ids of events by user.
        sent: ids of events by user, acknowledged or not.
    """

    def __init__(self, url: str, key: str, *, writers: int = 2, askers: int = 2) -> None:
        self._url, self._key = url, key
        self.acknowledged: dict[str, set[str]] = {f"drill-{n}": set() for n in range(USERS)}
        self.sent: dict[str, set[str]] = {user: set() for user in self.acknowledged}
        self._attempts: list[Attempt] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=run, args=(number,), daemon=True)
            for run, count in ((self._write, writers), (self._ask, askers))
            for number in range(count)
        ]

    def __enter__(self) -> Self:
        with self.client() as http:
            items = [{"item_id": f"drill-{n}", "title": f"title {n}"} for n in range(ITEMS)]
            http.post("/v1/items", json={"items": items}).raise_for_status()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def client(self) -> httpx.Client:
        """Return a client of the balancer that sends the key."""
        headers = {"authorization": f"Bearer {self._key}"}
        return httpx.Client(base_url=self._url, headers=headers, timeout=_TIMEOUT)

    def is_well(self, since: float) -> bool:
        """Report whether of both kinds something was asked since then, and all succeeded."""
        found = [each for each in list(self._attempts) if each.at >= since]
        well = all(each.succeeded and not each.degraded for each in found)
        return well and {each.is_write for each in found} == {True, False}

    def summarise(self, begin: float, end: float, *, writes: bool) -> Summary:
        """Summarise the attempts that ended in a span of time."""
        found = [
            each
            for each in list(self._attempts)
            if begin <= each.at < end and each.is_write == writes
        ]
        times = sorted(each.at for each in found if each.succeeded)
        gaps = [after - before for before, after in itertools.pairwise([begin, *times, end])]
        return Summary(
            len(found),
            Counter(each.outcome for each in found if not each.succeeded),
            sum(each.degraded for each in found),
            max(gaps),
        )

    def stored(self, user: str) -> list[str]:
        """Return the ids of all stored events of a user."""
        with self.client() as http:
            return [event["event_id"] for event in stored_events(http, user)]

    def _write(self, number: int) -> None:
        chance = random.Random(number)
        with self.client() as http:
            for count in itertools.count():
                user, event_id = chance.choice(list(self.sent)), f"{number}-{count}"
                item = f"drill-{chance.randrange(ITEMS)}"
                event = {"user_id": user, "item_id": item, "event_id": event_id}
                self.sent[user].add(event_id)
                while not self._stop.is_set():
                    if self._send(http, "/v1/events", {"events": [event]}, is_write=True):
                        self.acknowledged[user].add(event_id)
                        break
                    time.sleep(_RETRY)
                if self._stop.wait(_PAUSE):
                    return

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        items = [f"drill-{n}" for n in range(ITEMS)]
        with self.client() as http:
            while not self._stop.wait(_PAUSE):
                question = {"user_id": chance.choice(list(self.sent)), "item_ids": items[:10]}
                self._send(http, "/v1/score", question, is_write=False)

    def _send(self, http: httpx.Client, path: str, body: object, *, is_write: bool) -> bool:
        degraded = False
        try:
            answer = http.post(path, json=body)
            succeeded, outcome = answer.status_code == 200, str(answer.status_code)
            degraded = succeeded and not is_write and answer.json()["degraded"]
        except httpx.TransportError as error:
            succeeded, outcome = False, type(error).__name__
        self._attempts.append(Attempt(time.monotonic(), is_write, succeeded, degraded, outcome))
        return succeeded
