"""The primary and the standby of the tests, and what takes over by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psycopg
import pytest

from tests.support.heed_process import PATIENCE
from tests.support.postgres_cluster import PostgresCluster

pytestmark = pytest.mark.verify


@pytest.fixture
def cluster() -> Iterator[PostgresCluster]:
    with PostgresCluster() as cluster:
        with psycopg.connect(cluster.url()) as connection:
            connection.execute("CREATE TABLE numbers (number int)")
        yield cluster


def add(cluster: PostgresCluster, *numbers: int) -> None:
    with psycopg.connect(cluster.url()) as connection:
        for number in numbers:
            connection.execute("INSERT INTO numbers VALUES (%s)", (number,))


def numbers(cluster: PostgresCluster) -> list[int]:
    with psycopg.connect(cluster.url()) as connection:
        return [n for (n,) in connection.execute("SELECT number FROM numbers ORDER BY number")]


@pytest.mark.parametrize("rewind", [True, False])
def test_a_standby_takes_over_with_what_was_committed(
    cluster: PostgresCluster, rewind: bool
) -> None:
    """After the primary's death the standby has every commit; the old primary then follows it."""
    first, (second,) = cluster.primary, cluster.standbys
    add(cluster, 1, 2)
    first.kill()
    cluster.promote(second)
    cluster.require_standby(False)
    assert numbers(cluster) == [1, 2]
    add(cluster, 3)
    cluster.rejoin(first, rewind)
    cluster.require_standby(True)
    cluster.wait_for_standbys()
    add(cluster, 4)
    second.kill()
    cluster.promote(first)
    cluster.require_standby(False)
    assert numbers(cluster) == [1, 2, 3, 4]


def wait_for_rows(url: str, query: str) -> None:
    """Wait until a query finds a row."""
    until = time.monotonic() + PATIENCE
    with psycopg.connect(url, autocommit=True) as connection:
        while connection.execute(query.encode()).fetchone() is None:
            assert time.monotonic() < until, query
            time.sleep(0.01)


WAITS_FOR_A_STANDBY = "SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


def test_a_commit_waits_for_the_standby(cluster: PostgresCluster) -> None:
    """A commit that a frozen standby cannot confirm is not acknowledged until it can."""
    (standby,) = cluster.standbys
    with psycopg.connect(cluster.url(), autocommit=True) as connection:
        standby.freeze()
        connection.pgconn.send_query(b"INSERT INTO numbers VALUES (1)")
        wait_for_rows(cluster.url(), WAITS_FOR_A_STANDBY)
        connection.pgconn.consume_input()
        assert connection.pgconn.is_busy()
        standby.thaw()
        result = connection.pgconn.get_result()
        assert result is not None
        assert result.command_tuples == 1
        assert connection.pgconn.get_result() is None


def test_a_primary_that_comes_back_acknowledges_nothing() -> None:
    """Of two primaries only the one that a standby follows commits; the other's writes wait."""
    with PostgresCluster(standbys=2) as cluster:
        old, (new, third) = cluster.primary, cluster.standbys
        with psycopg.connect(cluster.url()) as connection:
            connection.execute("CREATE TABLE numbers (number int)")
        old.freeze()
        cluster.promote(new)
        cluster.wait_for_standbys(1)
        with psycopg.connect(new.url()) as connection:
            connection.execute("INSERT INTO numbers VALUES (2)")
        wait_for_rows(third.url(), "SELECT FROM numbers WHERE number = 2")
        old.thaw()
        with psycopg.connect(old.url(), autocommit=True) as connection:
            connection.pgconn.send_query(b"INSERT INTO numbers VALUES (3)")
            wait_for_rows(old.url(), WAITS_FOR_A_STANDBY)
            connection.pgconn.consume_input()
            assert connection.pgconn.is_busy()
            old.kill()
            connection.close()
