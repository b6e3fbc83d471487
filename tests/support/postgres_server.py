"""A PostgreSQL server of the tests' own, on a free port of the loopback interface."""

from __future__ import annotations

import ctypes
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from tests.support.process_tree import ProcessTree

PATIENCE = 60.0  # seconds until a server that neither starts nor ends is given up
SUPERUSER = "postgres"
_IPC_RMID = 0  # of shmctl(2)


class PostgresDatabases:
    """A running server in which tests create databases, which `drop_databases` takes away.

    Args:
        server: its URL; the database that it names, postgres if none, is connected to, and left
            as it is.
        prefix: with which every database that is created starts.
    """

    def __init__(self, server: str, prefix: str = "") -> None:
        self._server, self._prefix = urlsplit(server), prefix
        self._created: list[str] = []

    def url(self, database: str = "") -> str:
        """Return the URL of a database, of the one that came with the server if none is named."""
        path = f"/{database}" if database else self._server.path
        return self._server._replace(path=path).geturl()

    def create_database(self, name: str = "") -> str:
        """Create an empty database, of a name that no other has if none is given.

        Returns:
            str: its URL.
        """
        database = self._prefix + (name or f"heed_{uuid.uuid4().hex[:12]}")
        self.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(database)))
        self._created.append(database)
        return self.url(database)

    def drop_databases(self) -> None:
        """Drop every database that was created here, whoever is connected to it."""
        while self._created:
            name = sql.Identifier(self._created.pop())
            self.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))

    def execute(self, statement: sql.Composed) -> None:
        """Run one statement, as the user that the URL names and outside transactions."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(statement)


class PostgresServer(PostgresDatabases):
    """A private server that runs from its construction to `close`, with its data in a folder.

    It listens to 127.0.0.1 alone, without a socket file, and trusts whoever connects. Its
    processes end when this process does, however that ends.

    Args:
        settings: as in postgresql.conf, besides those of this class.
        fsync: wait for the disk, as a server does that is to survive a loss of power.
        initdb: options of initdb besides those of this class.

    Raises:
        FileNotFoundError: no PostgreSQL is installed.
        RuntimeError: it does not start; the message holds its log.
    """

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        fsync: bool = False,
        initdb: Sequence[str] = ("--no-locale",),
    ) -> None:
        self.port = free_port()
        super().__init__(f"postgresql://{SUPERUSER}@127.0.0.1:{self.port}/postgres")
        self.folder = owned_folder()
        self.data = self.folder / "data"
        self._log = self.folder / "server.log"
        self._settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "on" if fsync else "off",
            **(settings or {}),
        }
        self._tree: ProcessTree | None = None
        try:
            self._make_data(initdb)
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether a process of the server runs, be it frozen."""
        return self._tree is not None and self._tree.is_alive

    def start(self) -> None:
        """Start a server that was stopped or killed, and wait until it takes connections."""
        assert not self.is_alive, "it runs"
        command = [program("postgres"), "-D", str(self.data)]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        self._tree = ProcessTree(command, self._log, self.folder, server_user(), _ENVIRONMENT)
        until = time.monotonic() + PATIENCE
        while not self._is_ready():
            if not self.is_alive or time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL did not start: {self.log()}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Shut the server down in order: it ends its connections and writes a checkpoint."""
        if self._tree is not None and self._tree.is_alive:
            self._tree.thaw()
            self._tree.send(signal.SIGINT)
            self._tree.wait(PATIENCE)

    def kill(self) -> None:
        """Kill every process of the server at once, as a loss of power does."""
        if self._tree is not None:
            self._tree.kill()

    def freeze(self) -> None:
        """Stop every process where it stands: connections stay open and nothing answers."""
        assert self._tree is not None
        self._tree.freeze()

    def thaw(self) -> None:
        """Let a frozen server go on."""
        assert self._tree is not None
        self._tree.thaw()

    def close(self) -> None:
        """Kill what runs, and remove the data."""
        self.kill()
        _remove_shared_memory(self.data)
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """Return what the server has logged since it was made."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def _make_data(self, options: Sequence[str]) -> None:
        run_as_server(
            [
                program("initdb"),
                *("--pgdata", str(self.data), "--username", SUPERUSER, "--encoding", "UTF8"),
                *("--auth", "trust", "--no-sync", "--no-instructions", *options),
            ],
            self.folder,
        )

    def _is_ready(self) -> bool:
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            # A killed server has left its file there, which says that it is ready.
            return (
                self._tree is not None and int(lines[0]) == self._tree.pid and "ready" in lines[7]
            )
        except (FileNotFoundError, IndexError, ValueError):
            return False


def program(name: str) -> str:
    """Return the path of a program of PostgreSQL's, of the newest version where Debian has many.

    Raises:
        FileNotFoundError: there is none; the message says what to install.
    """
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    newest = sorted(versions, key=lambda each: [int(n) for n in each.parts[-2].split(".")])[::-1]
    places = [os.environ.get("PATH", ""), *map(str, newest)]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise FileNotFoundError(
            f"{name} is neither on PATH nor in /usr/lib/postgresql/*/bin: run `make postgres`, "
            "install PostgreSQL's server (Debian's package postgresql), or name a server that "
            "runs in HEED_TEST_POSTGRES=postgresql://…"
        )
    return found


def server_user() -> str | None:
    """Name the user that servers run as: PostgreSQL refuses root; None is whoever runs this."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return SUPERUSER if SUPERUSER in names else "nobody"


def owned_folder() -> Path:
    """Make a temporary folder that belongs to `server_user`, to whom pytest's own are closed."""
    folder = Path(tempfile.mkdtemp(prefix="heed-postgres-"))
    user = server_user()
    if user is not None:
        shutil.chown(folder, user)
    return folder


def run_as_server(command: Sequence[str], folder: Path) -> None:
    """Run a program of PostgreSQL's as `server_user` until it ends.

    Raises:
        RuntimeError: it failed; the message is its output.
    """
    user = server_user()
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=_ENVIRONMENT,
        user=user,
        group=None if user is None else pwd.getpwnam(user).pw_gid,
        extra_groups=None if user is None else [],
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ended.stdout}")


def free_port() -> int:
    """Find a port of the loopback interface that a server can take, and take again later.

    Ports from 32768 on may be given to connections while the server is down.
    """
    while True:
        port = random.randrange(15_000, 32_768)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _remove_shared_memory(data: Path) -> None:
    # A killed server leaves a segment, which its next start would have removed.
    try:
        _, identifier = (data / "postmaster.pid").read_text().splitlines()[6].split()
    except (FileNotFoundError, IndexError):
        return
    ctypes.CDLL(None).shmctl(int(identifier), _IPC_RMID, None)


# Without variables like PGDATA and PGPORT of whoever runs the tests.
_ENVIRONMENT = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
