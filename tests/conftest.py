"""Fixtures and hooks shared by all tests."""

from __future__ import annotations

import gc
import json
import os
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from service import cli
from service.runtime.durable_files import locked
from tests.support import tiny
from tests.support.citus_databases import CitusDatabases
from tests.support.command_line import Heed, Said
from tests.support.heed_process import PATIENCE
from tests.support.postgres_server import PostgresDatabases, PostgresServer

TESTS = Path(__file__).parent
# Folders whose tests start services, browsers, databases or other programs.
OF_PROGRAMS = {
    *("acceptance", "browser", "deploy", "distributed", "faults", "known_items", "upgrades"),
}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> tiny.World:
    """The small world with two trained models. Copy it before you change it.

    Processes that share the tests share it: the first makes it, and the others wait.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    made = shared / "world.json"
    with locked(shared / "world.lock", PATIENCE):
        if not made.exists():
            world = tiny.make(shared / "world" / "data")
            made.write_text(json.dumps([world.first, world.second]))
    return tiny.World(shared / "world" / "data", *json.loads(made.read_text()))


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresDatabases]:
    """A PostgreSQL server in which tests create databases, one of each process of the tests.

    HEED_TEST_POSTGRES=postgresql://… names a server that runs, in which its user may create
    databases; they are dropped at the end. HEED_TEST_CITUS=postgresql://… names the coordinator of
    a cluster, over which Heed's tables are distributed in every database.
    """
    named, citus = (os.environ.get(f"HEED_TEST_{name}") for name in ("POSTGRES", "CITUS"))
    prefix = f"heed_test_{uuid.uuid4().hex[:8]}_"
    if not (named or citus):
        with PostgresServer() as server:
            yield server
        return
    databases = CitusDatabases(citus, prefix) if citus else PostgresDatabases(named or "", prefix)
    yield databases
    databases.drop_databases()


@pytest.fixture(scope="module")
def url(postgres: PostgresDatabases) -> str:
    """The URL of a database for all tests of a file, each of which has a namespace of its own."""
    return postgres.create_database()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def heed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Heed]:
    """The console script, as a shell would call it, on a data directory of this test's own."""
    monkeypatch.setenv("HEED_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which commands set, and which is put back
    monkeypatch.setattr(os, "setpriority", lambda *_: None)  # which could not be put back
    before = os.umask(0o077)  # which commands set
    os.umask(before)

    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["heed", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Said(int(ended.value.code or 0), out, err)

    yield run
    os.umask(before)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process more than there are cores, for many tests wait for a server or a disk."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from what collection makes, all of which stays to the end.

    These are half a million objects, over which each full collection would go again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make verify`, and refuse tests with equal ids."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in OF_PROGRAMS or "postgres" in getattr(item, "fixturenames", ()):
            item.add_marker("verify")
    items.sort(key=lambda item: item.path.name != "test_documents.py")  # the longest file
    names = Counter(item.nodeid for item in items)
    twice = [name for name, count in names.items() if count > 1]
    if twice and hasattr(config, "workerinput"):
        raise pytest.UsageError(f"run these without -n, for they have one id: {', '.join(twice)}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded by `record_property`."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")
