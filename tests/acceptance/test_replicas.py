"""Two services over one PostgreSQL: reads of each other's writes, and the loss of the primary."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.support.crossed_reads import read_across
from tests.support.journaled_clients import JournaledWriters, Reader, Replicas, compare
from tests.support.postgres_cluster import PostgresCluster
from tests.support.postgres_server import PostgresDatabases
from tests.support.waiting import eventually


def test_what_one_replica_acknowledged_the_other_one_reads(
    postgres: PostgresDatabases, tmp_path: Path
) -> None:
    """The next request to another replica has the event, in the history and in an answer."""
    with Replicas(tmp_path, [postgres.create_database()] * 2) as replicas:
        replicas.put_items()
        assert read_across(replicas, 60, random.Random(1)) == (60, 60, 60)


def test_a_failover_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """The primary is killed under load: questions go on, degraded, and writes at the standby."""
    journal = tmp_path / "journal"
    with PostgresCluster() as cluster:
        url = cluster.url(connect_timeout=2)
        with Replicas(tmp_path, [url] * 2) as replicas:
            replicas.put_items()
            with JournaledWriters(replicas, journal, 1) as writers, Reader(replicas, 1) as reader:
                for replica in range(2):
                    writers.wait_for_ack(replica, 0.0)
                cluster.primary.kill()
                eventually(reader.degraded)
                cluster.promote(cluster.standbys[0])
                cluster.require_standby(False)
                promoted = time.monotonic()
                for replica in range(2):
                    writers.wait_for_ack(replica, promoted)
            assert (writers.problems, reader.errors, reader.broken) == ([], [], {})
            books = compare(journal, url)
    assert books.acknowledged
    assert books.balanced, books
