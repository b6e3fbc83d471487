"""A PostgreSQL that hangs, or is slow or far away, under two API replicas."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import NamedTuple

import httpx
import numpy as np

from tests.faults.matrix import Setup, Verdict
from tests.support.delaying_proxy import DelayingProxy
from tests.support.journaled_clients import ITEMS, Replicas
from tests.support.postgres_server import PostgresServer

USERS = 10_000
EVENTS = 3  # of each user
SECONDS = 15.0  # of each fault
DEADLINE = 1.0  # seconds
MARGIN = 0.05  # seconds that an answer may come after it
DELAY = 0.2  # seconds of each chunk
CLIENTS = 1  # of each replica
LEAVERS = 0.4  # share of requests whose client leaves
_BATCH = 999


def item_of(user: int, event: int) -> int:
    """Return the item of a user's event: three neighbours, so that answers tell users apart."""
    return (user * EVENTS + event) % ITEMS


class Tally:
    """Answers to questions of many users.

    Attributes:
        latencies: seconds of each.
        wrong: answers with what another user did, or with an error.
        dropped: number of requests whose client left.
        broken: number of connections that the service closed without an answer.
    """

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.statuses: Counter[int] = Counter()
        self.degraded = self.dropped = self.broken = 0
        self.wrong: list[str] = []

    @property
    def p99(self) -> float:
        """The 99th percentile of the latencies."""
        return self.quantile(0.99)

    def quantile(self, share: float) -> float:
        """Return a latency that so large a share is not above, in seconds."""
        return float(np.quantile(self.latencies or [math.inf], share, method="higher"))

    def __str__(self) -> str:
        total = max(1, len(self.latencies))
        return (
            f"{len(self.latencies)} answers, p50 {self.quantile(0.5):.3f} s, p99 "
            f"{self.p99:.3f} s, {100 * self.degraded / total:.0f} % degraded"
        )

    def check(self, user: int, path: str, answer: httpx.Response) -> None:
        """Count an answer, and compare it with what its user did."""
        self.statuses[answer.status_code] += 1
        history = path.endswith("history")
        if answer.status_code != 200:
            # Only a page of stored events needs the database.
            if not (history and answer.status_code in (429, 503)):
                self.wrong.append(f"{path}: {answer.status_code} {answer.text[:200]}")
            return
        body = answer.json()
        if history:
            expected = [f"e{user}-{n}" for n in range(EVENTS - 1, -1, -1)]
            found = [event["event_id"] for event in body["events"]]
            if found != expected or any(e["user_id"] != f"u{user}" for e in body["events"]):
                self.wrong.append(f"u{user}: {found}")
            return
        self.degraded += body["degraded"]
        own = {f"i{item_of(user, n)}" for n in range(EVENTS)}
        reasons = [r for item in body["items"] for r in item["explanation"]]
        items = {reason["item_id"] for reason in reasons}
        events = {reason["event_id"] for reason in reasons} - {None}
        known = {f"e{user}-{n}" for n in range(EVENTS)}
        if not items <= own or not events <= known or not (items or body["degraded"]):
            self.wrong.append(f"u{user}: {items} {events}")


class _Site(NamedTuple):
    server: PostgresServer
    proxy: DelayingProxy
    replicas: Replicas
    rng: Random


def hung(setup: Setup) -> Verdict:
    """Freeze the server; stall and delay what passes; ask questions at both replicas meanwhile."""
    seconds = SECONDS * setup.scale
    rows: list[str] = []
    held = True
    wrong: list[str] = []
    with _served(setup, "hung", 200) as site:
        for title, begin, end, most in (
            ("undisturbed", None, None, math.inf),
            ("frozen", site.server.freeze, site.server.thaw, DEADLINE + MARGIN),
            ("stalled", site.proxy.stall, site.proxy.flow, DEADLINE + MARGIN),
            ("200 ms a chunk", lambda: site.proxy.flow(DELAY), site.proxy.flow, DEADLINE + MARGIN),
        ):
            tally = asyncio.run(_load(site, seconds, 200, begin))
            if end is not None:
                end()
            wrong += tally.wrong
            held = held and tally.p99 <= most
            rows.append(f"{title}: {tally}")
            _recover(site, 200)
    return Verdict(
        held and not wrong,
        f"{'; '.join(rows)}; {len(wrong)} wrong {wrong[:1] or ''}",
    )


def mixed(setup: Setup) -> Verdict:
    """Questions of many users whose clients leave, while the database stalls and flows."""
    users = setup.times(USERS)
    with _served(setup, "mixed", users) as site:
        tally = asyncio.run(_leave(site, users))
        _recover(site, users)
        again = asyncio.run(_ask_all(site, min(users, 1_000)))
    wrong = tally.wrong + again.wrong
    return Verdict(
        not wrong and not again.degraded,
        f"{users} users: {tally}, {tally.dropped} disconnects, {tally.broken} "
        f"broken connections, statuses {dict(tally.statuses)}; "
        f"{len(again.latencies)} more afterwards; {len(wrong)} wrong {wrong[:1] or ''}",
    )


@contextmanager
def _served(setup: Setup, name: str, users: int) -> Iterator[_Site]:
    """Two replicas behind one proxy, with users of known events."""
    with PostgresServer() as server, ExitStack() as stack:
        proxy = DelayingProxy(server.port)
        stack.callback(proxy.close)
        url = proxy.through(server.create_database())
        replicas = stack.enter_context(Replicas(setup.fresh(name), [url] * 2, deadline=DEADLINE))
        replicas.put_items()
        events = [
            {
                "user_id": f"u{user}",
                "item_id": f"i{item_of(user, n)}",
                "event_id": f"e{user}-{n}",
                "timestamp": f"2026-01-01T00:00:0{n}Z",
            }
            for user in range(users)
            for n in range(EVENTS)
        ]
        with httpx.Client(timeout=60) as http:
            for at in range(0, len(events), _BATCH):
                body = {"events": events[at : at + _BATCH]}
                while True:
                    answer = http.post(f"{replicas.url(0)}/v1/events", json=body)
                    if answer.status_code == 200:
                        break
                    assert answer.status_code in (429, 503), answer.text
        yield _Site(server, proxy, replicas, setup.rng(name))


async def _load(site: _Site, seconds: float, users: int, begin: Callable[[], None] | None) -> Tally:
    """Ask for some seconds; the fault begins with the first question."""
    tally = Tally()
    if begin is not None:
        await asyncio.to_thread(begin)
    until = time.monotonic() + seconds

    async def ask(replica: int, rng: Random) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            while time.monotonic() < until:
                await _ask(site, http, replica, rng.randrange(users), tally)
                await asyncio.sleep(0.02)

    await asyncio.gather(*(ask(n % 2, Random(site.rng.random() + n)) for n in range(2 * CLIENTS)))
    return tally


async def _ask(site: _Site, http: httpx.AsyncClient, replica: int, user: int, tally: Tally) -> None:
    body = {"user_id": f"u{user}", "item_ids": ["i0", "i1"], "explain": EVENTS}
    began = time.monotonic()
    answer = await http.post(f"{site.replicas.url(replica)}/v1/score", json=body)
    tally.latencies.append(time.monotonic() - began)
    tally.check(user, "/v1/score", answer)


async def _leave(site: _Site, users: int) -> Tally:
    """Ask one question of each user; clients leave, and the proxy stalls now and then."""
    tally, places = Tally(), asyncio.Semaphore(16)
    order = [*range(users)]
    site.rng.shuffle(order)
    done = asyncio.Event()

    async def disturb() -> None:
        while not done.is_set():
            await asyncio.sleep(site.rng.uniform(0.5, 2.0))
            await asyncio.to_thread(site.rng.choice((site.proxy.stall, site.proxy.cut)))
            await asyncio.sleep(site.rng.uniform(0.1, 1.5))
            await asyncio.to_thread(site.proxy.flow)

    async def one(user: int, replica: int, leaves: bool, wait: float, history: bool) -> None:
        async with places:
            path = f"/v1/users/u{user}/history" if history else "/v1/score"
            base = site.replicas.url(replica)
            body = {"user_id": f"u{user}", "item_ids": ["i0", "i1"], "explain": EVENTS}
            began = time.monotonic()
            asking = asyncio.ensure_future(
                http.get(base + path) if history else http.post(base + path, json=body)
            )
            if leaves:
                _, pending = await asyncio.wait([asking], timeout=wait)
                if pending:
                    asking.cancel()
                    await asyncio.wait([asking])
                    tally.dropped += 1
                    return
            try:
                answer = await asking
            except httpx.TransportError:
                tally.broken += 1
                return
            tally.latencies.append(time.monotonic() - began)
            tally.check(user, path, answer)

    # A connection for each request, which its client closes when it leaves.
    limits = httpx.Limits(max_keepalive_connections=0)
    http = httpx.AsyncClient(timeout=60, limits=limits)
    disturbing = asyncio.ensure_future(disturb())
    rng = site.rng
    await asyncio.gather(
        *(
            one(
                u,
                rng.randrange(2),
                rng.random() < LEAVERS,
                rng.uniform(0, 0.02),
                rng.random() < 0.3,
            )
            for u in order
        )
    )
    done.set()
    await disturbing
    await http.aclose()
    return tally


async def _ask_all(site: _Site, users: int) -> Tally:
    tally = Tally()
    async with httpx.AsyncClient(timeout=60) as http:
        for user in range(users):
            await _ask(site, http, user % 2, user, tally)
    return tally


def _recover(site: _Site, users: int) -> None:
    """Wait until both replicas answer without saying that they are degraded."""
    until = time.monotonic() + 60
    good = 0
    while good < 10:
        tally = asyncio.run(_ask_all(site, 2))
        good = 0 if tally.degraded or tally.wrong else good + 1
        assert time.monotonic() < until, "it does not recover"
        time.sleep(0.05)
