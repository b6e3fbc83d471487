"""A drill: load of many users while one worker is killed and another one hangs.

What must hold: questions of users whose worker is alive are answered in full, nothing acknowledged
is lost, what is sent again is stored once, a follower of the log misses nothing, and everything
works when the worker is back.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg

from service.domain.errors import Unavailable
from service.stores.event_identity import user_key
from service.stores.postgres.store import PostgresStore
from tests.distributed.load import ITEMS, Load, answered
from tests.support.citus_databases import CitusDatabases
from tests.support.server import Server
from tests.support.store_contract import LogFollower

RECOVERY = 180.0  # seconds in which everything works again; Citus settles commits once a minute
DEADLINE = 6.0  # seconds, of requests
_GRACE = 2.0 * DEADLINE  # seconds in which calls that hung when the fault began have ended
_KNOCK = 2  # seconds until a worker that does not let one in counts as hung
_PLACES = """\
SELECT key, groupid FROM unnest(%s::bigint[]) AS key
  JOIN pg_dist_placement ON shardid = get_shard_id_for_distribution_column('heed.users', key)"""


@dataclass(frozen=True)
class Fault:
    """Commands of a shell that begin a fault of one worker, and that end it."""

    name: str
    begin: str
    end: str


@dataclass
class Verdict:
    """What was seen: lines to print, and what did not hold."""

    seen: list[str]
    broken: list[str]

    def check(self, holds: bool, otherwise: str) -> None:
        """Note what should hold and does not."""
        if not holds:
            self.broken.append(otherwise)


class Drill:
    """One run against a distributed database.

    Args:
        cluster: where the database is.
        url: of the database, whose tables are distributed.
        folder: an empty one, for the service.
        users, clients, seed: of the load.
        seconds: of each phase.
    """

    def __init__(
        self,
        cluster: CitusDatabases,
        url: str,
        folder: Path,
        *,
        users: int,
        clients: int,
        seed: int,
        seconds: float,
    ) -> None:
        self._cluster, self._url, self._folder = cluster, url, folder
        self._users, self._clients, self._seed, self._seconds = users, clients, seed, seconds
        self._worker_of = self._places()
        self.verdict = Verdict([], [])

    async def run(self, faults: list[Fault]) -> Verdict:
        """Run the load through all faults, one after another."""
        with Server(self._folder / "data", store=self._url, deadline=DEADLINE) as server:
            async with server.connect() as http:
                items = [{"item_id": f"i{n}", "title": f"title {n}"} for n in range(ITEMS)]
                (await http.post("/v1/items", json={"items": items})).raise_for_status()
                load = Load(http, self._users, self._seed)
                store = PostgresStore(f"{self._url}?application_name=drill", patience=DEADLINE)
                follower = LogFollower(store, limit=None)
                following = asyncio.ensure_future(self._follow(follower))
                running = asyncio.ensure_future(load.run(self._clients))
                await asyncio.sleep(self._seconds)
                self._note("before", load, 0.0, time.monotonic(), frozenset())
                for fault in faults:
                    await self._inject(fault, load)
                load.stop()
                await running
                settled = await load.settle(time.monotonic() + RECOVERY)
                self.verdict.check(settled, "events were refused after all workers were back")
                following.cancel()
                with suppress(asyncio.CancelledError):
                    await following
                await self._compare(load, store, follower)
                await store.close()
        return self.verdict

    async def _inject(self, fault: Fault, load: Load) -> None:
        """Let one worker fail, and wait until everything works when it is back."""
        await self._shell(fault.begin)
        began = time.monotonic()
        victims = await asyncio.to_thread(self._silent)
        try:
            self.verdict.check(
                len(victims) == 1, f"{fault.begin!r} must stop one worker, and stopped {victims}"
            )
            await asyncio.sleep(self._seconds + _GRACE)
            self._note(fault.name, load, began, time.monotonic(), victims)
        finally:
            await self._shell(fault.end)
        back = time.monotonic()
        while any([(await load.ask(user)).is_degraded for user in range(self._users)]):
            if time.monotonic() > back + RECOVERY:
                self.verdict.broken.append(
                    f"{fault.name}: no full answers after the worker is back"
                )
                return
        took = time.monotonic() - back
        self.verdict.seen.append(f"after {fault.name}: all users have full answers, {took:.0f} s")

    def _note(
        self, name: str, load: Load, began: float, ended: float, victims: frozenset[int]
    ) -> None:
        asked = [each for each in load.questions if began <= each.began and each.ended <= ended]
        others = [each for each in asked if self._worker_of[each.user] not in victims]
        self.verdict.seen.append(f"{name}: questions of users on live workers: {answered(others)}")
        self.verdict.check(len(others) >= self._users, f"{name}: few questions were answered")
        failed = [each for each in others if each.is_degraded]
        self.verdict.check(not failed, f"{name}: of users on live workers: {answered(failed)}")
        if victims:
            own = answered(each for each in asked if self._worker_of[each.user] in victims)
            self.verdict.seen.append(f"{name}: questions of users on the lost worker: {own}")
        batches = [each for each in load.batches if began <= each[0]]
        for label, chosen in (
            ("on live workers", [b for b in batches if not victims & self._workers_of(b[1])]),
            ("on the lost worker", [b for b in batches if victims & self._workers_of(b[1])]),
        ):
            counts = Counter(status for _, _, status in chosen)
            if counts:
                self.verdict.seen.append(f"{name}: batches of users {label}: {dict(counts)}")

    async def _compare(self, load: Load, store: PostgresStore, follower: LogFollower) -> None:
        events = load.events
        stored = Counter(str(event.event_id) for event in store.scan_events())
        lost, doubled = events.acknowledged - stored.keys(), [i for i, n in stored.items() if n > 1]
        self.verdict.seen.append(
            f"events: {len(events.tried)} sent, {len(events.acknowledged)} acknowledged, "
            f"{len(stored)} stored, {len(lost)} lost, {len(doubled)} stored twice"
        )
        self.verdict.check(not lost, f"acknowledged and lost: {sorted(lost)[:5]}")
        self.verdict.check(not doubled, f"stored twice: {sorted(doubled)[:5]}")
        self.verdict.check(stored.keys() <= events.tried, "stored, and never sent")
        self.verdict.check((await store.counts())["events"] == len(stored), "the counts are wrong")
        await follower.follow()
        log = sorted(
            (e.user_id, e.item_id, e.type, e.timestamp, e.weight) for e in store.scan_events()
        )
        self.verdict.seen.append(f"a follower of the log has {len(await follower.log())} events")
        self.verdict.check(await follower.log() == log, "a follower of the log misses events")

    async def _follow(self, follower: LogFollower) -> None:
        while True:
            with suppress(Unavailable):
                await follower.follow()
            await asyncio.sleep(0.2)

    async def _shell(self, command: str) -> None:
        process = await asyncio.create_subprocess_shell(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        if await process.wait():
            raise RuntimeError(f"{command!r} failed")

    def _silent(self) -> frozenset[int]:
        """Return the workers that let nobody in."""
        silent = set()
        for group in self._cluster.workers:
            url = self._cluster.worker_url(self._url, group)
            try:
                psycopg.connect(url, connect_timeout=_KNOCK).close()
            except psycopg.OperationalError:
                silent.add(group)
        return frozenset(silent)

    def _workers_of(self, users: frozenset[int]) -> frozenset[int]:
        return frozenset(self._worker_of[user] for user in users)

    def _places(self) -> Mapping[int, int]:
        """Return the worker of each user."""
        users = {user_key(str(user)): user for user in range(self._users)}
        with psycopg.connect(self._url) as connection:
            rows = connection.execute(_PLACES, (list(users),)).fetchall()
        return {users[key]: group for key, group in rows}
