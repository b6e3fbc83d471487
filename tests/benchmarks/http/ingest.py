"""Durable events a second over HTTP, beside SQLite alone with the same rows."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import apsw
import uvloop

from service.domain.errors import Unavailable
from service.domain.records import Event
from service.domain.timestamps import to_rfc3339
from service.stores.event_identity import body_digest
from service.stores.sqlite.schema import SCHEMA
from service.stores.sqlite.writer import CHECKPOINT_PAGES
from tests.benchmarks.harness.closed_loop import closed_loop, connected
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import Cores, Server, pinned
from tests.benchmarks.harness.timing import ProgressCallback, Spread, no_progress, ratios, spread
from tests.benchmarks.workload.data import BenchmarkData

BATCH = 1_000  # events a request, and rows a transaction
CONNECTIONS = 4  # requests under way at once: while one waits for the disk, others are read
_USERS = 2_000

Row = tuple[int, int, int, int, int, float, str, int]


@dataclass(frozen=True, slots=True)
class Batch:
    """The same events as a request and as rows."""

    request: bytes
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class IngestResults:
    """Seconds for each event, round by round."""

    events: int  # that were sent, and are stored
    before: int  # events in the store when it began
    wall: Sequence[float]
    processor: Sequence[float] | None  # of the server; None where that cannot be known
    sqlite: Sequence[float]  # wall
    sqlite_processor: Sequence[float]
    sync: Spread  # one small durable transaction

    @property
    def ratio(self) -> Spread:
        """Heed's time over SQLite's."""
        return ratios(self.wall, self.sqlite)

    @property
    def processor_ratio(self) -> Spread | None:
        """The same of processor time."""
        return None if self.processor is None else ratios(self.processor, self.sqlite_processor)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        by_core, shared = rate(self.processor), self.processor_ratio
        return {
            "events": self.events,
            "events_before": self.before,
            "batch": BATCH,
            "connections": CONNECTIONS,
            "events_per_second": rate(self.wall).as_dict(),
            "events_per_core_second": by_core and by_core.as_dict(),
            "sqlite_rows_per_second": rate(self.sqlite).as_dict(),
            "sqlite_rows_per_core_second": rate(self.sqlite_processor).as_dict(),
            "ratio": self.ratio.as_dict(),
            "ratio_of_processor_time": shared and shared.as_dict(),
            "seconds_of_one_small_transaction": self.sync.as_dict(),
        }


@overload
def rate(seconds: Sequence[float]) -> Spread: ...
@overload
def rate(seconds: Sequence[float] | None) -> Spread | None: ...
def rate(seconds: Sequence[float] | None) -> Spread | None:
    """Return events a second from seconds an event; None where these are unknown."""
    return None if seconds is None else spread([1 / each for each in seconds])


def batches(ground: BenchmarkData, count: int, seed: int = 0) -> list[Batch]:
    """So many batches of events by new users on items of the catalogue."""
    rng = random.Random(seed)
    made = []
    now = 1_750_000_000_000_000  # in June 2025
    numbers: dict[str, int] = {}
    seqs: dict[str, int] = {}
    for _ in range(count):
        events = []
        for _ in range(BATCH):
            now += rng.randrange(2_000_000)
            user, item = f"visitor-{rng.randrange(_USERS)}", rng.choice(ground.item_ids)
            event_id = f"{rng.getrandbits(128):032x}"  # as clients name them: at random
            events.append(Event(user, item, event_id, "view", 1.0, now))
        body = [
            {
                "event_id": event.event_id,
                "user_id": event.user_id,
                "item_id": event.item_id,
                "type": event.type,
                "timestamp": to_rfc3339(event.timestamp or 0),
            }
            for event in events
        ]
        rows: list[Row] = []
        for event in events:
            seqs[event.user_id] = seqs.get(event.user_id, 0) + 1
            rows.append(
                (
                    numbers.setdefault(event.user_id, len(numbers)),
                    event.timestamp or 0,
                    seqs[event.user_id],
                    numbers.setdefault(event.item_id, len(numbers)),
                    1,
                    event.weight,
                    event.event_id or "",
                    body_digest(event),
                )
            )
        # Neighbours in the table are written together: the best that SQLite can be given.
        made.append(Batch(encode_post("/v1/events", {"events": body}), sorted(rows)))
    return made


def measure(
    ground: BenchmarkData,
    server: Server,
    cores: Cores,
    *,
    rounds: int,
    batches_a_round: int,
    progress: ProgressCallback = no_progress,
) -> IngestResults:
    """Send batches to the server and write them with SQLite, in turns, each on the same core.

    Raises:
        Unavailable: when the server did not store exactly what it was sent.
    """
    made = batches(ground, 1 + rounds * batches_a_round)
    warming, made = made[0], made[1:]
    raw = _database(ground.data / "raw.db")
    wall, processor, sqlite, sqlite_processor = [], [], [], []
    _send(server, cores, [warming])
    for number in range(rounds):
        progress(number, rounds)
        part = made[number * batches_a_round : (number + 1) * batches_a_round]
        events = BATCH * len(part)
        before = server.cpu_seconds()
        wall.append(_send(server, cores, part) / events)
        after = server.cpu_seconds()
        if before is not None and after is not None:
            processor.append((after - before) / events)
        with pinned(cores.server):
            started, used = time.perf_counter(), time.thread_time()
            for batch in part:
                _insert(raw, batch.rows)
            sqlite.append((time.perf_counter() - started) / events)
            sqlite_processor.append((time.thread_time() - used) / events)
    with pinned(cores.server):
        sync = spread([_one_row(raw, number) for number in range(50)])
    raw.close()
    progress(rounds, rounds)
    return IngestResults(
        BATCH * (1 + len(made)),
        ground.events,
        wall,
        processor or None,
        sqlite,
        sqlite_processor,
        sync,
    )


# ------------------------------------------------------------------------------ the parts


def send_batches(server: Server, part: Sequence[Batch]) -> float:
    """Send batches, and return the seconds until all of them are stored.

    Raises:
        Unavailable: when the server did not store exactly what it was sent.
    """

    async def send() -> float:
        async with connected(server.port, CONNECTIONS) as connections:
            load = await closed_loop(connections, [batch.request for batch in part])
        for answer in load.answers:
            if answer.status != 200 or answer.json()["stored"] != BATCH:
                raise Unavailable(
                    f"a batch was answered with {answer.status}: {answer.body[:300]!r}"
                )
        return load.seconds

    return uvloop.run(send())


def _send(server: Server, cores: Cores, part: Sequence[Batch]) -> float:
    with pinned(cores.client):
        return send_batches(server, part)


def _database(path: Path) -> apsw.Connection:
    """Heed's table of events alone, as durable as there, with its cache, as seldom checkpointed."""
    connection = apsw.Connection(str(path))
    for name, value in (
        ("journal_mode", "WAL"),
        ("synchronous", "FULL"),
        ("cache_size", -64_000),
        ("wal_autocheckpoint", CHECKPOINT_PAGES),
    ):
        connection.pragma(name, value)
    connection.execute(SCHEMA)
    return connection


def _insert(connection: apsw.Connection, rows: Sequence[Row]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)", rows)
    connection.execute("COMMIT")


def _one_row(connection: apsw.Connection, number: int) -> float:
    started = time.perf_counter()
    _insert(connection, [(-1, number, 1, 1, 1, 1.0, f"single-{number}", 0)])
    return time.perf_counter() - started
