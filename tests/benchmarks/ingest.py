"""Durable events a second over HTTP, beside bare SQLite with the same rows.

The reference is a table of plain columns with a unique index on the event id, written by rows that
are made beforehand, as durable, with the same cache, and checkpointed as seldom.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import apsw

from service.domain.errors import Unavailable
from service.domain.timestamps import to_rfc3339
from tests.benchmarks.harness.client import ask, encode_post
from tests.benchmarks.harness.data import prepare_data, users_by_events
from tests.benchmarks.harness.options import Data, Rounds
from tests.benchmarks.harness.servers import Cores, Server, heed, pinned
from tests.benchmarks.harness.tables import mib, print_machine, rate, ratio, rounds_of, table
from tests.benchmarks.harness.timing import ratios, spread

BATCH = 1_000  # events a request, and rows a transaction
CONNECTIONS = 4  # requests under way at once: while one waits for the disk, others are read
_USERS = 2_000
_NOW = 1_750_000_000_000_000  # in June 2025
_SCHEMA = """\
CREATE TABLE events (
  user_no INTEGER NOT NULL, timestamp INTEGER NOT NULL, seq INTEGER NOT NULL,
  item_no INTEGER NOT NULL, type_no INTEGER NOT NULL, weight REAL NOT NULL, event_id TEXT NOT NULL,
  PRIMARY KEY (user_no, timestamp, seq)) WITHOUT ROWID;
CREATE UNIQUE INDEX event_ids ON events (event_id);"""

Row = tuple[int, int, int, int, int, float, str]


class Batch(NamedTuple):
    """The same events as a request and as rows."""

    request: bytes
    rows: Sequence[Row]


def batches(item_ids: Sequence[str], count: int) -> list[Batch]:
    """Batches of events by new users on items of the catalogue."""
    rng, now, made = random.Random(0), _NOW, []
    for _ in range(count):
        rows: list[Row] = []
        for seq in range(BATCH):
            now += rng.randrange(2_000_000)
            event_id = f"{rng.getrandbits(128):032x}"  # at random, as clients name them
            item = rng.randrange(len(item_ids))
            rows.append((rng.randrange(_USERS), now, seq, item, 1, 1.0, event_id))
        events = [
            {
                "event_id": event_id,
                "user_id": f"visitor-{user}",
                "item_id": item_ids[item],
                "type": "view",
                "timestamp": to_rfc3339(at),
            }
            for user, at, _, item, _, _, event_id in rows
        ]
        # Neighbours in the table are written together: the best that SQLite can be given.
        made.append(Batch(encode_post("/v1/events", {"events": events}), sorted(rows)))
    return made


def send(server: Server, part: Sequence[Batch]) -> float:
    """Send batches, and return the seconds until all of them are stored.

    Raises:
        Unavailable: when the server did not store exactly what it was sent.
    """
    load = ask(server.port, [batch.request for batch in part], CONNECTIONS)
    for answer in load.answers:
        if answer.json()["stored"] != BATCH:
            raise Unavailable(f"a batch was answered with {answer.body[:300]!r}")
    return load.seconds


def ingest(data: Data = None, rounds: Rounds = 7, batches_a_round: int = 20) -> None:
    """Measure durable events a second on one core, beside SQLite alone with the same rows."""
    cores = Cores.choose()
    print_machine(cores)
    wall, processor, sqlite, sqlite_processor = [], [], [], []
    with prepare_data(data) as ground:
        made = batches(ground.item_ids, 1 + rounds * batches_a_round)
        raw = _database(ground.data.parent / "raw.db")
        with heed(ground.data, core=cores.server) as server:
            started_with = server.resident()
            with pinned(cores.client):
                send(server, made[:1])  # to warm up
            for number in rounds_of(rounds, "ingestion"):
                part = made[1 + number * batches_a_round :][:batches_a_round]
                events = BATCH * len(part)
                before = server.cpu_seconds()
                with pinned(cores.client):
                    wall.append(send(server, part) / events)
                processor.append((server.cpu_seconds() - before) / events)
                with pinned(cores.server):
                    started, used = time.perf_counter(), time.thread_time()
                    for batch in part:
                        _insert(raw, batch.rows)
                    sqlite.append((time.perf_counter() - started) / events)
                    sqlite_processor.append((time.thread_time() - used) / events)
            ended_with = server.resident()
        raw.close()
        stored, sent = users_by_events(ground.data).total(), BATCH * len(made)
        if stored != ground.events + sent:
            raise Unavailable(f"{sent:,} events were acknowledged, {stored - ground.events:,} kept")
    table(
        f"Durable events a second on one core, {BATCH:,} a request, {CONNECTIONS} connections",
        ("", "a second", "a second of the core's time"),
        (
            ("Heed over HTTP", _rate(wall), _rate(processor)),
            ("SQLite alone", _rate(sqlite), _rate(sqlite_processor)),
            (
                "ratio of times",
                ratio(ratios(wall, sqlite)),
                ratio(ratios(processor, sqlite_processor)),
            ),
        ),
        caption=f"{sent:,} events. The service held {mib(started_with)} before, {mib(ended_with)} "
        "afterwards.",
    )


def _rate(seconds: Sequence[float]) -> str:
    return rate(spread([1 / each for each in seconds]))


def _database(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    for name, value in (
        ("journal_mode", "WAL"),
        ("synchronous", "FULL"),
        ("cache_size", -64_000),
        ("wal_autocheckpoint", 4_000),
    ):
        connection.pragma(name, value)
    connection.execute(_SCHEMA)
    return connection


def _insert(connection: apsw.Connection, rows: Sequence[Row]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    connection.execute("COMMIT")
