"""Clients of several API replicas over one database, and a journal of what was acknowledged.

A write is sent again, with the same event ids and to the other replica, until it is acknowledged,
as a client does that must not lose anything. Its attempts and acknowledgements go to a file first.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self

import httpx

from service.stores.postgres.store import PostgresStore
from tests.support.server import PATIENCE, Server
from tests.support.waiting import eventually

ITEMS = 40  # of the catalogue
USERS = 30  # per writer
_PAUSE = 0.05  # seconds between two attempts of a write
_REST = 0.02  # seconds between two questions


class Replicas:
    """`heed serve` processes with data directories of their own, over one database.

    `store` has the URL of the database by which each replica reaches it.
    """

    def __init__(self, folder: Path, store: Sequence[str], **settings: Any) -> None:
        self._folder, self._stores, self._settings = folder, store, settings
        self.servers: list[Server] = []
        try:
            for number in range(len(store)):
                self.servers.append(self._start(number))
        except BaseException:
            self._kill_all()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._kill_all()
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            assert server.wait() == 0 or kind is not None, server.log()

    def url(self, number: int) -> str:
        """Return the address of a replica, which changes when it is restarted."""
        return self.servers[number].url

    def restart(self, number: int) -> None:
        """Start a killed replica again, over its data directory."""
        self.servers[number] = self._start(number)

    def put_items(self) -> None:
        """Put the catalogue, by the first replica, and wait until all of them serve it."""
        items = [{"item_id": f"i{n}", "title": f"title {n}"} for n in range(ITEMS)]
        body = {"items": items}
        httpx.post(f"{self.url(0)}/v1/items", json=body, timeout=PATIENCE).raise_for_status()
        for server in self.servers:
            with server.client() as http:
                eventually(partial(_has_items, http))

    def _start(self, number: int) -> Server:
        return Server(
            self._folder / f"replica{number}", store=self._stores[number], **self._settings
        )

    def _kill_all(self) -> None:
        for server in self.servers:
            server.kill()


def _has_items(http: httpx.Client) -> bool:
    return http.get("/v1/items/i0").status_code == 200


class Ack(NamedTuple):
    """An acknowledged write: the replica, and when its request was sent and answered."""

    replica: int
    sent: float  # monotonic
    answered: float  # monotonic


class JournaledWriters:
    """Threads that write events through all replicas, until stopped.

    They write to the replicas in turn, and after each failure to the next.

    Attributes:
        acks: of all writes, as far as they have come.
        problems: answers that no client should get.
        statuses: number of answers by status; -1 where a connection broke.
    """

    def __init__(
        self,
        replicas: Replicas,
        journal: Path,
        seed: object,
        pause: float = 0.02,
    ) -> None:
        self._replicas, self._pause = replicas, pause
        self._file = journal.open("a")
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.acks: list[Ack] = []
        self.problems: list[str] = []
        self.statuses: Counter[int] = Counter()
        self._threads = [
            threading.Thread(target=self._write, args=(n, Random(f"{seed}-w-{n}")))
            for n in range(3)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._file.close()

    def wait_for_ack(self, replica: int, after: float, patience: float = PATIENCE) -> float:
        """Return when the first write was acknowledged that a replica was sent after a moment."""
        until = time.monotonic() + patience
        seen = 0
        while True:
            for ack in self.acks[seen:]:
                seen += 1
                if ack.replica == replica and ack.sent > after:
                    return ack.answered
            assert time.monotonic() < until, f"no writes at {replica}: {self.problems[-3:]}"
            time.sleep(0.01)

    def _note(self, line: str) -> None:
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()

    def _write(self, writer: int, rng: Random) -> None:
        count = len(self._replicas.servers)
        with httpx.Client(timeout=PATIENCE) as http:
            for number in itertools.count():
                if self._stop.is_set():
                    return
                name = f"w{writer}.{number}"
                events = [
                    {
                        "user_id": f"w{writer}-u{rng.randrange(USERS)}",
                        "item_id": f"i{rng.randrange(ITEMS)}",
                        "event_id": f"{name}-{n}",
                    }
                    for n in range(rng.randint(1, 4))
                ]
                self._note(f"try {name} {len(events)}")
                replica = number % count
                while not self._send(http, replica, name, events):
                    if self._stop.is_set():
                        return
                    replica = (replica + 1) % count
                    time.sleep(_PAUSE)
                time.sleep(self._pause)

    def _send(
        self, http: httpx.Client, replica: int, name: str, events: list[dict[str, Any]]
    ) -> bool:
        sent = time.monotonic()
        try:
            answer = http.post(f"{self._replicas.url(replica)}/v1/events", json={"events": events})
        except httpx.TransportError:
            self.statuses[-1] += 1
            return False
        self.statuses[answer.status_code] += 1
        if answer.status_code == 200:
            self._note(f"ack {name}")
            self.acks.append(Ack(replica, sent, time.monotonic()))
            counts = answer.json()
            if counts["stored"] + counts["duplicates"] != len(events):
                self.problems.append(answer.text)
            return True
        if answer.status_code not in (429, 503) or "retry-after" not in answer.headers:
            self.problems.append(f"{answer.status_code}: {answer.text[:300]}")
        return False


class Reader:
    """Clients that ask questions at every replica, each user about their own past, until stopped.

    Attributes:
        answers: number by (replica, status, degraded).
        latencies: seconds of each answer.
        broken: number of connections that broke, by replica.
        errors: texts of answers with another status than 200.
    """

    def __init__(self, replicas: Replicas, seed: object) -> None:
        self._replicas = replicas
        self._stop = threading.Event()
        self.answers: Counter[tuple[int, int, bool]] = Counter()
        self.broken: Counter[int] = Counter()
        self.latencies: list[float] = []
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(n, Random(f"{seed}-r-{n}")))
            for n in range(len(replicas.servers))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def degraded(self) -> int:
        """Return the number of answers so far that say that they are degraded."""
        return sum(n for (_, _, degraded), n in [*self.answers.items()] if degraded)

    def _ask(self, replica: int, rng: Random) -> None:
        http = httpx.Client(timeout=PATIENCE)
        while not self._stop.is_set():
            user = f"w{rng.randrange(3)}-u{rng.randrange(USERS)}"
            body = {"user_id": user, "limit": 5, "explain": 3}
            began = time.monotonic()
            try:
                answer = http.post(f"{self._replicas.url(replica)}/v1/recommend", json=body)
            except httpx.TransportError:
                self.broken[replica] += 1
                time.sleep(_PAUSE)
                continue
            self.latencies.append(time.monotonic() - began)
            degraded = answer.status_code == 200 and answer.json()["degraded"]
            self.answers[replica, answer.status_code, degraded] += 1
            if answer.status_code != 200:
                self.errors.append(f"{answer.status_code} {answer.text[:300]}")
            time.sleep(_REST)
        http.close()


class Books(NamedTuple):
    """A journal beside what a store has: counts of what must be 0, and of what there was."""

    acknowledged: int
    stored: int
    lost: int  # acknowledged batches that are not there, or in part
    doubled: int  # event ids that are there more than once
    foreign: int  # batches that were never attempted

    @property
    def balanced(self) -> bool:
        """True if acknowledged ⊆ stored ⊆ attempted, each once."""
        return not (self.lost or self.doubled or self.foreign)


def compare(journal: Path, url: str) -> Books:
    """Compare a journal with all events of the database of a URL."""
    lines = [line.split() for line in journal.read_text().splitlines()]
    tried = {line[1]: int(line[2]) for line in lines if line[0] == "try"}
    acked = {line[1] for line in lines if line[0] == "ack"}

    store = PostgresStore(url)
    names = [str(event.event_id) for event in store.scan_events()]
    asyncio.run(store.close())
    sizes = Counter(name.rpartition("-")[0] for name in set(names))
    return Books(
        len(acked),
        len(sizes),
        sum(sizes[name] != tried[name] for name in acked),
        len(names) - len(set(names)),
        sum(name not in tried for name in sizes),
    )
