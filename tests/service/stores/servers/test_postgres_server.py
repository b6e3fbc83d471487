"""The private PostgreSQL server of the tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.support.heed_process import ROOT
from tests.support.postgres_server import PostgresServer
from tests.support.waiting import eventually

ORPHAN = """
import time
from tests.support.postgres_server import PostgresServer
server = PostgresServer()
print(server.url(), server.folder, server.data, flush=True)
time.sleep(1000)
"""


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
            eventually(
                lambda: not (any(map(_runs, (postmaster, backend))) or Path(folder).exists())
            )
    assert _segments_of(postmaster) == []


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
