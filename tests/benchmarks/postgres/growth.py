"""Reads and appends over databases of several sizes in turns, and what each takes on disk.

Everything is asked of the store in this process, without HTTP, so that what grows with the number
of events is not hidden behind what does not.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import psycopg

from service.domain.records import Event
from service.stores.encoding import EventIds
from service.stores.postgres.connections import Connections
from service.stores.postgres.store import PostgresStore
from tests.benchmarks.harness.timing import ProgressCallback, Spread, no_progress, ratios
from tests.benchmarks.postgres.filling import Loaded, count_events, item_id, random_id, user_id
from tests.benchmarks.postgres.measured_server import MeasuredServer, checkpoint
from tests.benchmarks.workload.many_events import FIRST_TIME, SECONDS

Call = Callable[[], Awaitable[object]]

NEWEST = 200  # events of a page
BATCH = 1_000  # events of an append
# A process that has read so many histories knows the names of almost all items; until then it asks
# for those that it meets first.
WARM_READS = 2_000
READS = ("newest 200", "history of 200", "SELECT 1")
IDS = ("random ids", "ids by time")
_SIZES = """\
SELECT coalesce(whole.relname, part.relname)::text, sum(pg_table_size(part.oid))::bigint,
       sum(pg_indexes_size(part.oid))::bigint
  FROM pg_class AS part JOIN pg_namespace ON pg_namespace.oid = part.relnamespace
  LEFT JOIN pg_inherits ON inhrelid = part.oid LEFT JOIN pg_class AS whole ON whole.oid = inhparent
 WHERE nspname = 'heed' AND part.relkind = 'r' GROUP BY 1"""
_WAL = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"


@dataclass(slots=True)
class Calls:
    """Latencies of one kind of call in each round, and processor time of all of them, seconds."""

    rounds: list[list[float]] = field(default_factory=list)
    client: float = 0.0
    server: float = 0.0
    wal: int = 0  # bytes

    @property
    def count(self) -> int:
        """Number of calls."""
        return sum(map(len, self.rounds))

    def percentile(self, percent: float) -> float:
        """Return a percentile of all latencies."""
        return float(np.percentile(np.concatenate(self.rounds), percent))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "calls": self.count,
            "p50": self.percentile(50),
            "p99": self.percentile(99),
            "client_cpu_seconds_a_call": self.client / self.count,
            "server_cpu_seconds_a_call": self.server / self.count,
            "wal_bytes_a_call": self.wal / self.count,
        }


@dataclass(frozen=True, slots=True)
class Grown:
    """Figures of one database."""

    loaded: Loaded
    tables: Mapping[str, tuple[int, int]]  # bytes of each with its indexes' bytes, after loading
    reads: Mapping[str, Calls]
    appends: Mapping[str, Calls]
    appended: int  # events that were acknowledged, also those that warmed up
    counted: int  # events in the end, one by one

    def bytes_each(self, count: int, *tables: str) -> float:
        """Bytes of tables with their indexes over a count."""
        return sum(sum(self.tables[name]) for name in tables) / count

    @property
    def expected(self) -> int:
        """Number of events that were loaded or acknowledged."""
        return self.loaded.events + self.appended

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        loaded = self.loaded
        return {
            "events": loaded.events,
            "users": loaded.users,
            "items": loaded.items,
            "load": {
                "events_per_second": loaded.events / loaded.seconds,
                "client_cpu_seconds_an_event": loaded.client_seconds / loaded.events,
                "server_cpu_seconds_an_event": loaded.server_seconds / loaded.events,
            },
            "bytes": {
                "an_event": self.bytes_each(loaded.events, "events", "event_ids"),
                "a_user": self.bytes_each(loaded.users, "users"),
                "an_item": self.bytes_each(loaded.items, "items"),
                "tables": {name: list(sizes) for name, sizes in self.tables.items()},
            },
            "reads": {name: each.as_dict() for name, each in self.reads.items()},
            "appends": {name: each.as_dict() for name, each in self.appends.items()},
            "events_counted": self.counted,
        }


@dataclass(frozen=True, slots=True)
class Growth:
    """Figures of all databases, the smallest first."""

    sizes: Sequence[Grown]

    def ratio(self, read: str) -> tuple[Spread, float]:
        """Latency in the largest database over that in the smallest: p50 by rounds, and p99."""
        first, last = (each.reads[read] for each in (self.sizes[0], self.sizes[-1]))
        medians = [[float(np.median(part)) for part in each.rounds] for each in (last, first)]
        return ratios(*medians), last.percentile(99) / first.percentile(99)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        ratios = {read: self.ratio(read) for read in READS}
        return {
            "sizes": [each.as_dict() for each in self.sizes],
            "ratio_of_largest_to_smallest": {
                read: {"p50": p50.as_dict(), "p99": p99} for read, (p50, p99) in ratios.items()
            },
        }


async def measure(
    server: MeasuredServer,
    databases: Sequence[Loaded],
    *,
    rounds: int,
    reads: int,
    batches: int,
    warm: int = WARM_READS,
    progress: ProgressCallback = no_progress,
) -> Growth:
    """Read from and append to all databases in turns.

    Args:
        server: that holds the databases.
        databases: the smallest first.
        rounds: of reads and of appends, beside one that warms up.
        reads: of each kind in each round and database.
        batches: likewise of appends.
        warm: reads of each kind before the first round.
        progress: called with the number of rounds that are done.
    """
    subjects = [_Subject(server, each) for each in databases]
    tables = [_tables(each.url) for each in databases]
    try:
        for turn in range(-1, rounds):
            progress(max(0, turn), 2 * rounds)
            for subject in _rotated(subjects, turn):
                await subject.read(reads if turn >= 0 else max(reads, warm), keep=turn >= 0)
        for database in databases:
            checkpoint(database.url)
        for turn in range(-1, rounds):
            progress(rounds + max(0, turn), 2 * rounds)
            for subject in _rotated(subjects, turn):
                await subject.append(batches, keep=turn >= 0)
    finally:
        for subject in subjects:
            await subject.close()
    progress(2 * rounds, 2 * rounds)
    return Growth(
        [
            Grown(
                *(database, sizes, subject.reads, subject.appends, subject.appended),
                count_events(database.url),
            )
            for database, sizes, subject in zip(databases, tables, subjects, strict=True)
        ]
    )


class _Subject:
    """One database, and what was measured of it so far."""

    def __init__(self, server: MeasuredServer, loaded: Loaded, seed: int = 1) -> None:
        self._server = server
        self._loaded = loaded
        self._rng = np.random.default_rng(seed)
        self._random = random.Random(seed)
        self._ordered = EventIds()
        self._now = FIRST_TIME + SECONDS * 1_000_000  # microseconds; of the next event at least
        self._long = np.flatnonzero(loaded.lengths >= NEWEST)
        usual = np.abs(loaded.lengths - NEWEST) <= NEWEST // 4
        # Where histories are too short for that, as in a small trial: the longest.
        longest = np.argsort(loaded.lengths)[-10:]
        self._long = self._long if len(self._long) else longest
        self._usual = np.flatnonzero(usual) if usual.any() else longest
        self.store = PostgresStore(loaded.url, patience=60)
        self.connections = Connections(loaded.url)  # as the store's, and not its own
        self.reads = {name: Calls() for name in READS}
        self.appends = {name: Calls() for name in IDS}
        self.appended = 0  # events

    async def read(self, count: int, *, keep: bool) -> None:
        """Read so many times of each kind, of users drawn anew."""
        store = self.store
        pages = [user_id(each) for each in self._rng.choice(self._long, count)]
        histories = [user_id(each) for each in self._rng.choice(self._usual, count)]
        calls: dict[str, list[Call]] = {
            READS[0]: [partial(store.page, user, limit=NEWEST) for user in pages],
            READS[1]: [partial(store.history, user) for user in histories],
            READS[2]: [partial(round_trip, self.connections)] * count,
        }
        for name, each in calls.items():
            await self._time(self.reads[name] if keep else Calls(), each)

    async def append(self, count: int, *, keep: bool) -> None:
        """Append so many batches with ids of each kind."""
        for name in IDS:
            batches = [self._batch(ordered=name == IDS[1]) for _ in range(count)]
            self.appended += BATCH * count
            calls = [partial(self.store.append, batch) for batch in batches]
            await self._time(self.appends[name] if keep else Calls(), calls)

    async def close(self) -> None:
        """Close all connections."""
        await self.store.close()
        await self.connections.close()

    async def _time(self, found: Calls, calls: Sequence[Call]) -> None:
        with psycopg.connect(self._loaded.url, autocommit=True) as connection:
            log, worked, used = _wal(connection), self._server.cpu_seconds(), time.process_time()
            latencies = []
            for call in calls:
                started = time.perf_counter()
                await call()
                latencies.append(time.perf_counter() - started)
            found.client += time.process_time() - used
            found.server += self._server.cpu_seconds() - worked
            found.wal += _wal(connection) - log
            found.rounds.append(latencies)

    def _batch(self, *, ordered: bool) -> list[Event]:
        """Return new events of users who are drawn as often as they were active before."""
        loaded = self._loaded
        chosen = np.searchsorted(
            np.cumsum(loaded.lengths), self._rng.integers(0, loaded.events, BATCH), side="right"
        )
        rows = (loaded.items * self._rng.random(BATCH) ** 3).astype(np.int64)
        self._now += 1_000_000
        if ordered:
            ids = list(self._ordered.take(BATCH, self._now))
        else:
            ids = [random_id(self._random) for _ in range(BATCH)]
        return [
            Event(user_id(user), item_id(row), id_, "view", 1.0, self._now + place)
            for place, (user, row, id_) in enumerate(
                zip(chosen.tolist(), rows.tolist(), ids, strict=True)
            )
        ]


async def round_trip(connections: Connections) -> None:
    """Ask the server for what costs it nothing: the least that any question takes."""
    async with connections.connection() as connection:
        await (await connection.execute(b"SELECT 1", binary=True)).fetchone()


def _rotated(subjects: Sequence[_Subject], turn: int) -> list[_Subject]:
    first = turn % len(subjects)
    return [*subjects[first:], *subjects[:first]]


def _tables(url: str) -> dict[str, tuple[int, int]]:
    """Return the bytes of each table and of its indexes."""
    with psycopg.connect(url) as connection:
        return {name: (own, indexes) for name, own, indexes in connection.execute(_SIZES)}


def _wal(connection: psycopg.Connection) -> int:
    """Return the bytes that the server has written to its log so far."""
    row = connection.execute(_WAL).fetchone()
    return 0 if row is None else int(row[0])
