"""The private PostgreSQL server of the tests."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.heed_process import PATIENCE, ROOT
from tests.support.postgres_server import PostgresDatabases, PostgresServer

ORPHAN = """
import time
from tests.support.postgres_server import PostgresServer
server = PostgresServer()
print(server.url(), server.folder, server.data, flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer({"work_mem": "5MB"}) as server:
        yield server


def test_databases_are_apart_and_hold_utf8(postgres: PostgresDatabases) -> None:
    """Each database that is created is empty, in UTF-8, and gone once it is dropped."""
    own = PostgresDatabases(postgres.url(), prefix="apart_")
    first, second = own.create_database("one"), own.create_database()
    with psycopg.connect(first) as connection, psycopg.connect(second) as other:
        connection.execute("CREATE TABLE words (word text)")
        connection.execute("INSERT INTO words VALUES ('größer – 東京 🙂')")
        assert connection.execute("SELECT length(word) FROM words").fetchall() == [(13,)]
        assert connection.info.dbname == "apart_one"
        assert other.execute("SELECT to_regclass('words')").fetchall() == [(None,)]
    own.drop_databases()
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(first)


def test_settings_reach_the_server(server: PostgresServer) -> None:
    """What is asked for is set; nothing but the loopback interface is listened to."""
    with psycopg.connect(server.url()) as connection:
        for name, value in {
            "work_mem": "5MB",
            "fsync": "off",
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "synchronous_commit": "on",
        }.items():
            assert connection.execute(f"SHOW {name}").fetchone() == (value,)


def test_a_killed_server_recovers_what_was_committed(server: PostgresServer) -> None:
    """A kill ends connections at once; the next start has what was committed and nothing else."""
    with psycopg.connect(server.create_database("killed"), autocommit=True) as connection:
        connection.execute("CREATE TABLE numbers (number int)")
        connection.execute("INSERT INTO numbers VALUES (1)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO numbers VALUES (2)")
        server.kill()
        assert not server.is_alive
        with pytest.raises(psycopg.OperationalError):
            connection.execute("COMMIT")
    server.start()
    with psycopg.connect(server.url("killed")) as connection:
        assert connection.execute("SELECT number FROM numbers").fetchall() == [(1,)]
    assert "not properly shut down" in server.log()


def test_a_server_that_was_stopped_starts_where_it_was(server: PostgresServer) -> None:
    """A stop in order leaves nothing to recover, and takes place of a frozen server as well."""
    server.create_database("stopped")
    server.freeze()
    server.stop()
    assert not server.is_alive
    before = len(server.log())
    server.start()
    with psycopg.connect(server.url("stopped")) as connection:
        assert connection.info.dbname == "stopped"
    assert "not properly shut down" not in server.log()[before:]


def test_a_frozen_server_answers_once_it_is_thawed(server: PostgresServer) -> None:
    """A connection to a frozen server stays open without an answer, and is answered later."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        server.freeze()
        connection.pgconn.send_query(b"SELECT 42")
        assert select.select([connection.fileno()], [], [], 0.2)[0] == []
        server.thaw()
        result = connection.pgconn.get_result()
        assert result is not None
        assert result.get_value(0, 0) == b"42"
        assert connection.pgconn.get_result() is None


def test_a_killed_server_leaves_no_shared_memory() -> None:
    """What the kernel keeps of a killed process is removed, for it would add up over many kills."""
    with PostgresServer() as server:
        postmaster = int((server.data / "postmaster.pid").read_text().splitlines()[0])
        assert len(_segments_of(postmaster)) == 1
        mapped = Path("/proc", str(postmaster), "maps").read_text()
        assert "/dev/shm/" not in mapped
        server.kill()
        assert _segments_of(postmaster) == []


def test_no_process_and_no_data_outlive_whoever_started_them() -> None:
    """If the process that started a server is killed, the server ends and its folder goes."""
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as owner:
        assert owner.stdout is not None
        url, folder, data = owner.stdout.readline().split()
        postmaster = int((Path(data) / "postmaster.pid").read_text().splitlines()[0])
        with psycopg.connect(url) as connection:
            backend = connection.info.backend_pid
            os.kill(backend, signal.SIGSTOP)  # which only SIGKILL ends
            owner.kill()
            until = time.monotonic() + PATIENCE
            while any(map(_runs, (postmaster, backend))) or Path(folder).exists():
                assert time.monotonic() < until, "something is left"
                time.sleep(0.01)
    assert _segments_of(postmaster) == []


def test_a_failure_to_start_shows_the_log() -> None:
    """What the server says of a wrong setting is in the error."""
    with pytest.raises(RuntimeError, match=r"wal_level.*sometimes"):
        PostgresServer({"wal_level": "sometimes"})


def test_a_missing_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PostgreSQL is not installed, the error says how to get it."""
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(FileNotFoundError, match="make postgres"):
        PostgresServer()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _segments_of(creator: int) -> list[str]:
    segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return [segment for segment in segments if int(segment.split()[4]) == creator]
