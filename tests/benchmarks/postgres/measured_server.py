"""The PostgreSQL server that is measured: one that is started here, or one that runs elsewhere."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tests.benchmarks.harness.processes import Cores, Server, pinned
from tests.support.postgres_server import PostgresDatabases, PostgresServer

# Shared buffers and the log between two checkpoints as a small dedicated server has them;
# everything else is the server's default.
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "4GB", "checkpoint_timeout": "15min"}
_SHOWN = (
    *("shared_buffers", "max_wal_size", "checkpoint_timeout", "fsync", "synchronous_commit"),
    *("full_page_writes", "wal_compression", "data_checksums", "synchronous_standby_names"),
)
_CATALOGUE = """\
SELECT name, setting, unit FROM pg_settings WHERE name = ANY(%s)"""


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A PostgreSQL server in which databases are created, and dropped at the end."""

    databases: PostgresDatabases
    version: str
    settings: str  # those that its speed depends on, in words
    process: Server | None  # None: it is on another machine, and its processor time unknown
    folder: Path | None  # of its files; None where it was started by somebody else

    def create_database(self) -> str:
        """Create an empty database and return its URL."""
        return self.databases.create_database()

    def cpu_seconds(self) -> float:
        """Processor time of all of its processes so far; 0 where that cannot be known."""
        return 0.0 if self.process is None else self.process.cpu_seconds() or 0.0


@contextmanager
def measured_server(url: str | None, cores: Cores) -> Iterator[MeasuredServer]:
    """Start a server of its own, or connect to the one of a URL, until the block ends.

    The own one listens to loopback alone, waits for the disk as servers do, and runs on the cores
    of servers.

    Args:
        url: of a running server, whose user may create databases; None starts one.
        cores: of servers and client.

    Raises:
        FileNotFoundError: no PostgreSQL is installed, and none is named.
        psycopg.Error: the server of the URL does not answer.
    """
    if url is not None:
        databases = PostgresDatabases(url, prefix=f"heed_bench_{uuid.uuid4().hex[:8]}_")
        try:
            yield _describe(databases, None)
        finally:
            databases.drop_databases()
        return
    with pinned(cores.server):
        server = PostgresServer(SETTINGS, fsync=True)
    with server:
        yield _describe(server, server.folder)


def checkpoint(url: str) -> None:
    """Write all changed pages to disk now, so that nobody pays for it later.

    A user who may not leaves it to the server, which does so at its own time.
    """
    with (
        psycopg.connect(url, autocommit=True) as connection,
        suppress(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute("CHECKPOINT")


def _describe(databases: PostgresDatabases, folder: Path | None) -> MeasuredServer:
    with psycopg.connect(databases.url(), autocommit=True) as connection:
        (version,) = connection.execute("SHOW server_version").fetchone() or ("",)
        rows = connection.execute(_CATALOGUE, (list(_SHOWN),)).fetchall()
        found = {name: f"{setting} {unit or ''}".strip() for name, setting, unit in rows}
        pid = connection.info.backend_pid
        process = _postmaster(pid) if _is_here(connection) else None
    settings = ", ".join(f"{name} {found[name] or 'none'}" for name in _SHOWN if name in found)
    return MeasuredServer(databases, version, settings, process, folder)


def _is_here(connection: psycopg.Connection) -> bool:
    """Whether the server runs on this machine."""
    address = connection.info.hostaddr
    return not address or address.startswith("127.") or address == "::1"


def _postmaster(backend: int) -> Server | None:
    """Return the process that all others of a server are children of; None if it is not seen."""
    try:
        fields = Path(f"/proc/{backend}/stat").read_text()
    except OSError:
        return None
    name, _, rest = fields.partition("(")[2].rpartition(")")
    return Server(int(rest.split()[1]), 0) if name.startswith("postgres") else None
