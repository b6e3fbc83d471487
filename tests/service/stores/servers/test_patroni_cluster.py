"""The cluster of the drills that chooses its primary by itself, while it is written to.

Run with `HEED_TEST_PATRONI=1 pytest tests/service/stores/servers/test_patroni_cluster.py`, with
patroni and etcd on PATH; without the variable, nothing of this file is collected.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any, Self

import psycopg
import pytest

from tests.support.patroni_cluster import PatroniCluster


class Writer:
    """A thread that inserts numbers, each once and in order, and notes those acknowledged."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ends = threading.Event()
        self._acknowledged = threading.Condition()
        self.numbers: list[int] = []
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def wait_for_more(self, count: int = 20) -> None:
        """Wait until more numbers have been acknowledged than until now."""
        with self._acknowledged:
            wanted = len(self.numbers) + count
            assert self._acknowledged.wait_for(lambda: len(self.numbers) >= wanted, 120)

    def _write(self) -> None:
        number = 0
        while not self._ends.is_set():
            with (
                contextlib.suppress(psycopg.OperationalError),
                psycopg.connect(self._url, autocommit=True) as connection,
            ):
                while not self._ends.is_set():
                    number += 1
                    with _patience(connection):
                        connection.execute("INSERT INTO numbers VALUES (%s)", (number,))
                    with self._acknowledged:
                        self.numbers.append(number)
                        self._acknowledged.notify_all()


@contextlib.contextmanager
def _patience(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """End a connection to a server that is frozen, whose kernel still answers TCP's questions."""
    with socket.socket(fileno=os.dup(connection.fileno())) as other:
        timer = threading.Timer(3.0, other.shutdown, [socket.SHUT_RDWR])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


@pytest.fixture
def cluster() -> Iterator[PatroniCluster]:
    with PatroniCluster() as cluster:
        with psycopg.connect(cluster.url()) as connection:
            connection.execute("CREATE TABLE numbers (number int PRIMARY KEY)")
        yield cluster


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_lost_leader_is_replaced_without_loss(cluster: PatroniCluster, fault: str) -> None:
    """When the leader goes, the standby leads with every acknowledged number; twice in turn."""
    url = cluster.url(connect_timeout=2)
    with Writer(url) as writer:
        for _ in range(2):
            writer.wait_for_more()
            lost = cluster.wait_for_leader()
            (lost.kill if fault == "kill" else lost.freeze)()
            assert cluster.wait_for_leader(other_than=lost) is not lost
            writer.wait_for_more()
            (lost.start if fault == "kill" else lost.thaw)()
            cluster.wait_for_standbys()
    for node in cluster.nodes:
        with psycopg.connect(node.url) as connection:
            stored = {number for (number,) in connection.execute("SELECT number FROM numbers")}
        assert set(writer.numbers) <= stored
