"""Two API replicas over one PostgreSQL: reads after writes elsewhere, and too few connections."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack

import psycopg

from tests.faults.matrix import Setup, Verdict
from tests.support.crossed_reads import read_across
from tests.support.journaled_clients import JournaledWriters, Reader, Replicas, compare
from tests.support.postgres_server import PostgresServer
from tests.support.server import PATIENCE

CROSSED = 5_000
EXHAUSTED = 5  # times that all connections are taken
MAX_CONNECTIONS = 24
DEADLINE = 5.0  # seconds of a question: a busy machine is no failure
_HELD = 3.0  # seconds for which others have all connections


def crossed(setup: Setup) -> Verdict:
    """Write at one replica, and at once ask the other."""
    writes = setup.times(CROSSED)
    with (
        PostgresServer() as server,
        Replicas(setup.fresh("crossed"), [server.create_database()] * 2, deadline=30) as replicas,
    ):
        replicas.put_items()
        seen = read_across(replicas, writes, setup.rng("crossed"))
    return Verdict(
        seen.in_history == seen.in_answer == writes,
        f"of {writes} writes {seen.in_history} were in the history and {seen.in_answer} in a "
        "recommendation that another replica gave next",
    )


def exhausted(setup: Setup) -> Verdict:
    """Take all connections of the server away, again and again, and give them back."""
    place, times = setup.fresh("exhausted"), setup.times(EXHAUSTED)
    journal = place / "journal"
    recovered = 0
    with PostgresServer({"max_connections": MAX_CONNECTIONS}) as server:
        url = server.create_database()
        with Replicas(place, [url] * 2, deadline=DEADLINE) as replicas:
            replicas.put_items()
            with (
                JournaledWriters(replicas, journal, setup.seed) as writers,
                Reader(replicas, setup.seed) as reader,
            ):
                for _ in range(times):
                    time.sleep(1)
                    with ExitStack() as held:
                        _take_all(url, held)
                        time.sleep(_HELD)
                    freed = time.monotonic()
                    for replica in range(2):
                        writers.wait_for_ack(replica, freed)
                    recovered += _recovers(reader)
        books = compare(journal, url)
    refused = _refusals(writers.statuses)
    return Verdict(
        books.balanced and not writers.problems and not reader.errors and recovered == times,
        f"{times} times without a free connection: writes answered {dict(writers.statuses)}, "
        f"{refused} of them refused with Retry-After, {len(reader.errors)} questions failed and "
        f"{reader.degraded()} of {len(reader.latencies)} degraded; {books.lost} of "
        f"{books.acknowledged} acknowledged batches lost; {recovered} recoveries "
        f"{(writers.problems + reader.errors)[:1] or ''}",
        f"{refused} writes were refused: the connections were short",
        refused > 0,
    )


def _take_all(url: str, held: ExitStack) -> None:
    """End all other connections, and take every place until the server refuses."""
    first = held.enter_context(psycopg.connect(url, autocommit=True))
    first.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    until = time.monotonic() + _HELD
    while time.monotonic() < until:
        try:
            held.enter_context(psycopg.connect(url, autocommit=True))
        except psycopg.OperationalError:
            return


def _recovers(reader: Reader) -> bool:
    """Wait until both replicas give answers again that are not degraded."""
    before = Counter(reader.answers)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        new = reader.answers - before
        if all(new[replica, 200, False] for replica in range(2)):
            return True
        time.sleep(0.05)
    return False


def _refusals(statuses: Counter[int]) -> int:
    return statuses[429] + statuses[503]
