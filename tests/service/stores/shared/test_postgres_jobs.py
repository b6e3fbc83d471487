"""Jobs and their lease in a PostgreSQL database: one holder at a time, by the database's clock."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import psycopg
import pytest

from service.domain.errors import Conflict, Unavailable
from service.stores.namespace_directory import open_directory
from service.stores.postgres import shared_parts as jobs_module
from service.stores.postgres.shared_parts import JobRow, SharedJobs
from service.stores.postgres.store import PostgresStore
from tests.support.heed_process import PATIENCE
from tests.support.postgres_server import PostgresServer

T = TypeVar("T")


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def machines(url: str, namespace: str) -> Iterator[list[SharedJobs]]:
    """The jobs of the namespace, as two machines see them."""
    stores = [PostgresStore(url, namespace=namespace) for _ in range(2)]
    yield [store.shared.jobs for store in stores]
    for store in stores:
        asyncio.run(store.close())


def until(found: Callable[[], T | None]) -> T:
    """Return what a call finds at last."""
    end = time.monotonic() + PATIENCE
    while (value := found()) is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def test_jobs_are_seen_by_all_machines(machines: list[SharedJobs]) -> None:
    """Jobs are listed by all machines, newest first, until they are older than those kept."""
    first, second = machines
    for number in range(5):
        assert machines[number % 2].add(f"job-{number}", b"new", keep=3)
    assert not second.add("job-4", b"another", keep=3)
    assert second.latest(2) == [JobRow("job-4", b"new"), JobRow("job-3", b"new")]
    assert [row.job_id for row in first.latest(9)] == ["job-4", "job-3", "job-2"]
    first.write("job-3", b"runs", has_ended=False)
    assert second.read("job-3") == JobRow("job-3", b"runs")
    assert second.read("job-0") is None


def test_a_job_that_has_ended_stays_as_it_is(machines: list[SharedJobs]) -> None:
    """The first record of a job's end is the last one, whoever writes it."""
    first, second = machines
    for name in ("a", "b"):
        first.add(name, b"new", keep=9)
    second.write("a", b"interrupted", has_ended=True)
    first.write("a", b"runs", has_ended=False)
    first.write("a", b"done", has_ended=True)
    assert first.read("a") == JobRow("a", b"interrupted")
    assert second.unfinished() == [JobRow("b", b"new")]


def test_one_machine_at_a_time_has_the_lease(machines: list[SharedJobs]) -> None:
    """Of many that try, one takes the lease; the next one does once it is released."""
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda each: each.try_lease(), machines * 8))
    (lease,) = [each for each in taken if each is not None]
    assert lease.renew("a") == "held"
    assert machines[1].try_lease() is None
    lease.release()
    assert lease.renew("a") == "lost"
    assert machines[1].try_lease() is not None


def test_a_cancellation_is_told_with_the_renewal(machines: list[SharedJobs]) -> None:
    """The holder of the lease learns of a cancellation of its own job by any machine."""
    first, second = machines
    for name in ("a", "b"):
        first.add(name, b"", keep=9)
    lease = first.try_lease()
    assert lease is not None
    second.request_cancellation("a")
    second.request_cancellation("missing")
    assert (lease.renew("a"), lease.renew("b")) == ("cancelled", "held")


def test_a_lease_that_is_not_renewed_runs_out(
    machines: list[SharedJobs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine takes the lease over in time, and its first holder is told so.

    As long as nobody has, the first holder keeps it by a renewal.
    """
    first, second = machines
    monkeypatch.setattr(jobs_module, "LEASE_SECONDS", 0.5)
    lease = first.try_lease()
    assert lease is not None
    time.sleep(0.7)
    assert lease.renew("a") == "held"
    other = until(second.try_lease)
    assert (lease.renew("a"), other.renew("a")) == ("lost", "held")
    lease.release()  # of which the other one's is not
    assert other.renew("a") == "held"


def test_no_lease_runs_out_while_the_server_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart of the server, holders have the time of a lease to renew theirs."""
    with PostgresServer() as server:
        url = server.create_database()
        stores = [PostgresStore(url) for _ in range(2)]
        first, second = (store.shared.jobs for store in stores)
        monkeypatch.setattr(jobs_module, "LEASE_SECONDS", 0.1)
        lease = first.try_lease()
        assert lease is not None
        server.stop()
        for call in (lambda: lease.renew("a"), second.try_lease, lambda: second.latest(1)):
            with pytest.raises(Unavailable):
                call()
        lease.release()  # which cannot be told to anyone
        monkeypatch.setattr(jobs_module, "LEASE_SECONDS", 600.0)
        server.start()
        assert second.try_lease() is None
        monkeypatch.setattr(jobs_module, "LEASE_SECONDS", 0.1)
        assert until(second.try_lease) is not None
        assert lease.renew("a") == "lost"
        for store in stores:
            asyncio.run(store.close())


def test_a_namespace_in_which_a_training_runs_is_not_removed(
    url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any machine refuses to remove a namespace while another one trains in it.

    Its removal takes the jobs, the files and the lease with it.
    """
    directory = open_directory(tmp_path_factory.mktemp("machine"), url)
    directory.create("busy")
    store = PostgresStore(url, namespace="busy")
    store.shared.jobs.add("a", b"", keep=9)
    store.shared.files("model").put("v1", b"", [("x", b"1")])
    store.shared.files("model").activate("v1")
    lease = store.shared.jobs.try_lease()
    assert lease is not None
    with pytest.raises(Conflict, match="busy"):
        directory.remove("busy")
    lease.release()
    store.shared.jobs.try_lease()
    with psycopg.connect(url) as connection:  # as if its holder had died long ago
        connection.execute("UPDATE heed.job_leases SET expires = '-infinity'")
    directory.remove("busy")
    directory.create("busy")
    again = PostgresStore(url, namespace="busy")
    assert again.shared.jobs.latest(9) == []
    assert again.shared.files("model").sets() == []
    with psycopg.connect(url) as connection:
        for table in ("file_sets", "file_chunks", "active_sets", "jobs", "job_leases"):
            rows = connection.execute(
                f"SELECT FROM heed.{table} WHERE namespace_no NOT IN"
                " (SELECT namespace_no FROM heed.namespaces)".encode()
            )
            assert rows.fetchall() == [], table
    for each in (store, again):
        asyncio.run(each.close())
    directory.close()
