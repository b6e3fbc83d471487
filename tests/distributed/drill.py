"""A drill: load of many users on two replicas while workers are killed, or hang, one at a time.

What must hold: questions about users whose worker is alive are answered in full and in time,
nothing acknowledged is lost, what is sent again is stored once, a follower of the log misses
nothing, and everything works when the worker is back. What a lost worker costs is told.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import numpy as np
import psycopg

from service.domain.errors import Unavailable
from service.stores.event_identity import event_key, user_key
from service.stores.postgres.connections import DISTRIBUTED_POOL_SIZE, MAX_SNAPSHOTS
from service.stores.postgres.store import PostgresStore
from tests.distributed.load import Batch, Load, Question
from tests.distributed.local_server import LocalServer
from tests.support.journaled_clients import Replicas
from tests.support.store_contract import LogFollower

REPLICAS = 2
DEADLINE = 2.0  # seconds, of requests
MARGIN = 0.5  # seconds that an answer may come after it, where clients and servers share cores
RECOVERY = 180.0  # seconds in which everything works again
_PLACES = """\
SELECT groupid FROM unnest(%s::{type}[]) WITH ORDINALITY AS each (key, place)
  JOIN pg_dist_placement
    ON shardid = get_shard_id_for_distribution_column('heed.{table}', key) ORDER BY place"""

_HUNG = b"""\
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND state = 'active'
   AND query_start < clock_timestamp() - %s * interval '1 second'"""


@dataclass
class Drill:
    """One run against a distributed database.

    Args:
        url: of the database, whose tables are distributed.
        workers: servers of the workers, by their groups' numbers.
        folder: an empty one, for the replicas.
        users, clients, seed: of the load.
        seconds: of each phase.
        rounds: in each of which every kind of fault hits one worker.

    Attributes:
        seen: lines that say what was seen.
        broken: what did not hold.
    """

    url: str
    workers: Mapping[int, LocalServer]
    folder: Path
    users: int
    clients: int
    seed: int
    seconds: float
    rounds: int
    seen: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Run the load through all faults, one after another."""
        keys = [user_key(str(user)) for user in range(self.users)]
        self._worker_of = self._places("users", "bigint", keys)
        urls = [self.url] * REPLICAS
        with Replicas(self.folder, urls, deadline=DEADLINE, drain_timeout=10) as replicas:
            await asyncio.to_thread(replicas.put_items)
            load = Load([replicas.url(n) for n in range(REPLICAS)], self.users, self.seed)
            store = PostgresStore(f"{self.url}?application_name=drill", patience=30.0)
            follower = LogFollower(store, limit=None)
            following = asyncio.ensure_future(_follow(follower))
            running = asyncio.ensure_future(load.run(self.clients))
            began = time.monotonic()
            await asyncio.sleep(self.seconds)
            self._note("before", load, began, None)
            for number in range(self.rounds):
                groups = sorted(self.workers)
                one, other = (groups[(number + n) % len(groups)] for n in range(2))
                killed, frozen = self.workers[one], self.workers[other]
                await self._inject("a killed worker", one, killed.kill, killed.start, load)
                await self._inject("a frozen worker", other, frozen.freeze, frozen.thaw, load)
            load.stop()
            await running
            self._check(await load.settle(RECOVERY), "events are refused with all workers back")
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
            await self._compare(load, store, follower)
            await load.close()
            await store.close()

    async def _inject(
        self,
        name: str,
        group: int,
        begin: Callable[[], None],
        end: Callable[[], None],
        load: Load,
    ) -> None:
        """Let one worker fail, and wait until everything works when it is back."""
        began = time.monotonic()
        await asyncio.to_thread(begin)
        try:
            await asyncio.sleep(self.seconds)
            self._note(name, load, began, group)
            self._count_hung_calls(name)
        finally:
            await asyncio.to_thread(end)
        back = time.monotonic()
        waiting = list(load.refused)
        try:
            async with asyncio.timeout(RECOVERY):
                await self._until_whole(load, waiting)
        except TimeoutError:
            self.broken.append(f"{name}: no full answers or refused writes when it is back")
        asked = [each for each in load.questions if self._worker_of[each.user] == group]
        written = [batch for batch, groups in self._needs(load.batches) if group in groups]
        self.seen.append(
            f"after {name}: the first full answer {_first(asked, back)}, the first write "
            f"{_first(written, back)}, all {len(waiting)} refused writes "
            f"{_last(written, waiting, back)} after its return"
        )

    async def _until_whole(self, load: Load, waiting: list[tuple[str, ...]]) -> None:
        """Return once the clients have had batches acknowledged, and all answers are full."""
        # Clients set no event.
        while not all(map(load.acknowledged.issuperset, waiting)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for replica in range(REPLICAS):
            for user in range(self.users):
                while (await load.ask(user, replica)).outcome != "200":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    def _note(self, name: str, load: Load, began: float, lost: int | None) -> None:
        """Tell what became of what was asked and sent since a moment, by what it needs."""
        asked = [each for each in load.questions if began <= each.began]
        sent = [each for each in load.batches if began <= each.began]
        places = self._needs(sent)
        live = [each for each in asked if self._worker_of[each.user] != lost]
        self.seen.append(f"{name}: questions about users on live workers: {summary(live)}")
        slow = [each for each in live if each.ended - each.began > DEADLINE + MARGIN]
        self._check(len(live) > self.seconds, f"{name}: only {len(live)} questions were answered")
        self._check({each.outcome for each in live} == {"200"}, f"{name}: {summary(live)}")
        self._check(not slow, f"{name}: {len(slow)} answers took too long: {summary(slow)}")
        needed = [each for each in asked if self._worker_of[each.user] == lost]
        if needed:
            self.seen.append(f"{name}: questions about users on it: {summary(needed)}")
        for label, chosen in (
            ("that need live workers", [b for b, groups in places if lost not in groups]),
            ("that need it", [b for b, groups in places if lost in groups]),
        ):
            if chosen:
                self.seen.append(f"{name}: writes {label}: {summary(chosen)}")

    def _count_hung_calls(self, name: str) -> None:
        """Check that calls that were given up do not stay with the coordinator.

        Those whose connections to the worker were open do, of which a pool has one each.
        """
        most = REPLICAS * DISTRIBUTED_POOL_SIZE + MAX_SNAPSHOTS
        with psycopg.connect(self.url) as connection:
            ((count,),) = connection.execute(_HUNG, (2 * DEADLINE,)).fetchall()
        self.seen.append(f"{name}: {count} calls hang at the coordinator")
        self._check(count <= most, f"{name}: {count} calls hang at the coordinator; most: {most}")

    def _needs(self, batches: list[Batch]) -> list[tuple[Batch, set[int]]]:
        """Return batches with the workers of their users and event ids."""
        ids = sorted({id_ for batch in batches for id_ in batch.ids})
        keys = [UUID(bytes=event_key(id_)) for id_ in ids]
        worker_of = dict(zip(ids, self._places("event_ids", "uuid", keys), strict=True))
        return [
            (
                batch,
                {worker_of[id_] for id_ in batch.ids}
                | {self._worker_of[int(id_.partition("-")[0])] for id_ in batch.ids},
            )
            for batch in batches
        ]

    async def _compare(self, load: Load, store: PostgresStore, follower: LogFollower) -> None:
        events = [*store.scan_events()]
        stored = Counter(str(event.event_id) for event in events)
        lost = load.acknowledged - stored.keys()
        doubled = [name for name, count in stored.items() if count > 1]
        self.seen.append(
            f"events: {len(load.tried)} sent, {len(load.acknowledged)} acknowledged, "
            f"{len(stored)} stored, {len(lost)} lost, {len(doubled)} stored twice"
        )
        self._check(not lost, f"acknowledged and lost: {sorted(lost)[:5]}")
        self._check(not doubled, f"stored twice: {sorted(doubled)[:5]}")
        self._check(stored.keys() <= load.tried, "stored, and never sent")
        self._check((await store.counts())["events"] == len(events), "the counts are wrong")
        await follower.follow()
        followed = await follower.log()
        log = sorted((e.user_id, e.item_id, e.type, e.timestamp, e.weight) for e in events)
        self.seen.append(f"a follower of the log has {len(followed)} events")
        self._check(followed == log, "a follower of the log misses events")

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.broken.append(otherwise)

    def _places(self, table: str, type_: str, keys: Sequence[object]) -> list[int]:
        """Return the worker of each key of a table."""
        with psycopg.connect(self.url) as connection:
            query = _PLACES.format(table=table, type=type_).encode()
            return [group for (group,) in connection.execute(query, (list(keys),)).fetchall()]


def summary(answers: Iterable[Question | Batch]) -> str:
    """Return how many answers there were of each kind, and how long they took, in words."""
    found = [*answers]
    if not found:
        return "none"
    counts = Counter(each.outcome for each in found)
    seconds = [each.ended - each.began for each in found]
    p50, p99 = np.quantile(seconds, (0.5, 0.99))
    kinds = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
    return f"{kinds}; {p50:.3f} s, p99 {p99:.3f} s, at most {max(seconds):.3f} s"


def _first(answers: Iterable[Question | Batch], since: float) -> str:
    ended = [each.ended for each in answers if each.ended > since and each.outcome == "200"]
    return f"{min(ended) - since:.1f} s" if ended else "never"


def _last(answers: Iterable[Batch], ids: Sequence[tuple[str, ...]], since: float) -> str:
    waiting = set(ids)
    ended = [each.ended for each in answers if each.ids in waiting and each.outcome == "200"]
    return f"{max(ended, default=since) - since:.1f} s"


async def _follow(follower: LogFollower) -> None:
    while True:
        with suppress(Unavailable):
            await follower.follow()
        await asyncio.sleep(0.2)
