"""Faults of clients, workers and swaps around a real server under load."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.faults.matrix import Setup, Verdict
from tests.support.server import PATIENCE, Server, stored_events
from tests.support.tiny import GENRES, item_id
from tests.support.waiting import eventually
from tests.support.workers import children, memory

SWAPS = 100
MIXED = 10_000
CHURN_SECONDS = 600.0
SOAK_SECONDS = 2_400.0
WARM_UP = 0.25  # share of a soak after which growth counts
_LARGE = 300 << 20  # bytes of a body
_RSS_GROWTH = 20 << 20
_CLOSED = 15.0 + 5.0  # seconds: HEED_BODY_TIMEOUT, and what a busy machine takes


class Load:
    """Clients that ask one question after the other, each on a connection of its own.

    Attributes:
        statuses: number of answers by status; -1 where a connection broke.
        wrong: answers that no user should get.
    """

    def __init__(
        self, url: str, clients: int, seed: int, pause: float = 0.0, kept: float = math.inf
    ) -> None:
        """`kept` is the number of its events that a client leaves stored, of the latest."""
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._url, self._pause, self._kept = url, pause, kept
        self._threads = [
            threading.Thread(target=self._ask, args=(random.Random(f"{seed}-{n}"),))
            for n in range(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let every client finish its question."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, rng: random.Random) -> None:
        http = httpx.Client(base_url=self._url, timeout=PATIENCE)
        stored: deque[str] = deque()  # paths of events, the oldest first
        while not self._stop.is_set():
            path, body = _question(rng)
            try:
                answer = http.post(path, json=body)
                self.statuses[answer.status_code] += 1
                if path == "/v1/events":
                    event = body["events"][0]
                    stored.append(f"/v1/users/{event['user_id']}/history/{event['event_id']}")
                if len(stored) > self._kept:
                    self.statuses[http.delete(stored.popleft()).status_code] += 1
                if answer.status_code == 200 and "/recommend" in path:
                    versions = answer.json()["model_version"]
                    if not versions:
                        self.wrong.append(answer.text[:200])
            except httpx.TransportError:
                self.statuses[-1] += 1
                http.close()
                http = httpx.Client(base_url=self._url, timeout=PATIENCE)
            if self._pause:
                time.sleep(self._pause)
        http.close()


def _question(rng: random.Random) -> tuple[str, dict[str, Any]]:
    user = f"u{rng.randrange(40)}"
    targets = [item_id(rng.randrange(len(GENRES)), rng.randrange(15)) for _ in range(5)]
    questions: list[tuple[str, dict[str, Any]]] = [
        ("/v1/recommend", {"user_id": user, "limit": 10, "explain": 3}),
        ("/v1/score", {"user_id": user, "item_ids": [*dict.fromkeys(targets)]}),
        ("/v1/search", {"query": rng.choice(["planet", "soup", "guitar solo", "castle"])}),
        ("/v1/events", {"events": [_event(rng, targets[0])]}),
    ]
    return rng.choice(questions)


def _event(rng: random.Random, item: str) -> dict[str, Any]:
    id_ = f"{rng.getrandbits(64):x}"
    return {"user_id": f"load{rng.randrange(100)}", "item_id": item, "event_id": id_}


@contextmanager
def _served(setup: Setup, name: str, **settings: Any) -> Iterator[Server]:
    data = setup.world.copy(setup.fresh(name) / "data")
    with Server(data, **settings) as server:
        yield server


# ---------------------------------------------------------------------------- clients


def disconnected(setup: Setup) -> Verdict:
    """Disconnects amid questions of many users: an answer has only what its own user did."""
    count = setup.times(MIXED)
    with _served(setup, "mixed") as server:
        wrong, answered, dropped = asyncio.run(_mixed(server, count, setup.rng("mixed")))
        with server.client() as http:
            alive = http.get("/health/ready").status_code == 200
    return Verdict(
        wrong == 0 and alive,
        f"{answered} answers and {dropped} disconnects: {wrong} with another user's events",
    )


async def _mixed(server: Server, count: int, rng: random.Random) -> tuple[int, int, int]:
    port = int(server.url.rpartition(":")[2])
    wrong = answered = dropped = 0
    places = asyncio.Semaphore(24)

    async def one(user: int, leaves: bool, wait: float) -> None:
        nonlocal wrong, answered, dropped
        async with places:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            line = f"GET /v1/users/u{user}/history?limit=100 HTTP/1.1\r\nHost: localhost\r\n"
            writer.write(f"{line}Connection: close\r\n\r\n".encode())
            try:
                if leaves:
                    await asyncio.sleep(wait)
                    writer.transport.abort()
                    dropped += 1
                    return
                text = (await reader.read()).decode()
                answered += 1
                if " 200 " not in text[:20] or f'"e{user}-0"' not in text:
                    wrong += 1
                wrong += sum(
                    f'"user_id":"u{other}"' in text for other in range(40) if other != user
                )
            finally:
                writer.close()

    await asyncio.gather(
        *(one(rng.randrange(40), rng.random() < 0.4, rng.uniform(0, 0.01)) for _ in range(count))
    )
    return wrong, answered, dropped


def hostile(setup: Setup) -> Verdict:
    """Bodies of 300 MB, endless headers and slow senders: bounded memory, closed in time."""
    limits = {"body_timeout": 15, "deadline": 10}
    with _served(setup, "hostile", **limits) as server, server.client() as http:
        http.post("/v1/recommend", json={"user_id": "u1"})
        before = memory(server.pid)["Rss"]
        with Load(server.url, 2, setup.seed) as others:
            refused = [_large(server, chunked) for chunked in (False, True)]
            closed = _slow(server, 60)
            peak = memory(server.pid)["Rss"]
        kept = http.get("/health/ready").status_code == 200
    grown = peak - before
    answered = others.statuses[200] == others.statuses.total()
    return Verdict(
        all(refused) and closed <= _CLOSED and grown < _RSS_GROWTH and kept and answered,
        f"300 MB refused {'both ways' if all(refused) else refused}; 60 slow senders closed after "
        f"{closed:.1f} s; {grown / 2**20:.1f} MB more memory; {others.statuses[200]} of "
        f"{others.statuses.total()} questions of others answered",
    )


def _large(server: Server, chunked: bool) -> bool:
    """Send 300 MB, until the server stops reading; whether it answered 413 or closed."""
    port = int(server.url.rpartition(":")[2])
    piece = b"x" * (1 << 20)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        head = b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += (
            b"Transfer-Encoding: chunked\r\n\r\n"
            if chunked
            else (b"Content-Length: %d\r\n\r\n" % _LARGE)
        )
        try:
            sock.sendall(head)
            for _ in range(_LARGE // len(piece)):
                sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        except OSError:
            pass
        try:
            return sock.recv(100).startswith(b"HTTP/1.1 413") or not sock.recv(100)
        except OSError:
            return True


def _slow(server: Server, count: int) -> float:
    """Send headers and bodies a byte a second; the seconds until the last one is closed."""
    port = int(server.url.rpartition(":")[2])
    began = time.monotonic()
    socks = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(count)]
    for number, sock in enumerate(socks):
        if number % 2:
            sock.sendall(
                b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n"
                b"Content-Type: application/json\r\n\r\n{"
            )
        else:
            sock.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
    left = set(socks)
    while left and time.monotonic() - began < 60:
        time.sleep(1)
        for sock in [*left]:
            try:
                sock.sendall(b"a")
                sock.settimeout(0.001)
                if sock.recv(100) == b"":
                    raise ConnectionResetError
            except TimeoutError:
                continue
            except OSError:
                left.discard(sock)
    took = time.monotonic() - began
    for sock in socks:
        sock.close()
    return took


# ---------------------------------------------------------------------------- order


def order(setup: Setup) -> Verdict:
    """Duplicates, permutations, and 64 writers on one user."""
    rng = setup.rng("order")
    events = [
        {
            "user_id": f"p{n % 7}",
            "item_id": f"i{n % 50}",
            "event_id": f"o{n}",
            "timestamp": f"2026-01-01T12:{n % 60:02}:{n % 59:02}Z",
        }
        for n in range(2_000)
    ]
    clean = _content(setup, "clean", [events])
    equal, times = 0, setup.times(8)
    for number in range(times):
        mixed = events + rng.sample(events, 700)
        rng.shuffle(mixed)
        batches = [mixed[at : at + 90] for at in range(0, len(mixed), 90)]
        equal += _content(setup, f"mixed{number}", batches) == clean
    stored = _sixty_four(setup)
    return Verdict(
        equal == times and stored == (32_000, 32_000),
        f"{equal} of {times} permutations with duplicates equal to the clean pass; 64 writers: "
        f"{stored[0]} of 32,000 stored, {stored[1]} distinct",
    )


def _content(setup: Setup, name: str, batches: list[list[dict[str, Any]]]) -> list[Any]:
    """The histories of all users, by time and id, of a fresh server after these batches."""
    with Server(setup.fresh(name) / "data") as server, server.client() as http:
        for batch in batches:
            for at in range(0, len(batch), 1000):
                answer = http.post("/v1/events", json={"events": batch[at : at + 1000]})
                assert answer.status_code == 200, answer.text
        found: list[Any] = []
        for user in range(7):
            found += [
                (e["user_id"], e["timestamp"], e["event_id"], e["item_id"])
                for e in stored_events(http, f"p{user}")
            ]
    return sorted(found)


def _sixty_four(setup: Setup) -> tuple[int, int]:
    with Server(setup.fresh("writers") / "data", max_in_flight=128) as server:

        def write(number: int) -> None:
            with server.client() as http:
                for n in range(50):
                    batch = [
                        {"user_id": "u", "item_id": f"i{n}", "event_id": f"{number}-{n}-{k}"}
                        for k in range(10)
                    ]
                    answer = http.post("/v1/events", json={"events": batch})
                    assert answer.json()["stored"] == 10, answer.text

        threads = [threading.Thread(target=write, args=(n,)) for n in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with server.client() as http:
            found = [event["event_id"] for event in stored_events(http, "u")]
    return len(found), len(set(found))


# ---------------------------------------------------------------------------- change under load


def churn(setup: Setup) -> Verdict:
    """Searches while items are added, replaced and removed, and models swapped."""
    seconds = CHURN_SECONDS * setup.scale
    writes, rng = 0, setup.rng("churn")
    with (
        _served(setup, "churn") as server,
        server.client() as http,
        Load(server.url, 8, setup.seed) as load,
    ):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            number = rng.randrange(300)
            if rng.random() < 0.3:
                status = http.delete(f"/v1/items/churn-{number}").status_code
            else:
                item = {"item_id": f"churn-{number}", "title": f"planet soup {writes}"}
                status = http.post("/v1/items", json={"items": [item]}).status_code
            assert status in (200, 204, 404), status
            if writes % 50 == 49:
                version = (setup.world.first, setup.world.second)[writes // 50 % 2]
                assert http.post(f"/v1/models/{version}/activate", json={}).status_code == 200
            writes += 1
    bad = load.statuses.total() - load.statuses[200]
    return Verdict(
        bad == 0 and not load.wrong,
        f"{seconds:.0f} s: {load.statuses[200]} questions beside {writes} changes of items and "
        f"{writes // 50} swaps, {bad} failed",
    )


def swaps(setup: Setup) -> Verdict:
    """Hot swaps at half load; workers killed; a stop with work in flight; a start under load."""
    count = setup.times(SWAPS)
    versions = (setup.world.first, setup.world.second)
    with _served(setup, "swaps", workers=2) as server:
        with server.client() as http, Load(server.url, 4, setup.seed, pause=0.005) as load:
            for number in range(count):
                answer = http.post(f"/v1/models/{versions[number % 2]}/activate", json={})
                assert answer.status_code == 200, answer.text
        swapped = load.statuses
        with Load(server.url, 4, setup.seed, pause=0.005) as killed:
            for _ in range(setup.times(5)):
                victim = children(server.pid)[0]
                os.kill(victim, signal.SIGKILL)
                eventually(partial(is_replaced, server, victim))
                time.sleep(1)
        with Load(server.url, 4, setup.seed, pause=0.005) as stopped:
            time.sleep(1)
            server.terminate()
            server.wait()
    # Questions that were on a connection of the killed worker break; no other does.
    bad = swapped.total() - swapped[200]
    broken = killed.statuses[-1]
    other = killed.statuses.total() - killed.statuses[200] - broken
    errors = sum(n for status, n in stopped.statuses.items() if status not in (200, -1, 503))
    return Verdict(
        bad == 0 and other == 0 and broken <= 4 * setup.times(5) and errors == 0,
        f"{count} swaps: {bad} of {swapped.total()} questions failed; {setup.times(5)} killed "
        f"workers: {broken} broken connections, {other} errors of {killed.statuses.total()}; "
        f"stop: {errors} errors",
    )


def is_replaced(server: Server, victim: int) -> bool:
    """Report whether two workers run, and a certain one no more."""
    alive = children(server.pid)
    return victim not in alive and len(alive) == 2


def soak(setup: Setup) -> Verdict:
    """Mixed load at half of what one client gets, for long: neither memory nor descriptors grow.

    Events are deleted as fast as they are written once a client has written a thousand, since what
    is stored takes memory: histories, the event log, pages of the store.
    """
    seconds = SOAK_SECONDS * setup.scale
    samples: list[tuple[float, float, int]] = []
    with (
        _served(setup, "soak") as server,
        Load(server.url, 2, setup.seed, pause=0.01, kept=1_000) as load,
    ):
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            descriptors = len([*Path(f"/proc/{server.pid}/fd").iterdir()])
            samples.append((now, memory(server.pid)["Rss"], descriptors))
            time.sleep(min(5.0, seconds / 60))
        warm = [each for each in samples if each[0] >= WARM_UP * seconds]
    slope = 3600 * _slope([s[:2] for s in warm]) / warm[0][1]
    spread = max(s[2] for s in warm) - min(s[2] for s in warm)
    bad = load.statuses.total() - load.statuses[200] - load.statuses[204]
    return Verdict(
        slope < 0.01 and spread <= 8 and bad == 0,
        f"{seconds / 60:.0f} min, {load.statuses.total()} questions, {bad} failed: memory "
        f"{100 * slope:+.2f} %/h of {warm[0][1] / 2**20:.0f} MB, descriptors within {spread}",
    )


def _slope(points: list[tuple[float, float]]) -> float:
    """Return the slope of the line by least squares."""
    n = len(points)
    mean_x, mean_y = (sum(p[at] for p in points) / n for at in (0, 1))
    over = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return over / sum((x - mean_x) ** 2 for x, _ in points)
