"""The PostgreSQL store: sizes, reads and appends by the number of events; and beside SQLite.

Costs that grow with the number of events are measured in this process, without HTTP, so that they
are not hidden behind those that do not grow. Scores, appends and two replicas are measured over
HTTP.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import psycopg
import typer
from numpy.typing import NDArray

from service.domain.errors import Invalid, Unavailable
from service.domain.records import Event
from service.runtime.data_layout import MODELS_FOLDER
from service.snapshots.registry import Registry
from service.stores.encoding import EventIds
from service.stores.postgres.store import PostgresStore
from tests.benchmarks.harness.data import (
    FIRST_TIME,
    YEAR,
    BenchmarkData,
    generate,
    prepare_data,
    questions,
    user_lengths,
)
from tests.benchmarks.harness.options import Data, Requests, Rounds
from tests.benchmarks.harness.servers import ROOT, Cores, Server, heed, pinned
from tests.benchmarks.harness.tables import OUT, ms, print_machine, rate, ratio, rounds_of, table
from tests.benchmarks.harness.timing import ratios, rotated, spread
from tests.benchmarks.harness.turns import Subject, ask_in_turns, print_cases
from tests.benchmarks.ingest import BATCH, CONNECTIONS, batches, send
from tests.support.postgres_server import PostgresServer

# Shared buffers and the log between two checkpoints as a small dedicated server has them;
# everything else is the server's default.
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "4GB", "checkpoint_timeout": "15min"}
NEWEST = 200  # events of a page
READ, ORDERED, RANDOM = f"newest {NEWEST}", "ids by time", "random ids"
_READS, _APPENDS = 200, 4  # of each kind in a round
# A process that has read this many histories knows the names of almost all items.
_WARM_READS = 2_000
_SIZES = """\
SELECT coalesce(whole.relname, part.relname)::text, sum(pg_table_size(part.oid))::bigint,
       sum(pg_indexes_size(part.oid))::bigint
  FROM pg_class AS part JOIN pg_namespace ON pg_namespace.oid = part.relnamespace
  LEFT JOIN pg_inherits ON inhrelid = part.oid LEFT JOIN pg_class AS whole ON whole.oid = inhparent
 WHERE nspname = 'heed' AND part.relkind = 'r' GROUP BY 1"""
_WAL = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
PARTS = ("growth", "score", "replicas", "appends")  # appends are the last: they change the data


def postgres(
    events: Annotated[
        str, typer.Option(help="Of each database that grows, separated by commas.")
    ] = "100000,10000000",
    items: Annotated[int, typer.Option(min=100, help="Of the catalogue in each of them.")] = 20_000,
    mean: Annotated[int, typer.Option(min=2, help="Events of a user there, on average.")] = 100,
    parts: Annotated[str, typer.Option(help=f"Of {','.join(PARTS)}.")] = ",".join(PARTS),
    data: Data = None,
    rounds: Rounds = 9,
    requests: Requests = 100,
) -> None:
    """Measure the PostgreSQL store: reads, sizes and appends by the number of events.

    And over HTTP beside SQLite: a score, durable appends, and two replicas beside one. Ten million
    events take half an hour and 8 GB of disk in the folder of temporary files.
    """
    chosen = parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise Invalid("", f"--parts: {min(unknown)!r} is none of {', '.join(PARTS)}")
    cores = Cores.choose()
    print_machine(cores)
    with pinned(cores.server):
        server = PostgresServer(SETTINGS, fsync=True)
    with server, tempfile.TemporaryDirectory(prefix="heed-bench-") as name:
        folder = Path(name)
        if "growth" in chosen:
            grown = [
                _load(server, folder / f"{count}", int(count), items, mean)
                for count in events.split(",")
            ]
            asyncio.run(_grow(grown, rounds))
            _print_growth(grown)
        if {*chosen} - {"growth"}:
            with prepare_data(data) as ground:
                url = _share(ground, server)
                if "score" in chosen:
                    _scores(ground, url, folder, rounds, requests)
                if "replicas" in chosen:
                    _replicas(ground, url, folder, rounds, requests)
                if "appends" in chosen:
                    _appends(ground, url, folder, rounds)


# ------------------------------------------------------------------------------ growth


@dataclass(slots=True)
class Calls:
    """Latencies of one kind of call, and what all of them cost."""

    latencies: list[float] = field(default_factory=list)
    client: float = 0.0  # seconds of the processor
    server: float = 0.0
    wal: int = 0  # bytes

    def percentile(self, percent: float) -> str:
        """Milliseconds."""
        return ms(float(np.percentile(self.latencies, percent)))


@dataclass(slots=True)
class Grown:
    """A database of many events, and what was measured of it."""

    url: str
    items: int
    lengths: NDArray[np.int64]  # events of each user
    process: Server  # of PostgreSQL
    tables: dict[str, tuple[int, int]]  # bytes of each, and of its indexes
    calls: dict[str, Calls] = field(
        default_factory=lambda: {name: Calls() for name in (READ, RANDOM, ORDERED)}
    )
    now: int = FIRST_TIME + YEAR  # of the next event

    @property
    def events(self) -> int:
        """Events that were loaded."""
        return int(self.lengths.sum())

    def bytes_each(self, count: int, *tables: str) -> str:
        """Bytes of tables and of their indexes over a count."""
        own, indexes = (sum(self.tables[name][part] for name in tables) / count for part in (0, 1))
        return f"{own:.0f} + {indexes:.0f}"


def _load(server: PostgresServer, folder: Path, events: int, items: int, mean: int) -> Grown:
    """Copy generated events into a new database, and leave it vacuumed and written to disk."""
    lengths = user_lengths(events, max(1, events // mean))
    with OUT.status(f"loading {events:,} events"):
        generate(folder, items=items, lengths=lengths, ids=True)
        url = server.create_database()
        _heed("copy", "--from", folder, "--to", url)
        shutil.rmtree(folder)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM (ANALYZE)")
        connection.execute("CHECKPOINT")
        tables = {name: (own, indexes) for name, own, indexes in connection.execute(_SIZES)}
        process = _postmaster(connection)
    return Grown(url, items, np.array(lengths), process, tables)


async def _grow(databases: Sequence[Grown], rounds: int) -> None:
    """Read from and append to all databases in turns."""
    rng, ids, ordered = np.random.default_rng(1), random.Random(1), EventIds()
    stores = {id(each): PostgresStore(each.url, patience=60) for each in databases}
    try:
        for turn in rounds_of(rounds, "reads", first=-1):
            for each in rotated(databases, turn):
                able = np.flatnonzero(each.lengths >= NEWEST)
                users = rng.choice(able if len(able) else len(each.lengths), _READS)
                page = stores[id(each)].page
                reads = [partial(page, f"user-{user}", limit=NEWEST) for user in users.tolist()]
                if turn < 0:
                    reads *= _WARM_READS // _READS
                await _time(each, each.calls[READ] if turn >= 0 else Calls(), reads)
        for each in databases:
            with psycopg.connect(each.url, autocommit=True) as connection:
                connection.execute("CHECKPOINT")
        for turn in rounds_of(rounds, "appends", first=-1):
            for each in rotated(databases, turn):
                append = stores[id(each)].append
                for kind in (RANDOM, ORDERED):
                    made = []
                    for _ in range(_APPENDS):
                        names = (
                            list(ordered.take(BATCH, each.now))
                            if kind == ORDERED
                            else [str(uuid.UUID(int=ids.getrandbits(128))) for _ in range(BATCH)]
                        )
                        made.append(partial(append, _batch(each, rng, names)))
                    await _time(each, each.calls[kind] if turn >= 0 else Calls(), made)
    finally:
        for store in stores.values():
            await store.close()


async def _time(
    database: Grown, found: Calls, calls: Sequence[Callable[[], Awaitable[object]]]
) -> None:
    with psycopg.connect(database.url, autocommit=True) as connection:
        log, worked = _wal(connection), database.process.cpu_seconds()
        used = time.process_time()
        for call in calls:
            started = time.perf_counter()
            await call()
            found.latencies.append(time.perf_counter() - started)
        found.client += time.process_time() - used
        found.server += database.process.cpu_seconds() - worked
        found.wal += _wal(connection) - log


def _batch(database: Grown, rng: np.random.Generator, ids: Sequence[str]) -> list[Event]:
    """Return new events of users who are drawn as often as they were active before."""
    ends = np.cumsum(database.lengths)
    users = np.searchsorted(ends, rng.integers(0, ends[-1], len(ids)), side="right")
    rows = (database.items * rng.random(len(ids)) ** 3).astype(np.int64)
    database.now += 1_000_000
    columns = zip(users.tolist(), rows.tolist(), ids, strict=True)
    return [
        Event(f"user-{user}", f"item-{row}", id_, "view", 1.0, database.now + place)
        for place, (user, row, id_) in enumerate(columns)
    ]


def _print_growth(databases: Sequence[Grown]) -> None:
    def costs(each: Grown, kind: str) -> tuple[str, str]:
        calls = each.calls[kind]
        count = BATCH * len(calls.latencies)
        return (
            f"{1e6 * calls.client / count:.0f} + {1e6 * calls.server / count:.0f}",
            f"{calls.wal / count:,.0f}",
        )

    table(
        "By the number of events: bytes of tables + indexes, µs of the processor of client + "
        "server, and bytes of the write-ahead log, of an event",
        ("events", "users", "an event", "a user", "an item", f"{READ}: p50 ms", "p99",
         f"{RANDOM}: µs", "log", f"{ORDERED}: µs", "log"),
        (
            (
                f"{each.events:,}",
                f"{len(each.lengths):,}",
                each.bytes_each(each.events, "events", "event_ids"),
                each.bytes_each(len(each.lengths), "users"),
                each.bytes_each(each.items, "items"),
                each.calls[READ].percentile(50),
                each.calls[READ].percentile(99),
                *costs(each, RANDOM),
                *costs(each, ORDERED),
            )
            for each in databases
        ),
        caption=f"Appends are of {BATCH:,} events, right after a checkpoint, when the first change "
        "of a page writes all of it to the log. Ids that were loaded are random UUIDs.",
    )  # fmt: skip


# ------------------------------------------------------------------------------ over HTTP


def _share(ground: BenchmarkData, server: PostgresServer) -> str:
    """Copy the store and the model of a data directory into a new database; return its URL."""
    url = server.create_database()
    with OUT.status("copying the data"):
        _heed("copy", "--from", ground.data, "--to", url)
        version = Registry(ground.data / MODELS_FOLDER).current()
        if version is not None:
            _heed("models", "activate", version, "--data", ground.data, store=url)
    return url


def _scores(ground: BenchmarkData, url: str, folder: Path, rounds: int, requests: int) -> None:
    """One score over PostgreSQL beside the same over SQLite."""
    cores = Cores.choose()
    asked = {q.name: q.requests() for q in questions(ground, [200]) if q.ask == "score"}
    with (
        heed(ground.data, core=cores.server) as ours,
        heed(folder / "score", core=cores.server, store=url) as theirs,
        _database(url) as process,
        pinned(cores.client),
    ):
        subjects = [
            Subject("SQLite", [ours], asked),
            Subject("PostgreSQL", [theirs], asked, [process]),
        ]
        cases = ask_in_turns(subjects, connections=[1], rounds=rounds, requests=requests)
    print_cases("A score over PostgreSQL beside the same over SQLite", cases)


def _replicas(ground: BenchmarkData, url: str, folder: Path, rounds: int, requests: int) -> None:
    """Questions a second of two replicas over one database beside those of one.

    A replica is one process on a core of its own. The database and the client take from both.
    """
    allowed = sorted(os.sched_getaffinity(0))
    asked = {each.name: each.requests() for each in questions(ground, [200])}
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(
                heed(folder / f"replica-{n}", core=allowed[n % len(allowed)], store=url)
            )
            for n in range(2)
        ]
        process = stack.enter_context(_database(url))
        subjects = [
            Subject("one replica", replicas[:1], asked, [process]),
            Subject("two replicas", replicas, asked, [process]),
        ]
        cases = ask_in_turns(subjects, connections=[16], rounds=rounds, requests=requests)
    print_cases("Replicas over one database", cases)


def _appends(ground: BenchmarkData, url: str, folder: Path, rounds: int) -> None:
    """Durable events a second over PostgreSQL beside SQLite; all share two cores."""
    both = frozenset(sorted(os.sched_getaffinity(0))[:2])
    size = 10  # batches of a round
    made = batches(ground.item_ids, (1 + rounds) * size)
    walls: dict[str, list[float]] = {"SQLite": [], "PostgreSQL": []}
    with (
        heed(ground.data, core=both) as ours,
        heed(folder / "appends", core=both, store=url) as theirs,
        pinned(both),
    ):
        for turn in rounds_of(rounds, "appends over HTTP", first=-1):
            part = made[(turn + 1) * size :][:size]
            for name, server in rotated([("SQLite", ours), ("PostgreSQL", theirs)], turn):
                seconds = send(server, part)
                if turn >= 0:
                    walls[name].append(seconds / (BATCH * len(part)))
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM heed.events").fetchone()
    expected = ground.events + BATCH * len(made)
    if row is None or row[0] != expected:
        raise Unavailable(f"PostgreSQL has {row} events of {expected:,} acknowledged ones")
    table(
        f"Durable events a second over HTTP, {BATCH:,} a request, {CONNECTIONS} connections",
        ("store", "a second", "time, times SQLite's"),
        (
            (name, rate(spread([1 / s for s in own])), ratio(ratios(own, walls["SQLite"])))
            for name, own in walls.items()
        ),
        caption="Client, service and database share two cores.",
    )


@contextmanager
def _database(url: str) -> Iterator[Server]:
    """The processes of the server of a database."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield _postmaster(connection)


def _postmaster(connection: psycopg.Connection) -> Server:
    """Return the process that all others of a server are children of."""
    fields = Path(f"/proc/{connection.info.backend_pid}/stat").read_text()
    return Server(int(fields.rpartition(")")[2].split()[1]))


def _wal(connection: psycopg.Connection) -> int:
    """Return the bytes that the server has written to its log."""
    row = connection.execute(_WAL).fetchone()
    return 0 if row is None else int(row[0])


def _heed(*arguments: object, store: str = "") -> None:
    """Run a command of Heed. Raises Unavailable with what it said when it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({"HEED_STORE": store} if store else {})
    done = subprocess.run(
        [sys.executable, "-m", "service.cli", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Unavailable(f"heed {arguments[0]}: {done.stderr.strip()[-500:]}")
