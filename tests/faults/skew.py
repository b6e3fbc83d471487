"""A server's clock that is hours or days off, and that is set while it serves and between runs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx

from service.domain.keys import Rate, issue_key
from service.domain.timestamps import from_rfc3339
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.faults.matrix import Setup, Verdict
from tests.faults.serving import Load, is_replaced
from tests.support.server import PATIENCE, Server, stored_events
from tests.support.stepped_clock import SteppedClock
from tests.support.tiny import GENRES, item_id
from tests.support.waiting import eventually
from tests.support.workers import children

ROUNDS = 4
RUNS = 3  # of the server in a round; the clock is set back between them
DAY = 86_400  # seconds
_STEPS = (-9 * DAY, -2 * DAY, -3_600, -90, 90, 3_600, 2 * DAY, 9 * DAY)
_USERS = 7
_AT = "2026-01-01T14:00:00Z"  # after all events that have a timestamp
_PROMPT = 90.0  # seconds: longer than a stop or a replacement takes, shorter than most steps

Event = dict[str, Any]


def skew(setup: Setup) -> Verdict:
    """Steps of the wall clock: the same state as one clean pass, and no timer that takes notice."""
    rng, rounds = setup.rng("skew"), setup.times(ROUNDS)
    dated = _dated(rng)
    with Server(_copy(setup, "clean")) as server, server.client() as http:
        assert http.post("/v1/events", json={"events": dated}).status_code == 200
        clean = _state(http)
    equal, found = 0, Found()
    for number in range(rounds):
        equal += _round(setup, number, dated, found) == clean
    broken = _timers(setup)
    doubled, misplaced = _undated_control(setup)
    upload = _monotonic_control(setup)
    return Verdict(
        equal == rounds and not found.wrong and not broken,
        f"{equal} of {rounds} histories equal to the clean pass after {found.steps} steps of the "
        f"clock and {rounds * RUNS} starts; {found.undated} events without a time, "
        f"{len(found.wrong)} of them wrong; timers: "
        f"{'none noticed' if not broken else ', '.join(broken)}"
        f"{': ' + found.wrong[0] if found.wrong else ''}",
        f"without ids and times: {doubled} doubled, {misplaced} out of order; with the monotonic "
        f"clock stepped as well: an upload gets {upload}",
        doubled > 0 and misplaced > 0 and upload != 200,
    )


class Found:
    """Counts of the rounds: steps, events without a time, and what was wrong with them."""

    def __init__(self) -> None:
        self.steps = self.undated = 0
        self.wrong: list[str] = []

    def expect(self, holds: bool, otherwise: object) -> None:
        """Note what was found where it is not what must hold."""
        if not holds:
            self.wrong.append(str(otherwise))


def _copy(setup: Setup, name: str) -> Path:
    return setup.world.copy(setup.fresh(name) / "data")


def _item(rng: Random) -> str:
    return item_id(rng.randrange(len(GENRES)), rng.randrange(15))


def _dated(rng: Random) -> list[Event]:
    return [
        {
            "user_id": f"p{n % _USERS}",
            "item_id": _item(rng),
            "event_id": f"o{n}",
            "timestamp": f"2026-01-01T{12 + n % 2}:{n % 60:02}:{n % 59:02}Z",
        }
        for n in range(700)
    ]


def _state(http: httpx.Client) -> list[Any]:
    """Histories in their order, and what the model makes of them at one time."""
    state: list[Any] = []
    for user in range(_USERS):
        events = stored_events(http, f"p{user}")
        state += [(e["timestamp"], e["item_id"]) for e in events]
        state.append(sorted((e["timestamp"], e["item_id"], e["event_id"]) for e in events))
        question = {"user_id": f"p{user}", "limit": 10, "at": _AT}
        answer = http.post("/v1/recommend", json=question)
        assert answer.status_code == 200, answer.text
        state += [item["item_id"] for item in answer.json()["items"]]
    return state


# ---------------------------------------------------------------------------- state


def _round(setup: Setup, number: int, dated: list[Event], found: Found) -> list[Any]:
    """Send all events, some again, to servers whose clock steps; return the state at the end."""
    rng, data = setup.rng(f"skew-{number}"), _copy(setup, f"round{number}")
    mixed = dated + rng.sample(dated, 250)
    rng.shuffle(mixed)
    batches = [mixed[at::12] for at in range(12)]
    clock = SteppedClock(setup.folder / f"clock{number}", 2 * DAY)
    sent: list[str] = []
    for run in range(RUNS):
        with clock.served(data) as server, server.client() as http:
            for batch in batches[run::RUNS]:
                answer = http.post("/v1/events", json={"events": batch})
                found.expect(answer.status_code == 200, answer.text)
                _append_undated(http, clock, rng, sent, found)
            if run == RUNS - 1:
                final = _state(http)
                ids = [event["event_id"] for event in stored_events(http, "now")]
                found.expect(sorted(ids) == sorted(sent), f"{len(ids)} of {len(sent)}")
        clock.set(clock.ahead - 3 * DAY)
        found.steps += 1
    return final


def _append_undated(
    http: httpx.Client, clock: SteppedClock, rng: Random, sent: list[str], found: Found
) -> None:
    """Append events without a time, step the clock, and send them again."""
    names = [f"n{len(sent) + n}" for n in range(5)]
    sent += names
    batch = [{"user_id": "now", "item_id": _item(rng), "event_id": name} for name in names]
    before = clock.now()
    first = http.post("/v1/events", json={"events": batch}).json()
    after = clock.now()
    found.undated += len(names)
    found.expect(first["stored"] == 5, first)
    clock.set(clock.ahead + rng.choice(_STEPS))
    found.steps += 1
    again = http.post("/v1/events", json={"events": batch}).json()
    found.expect(again["duplicates"] == 5, again)
    # The next answer has what was acknowledged, also where that is in the future by now.
    history = {event["event_id"]: event for event in stored_events(http, "now")}
    for name in names:
        found.expect(name in history, f"{name} is not in the next answer")
        stamp = from_rfc3339(history[name]["timestamp"]) if name in history else before
        found.expect(before <= stamp <= after, f"{name} has {stamp}, not {before} to {after}")
    ranked = http.post("/v1/recommend", json={"user_id": "now", "limit": 60}).json()["items"]
    seen = {item["item_id"] for item in ranked} & {e["item_id"] for e in history.values()}
    found.expect(not seen, f"recommended although acknowledged: {sorted(seen)}")


def _undated_control(setup: Setup) -> tuple[int, int]:
    """Send events without ids and times twice, the clock set back between; count what goes wrong.

    The same comparisons must find events that are doubled, and that are in another order.
    """
    clock = SteppedClock(setup.folder / "undated", DAY)
    items = [item_id(n % len(GENRES), n) for n in range(20)]
    with clock.served(_copy(setup, "undated-data")) as server, server.client() as http:
        for item in items:
            clock.set(clock.ahead - 3_600)
            for _ in range(2):
                http.post("/v1/events", json={"events": [{"user_id": "c", "item_id": item}]})
        stored = [event["item_id"] for event in stored_events(http, "c")]
    distinct = [*dict.fromkeys(stored)]
    newest_first = [*reversed(items)]
    misplaced = sum(a != b for a, b in zip(distinct, newest_first, strict=True))
    return len(stored) - len(distinct), misplaced


# ---------------------------------------------------------------------------- timers


class Upload:
    """A write of which the half is sent, until `finish`."""

    def __init__(self, server: Server) -> None:
        body = b'{"events": [{"user_id": "half", "item_id": "space-01"}]}'
        self._rest = body[20:]
        port = int(server.url.rpartition(":")[2])
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        head = (
            "POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._sock.sendall(head.encode() + body[:20])
        time.sleep(0.5)  # the server waits for the rest by now

    def finish(self) -> int:
        """Send the rest; return the status, -1 where the connection was closed."""
        try:
            self._sock.sendall(self._rest)
            answer = self._sock.recv(100)
        except OSError:
            return -1
        finally:
            self._sock.close()
        return int(answer.split()[1]) if answer else -1


def _timers(setup: Setup) -> list[str]:
    """Step the clock under everything that waits; return what noticed."""
    clock, data = SteppedClock(setup.folder / "timers"), _copy(setup, "timed")
    noticed: list[str] = []
    settings = {"workers": 2, "deadline": 30, "body_timeout": 30, "worker_timeout": 20}
    with clock.served(data, **settings) as server:
        noticed += _under_load(server, clock)
        noticed += _watchdog(server, clock)
        noticed += _keys(server, clock, data)
        upload = None if noticed else Upload(server)
        server.terminate()
        clock.set(5 * DAY)
        time.sleep(1)
        clock.set(-5 * DAY)
        if upload is not None and (status := upload.finish()) not in (200, 401):
            noticed.append(f"a request in flight at the stop got {status}")
        began = time.monotonic()
        server.wait()
        if (took := time.monotonic() - began) > _PROMPT:
            noticed.append(f"the stop took {took:.0f} s")
    return noticed


def _under_load(server: Server, clock: SteppedClock) -> list[str]:
    """Step the clock amid questions, half an upload and a training, whose model is the newest."""
    noticed = []
    pids = children(server.pid)
    with server.client() as http:
        with Load(server.url, 3, 0, pause=0.01) as load:
            for ahead in (2 * DAY, 30 * DAY, -DAY, -9 * DAY, -2 * DAY, -20 * DAY):
                upload = Upload(server)
                clock.set(ahead)
                if ahead == -DAY:  # it ends at a time before that of the models that there are
                    body = {"options": {"epochs": 1}}
                    job = http.post("/v1/models/train", json=body).json()["job_id"]
                time.sleep(1)
                if (status := upload.finish()) != 200:
                    noticed.append(f"an upload got {status} with the clock {ahead:+} s ahead")
        eventually(lambda: http.get(f"/v1/jobs/{job}").json()["state"] not in _UNFINISHED)
        done = http.get(f"/v1/jobs/{job}").json()
        newest = http.get("/v1/models").json()["models"][-1]["version"]
        if done["state"] != "succeeded" or done["result"]["version"] != newest:
            noticed.append(f"a training {done['state']}, the newest model is {newest}")
    if bad := load.statuses.total() - load.statuses[200]:
        noticed.append(f"{bad} of {load.statuses.total()} questions failed")
    if children(server.pid) != pids:
        noticed.append("a worker was replaced")
    return noticed


_UNFINISHED = {"queued", "running"}


def _watchdog(server: Server, clock: SteppedClock) -> list[str]:
    """Stop a worker once the clock was set back: it is replaced all the same."""
    clock.set(-20 * DAY)
    victim = children(server.pid)[0]
    os.kill(victim, signal.SIGSTOP)
    began = time.monotonic()
    eventually(partial(is_replaced, server, victim))
    took = time.monotonic() - began
    return [f"a hung worker was replaced after {took:.0f} s"] if took > _PROMPT else []


def _keys(server: Server, clock: SteppedClock, data: Path) -> list[str]:
    """Expiries follow the wall clock, rates do not."""
    clock.set(0)
    now, scopes = clock.now(), frozenset(("read", "write"))
    day, dated = issue_key("day", scopes, now, expires=now + DAY * 1_000_000)  # type: ignore[arg-type]
    two, rated = issue_key("two", scopes, now, rate=Rate(2, 3_600))  # type: ignore[arg-type]

    async def add() -> None:
        store = SQLiteStore(data / STORE_FILE)
        for key in (day, two):
            await store.add_key(key)
        await store.close()

    asyncio.run(add())

    def ask(token: str) -> int:
        with server.client() as http:
            headers = {"Authorization": f"Bearer {token}"}
            return http.get("/v1/users/u1/history", headers=headers).status_code

    seen = []
    for ahead in (0, 2 * DAY, -2 * DAY):
        clock.set(ahead)
        seen.append((ask(dated), ask(rated)))
    # The key of two requests an hour has its third neither two days later nor two days before.
    right = [(200, 200), (401, 200), (200, 429)]
    return [] if seen == right else [f"keys were answered {seen}"]


def _monotonic_control(setup: Setup) -> int:
    """Return the status of an upload that a server gets whose timers go by a clock that steps."""
    clock = SteppedClock(setup.folder / "monotonic", monotonic=True)
    server = clock.served(_copy(setup, "monotonic-data"))
    try:
        upload = Upload(server)
        clock.set(2 * DAY)
        time.sleep(2)
        return upload.finish()
    finally:
        server.kill()
