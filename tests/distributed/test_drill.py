"""Two replicas over a Citus cluster of this machine while its workers are killed, or hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.distributed.local_server import LocalServer
from tests.support.citus_databases import CitusDatabases
from tests.support.journaled_clients import JournaledWriters, Reader, Replicas, compare

AWAY = 5.0  # seconds that a worker is lost
DEADLINE = 2.0  # seconds of a question
MARGIN = 3.0  # seconds that an answer may come after it: clients and servers share cores
RECOVERY = 180.0  # seconds in which everything works again: prepared transactions are settled first


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_nothing_acknowledged_is_lost_with_a_worker(
    citus: CitusDatabases, tmp_path: Path, fault: str
) -> None:
    """Each worker is lost in turn: questions are answered in time, and afterwards all works.

    Writes acknowledged meanwhile are stored, and those that are sent again are stored once.
    """
    url = citus.create_database()
    workers = [LocalServer(citus.worker_url(url, group)) for group in citus.workers]
    journal = tmp_path / "journal"
    with Replicas(tmp_path, [url] * 2, deadline=DEADLINE, drain_timeout=10) as replicas:
        replicas.put_items()
        with (
            JournaledWriters(replicas, journal, fault) as writers,
            Reader(replicas, fault) as reader,
        ):
            for worker in workers:
                time.sleep(1)
                (worker.kill if fault == "kill" else worker.freeze)()
                try:
                    time.sleep(AWAY)
                finally:
                    (worker.start if fault == "kill" else worker.thaw)()
                back = time.monotonic()
                for replica in range(2):
                    writers.wait_for_ack(replica, back, RECOVERY)
                wait_for_full_answers(reader)
    books = compare(journal, url)
    assert books.balanced, books
    assert books.acknowledged > 0
    assert writers.problems == []
    assert reader.errors == []
    assert max(reader.latencies) <= DEADLINE + MARGIN


def wait_for_full_answers(reader: Reader) -> None:
    """Wait until both replicas answer, and no answer in some seconds is degraded."""
    until = time.monotonic() + RECOVERY
    while True:
        before = reader.answers.copy()
        time.sleep(2)
        new = reader.answers - before
        if all(new[replica, 200, False] and not new[replica, 200, True] for replica in range(2)):
            return
        assert time.monotonic() < until, "answers stay degraded"
