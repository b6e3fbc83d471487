"""A PostgreSQL server of the tests' own, on a free port of the loopback interface."""

from __future__ import annotations

import shutil
import signal
import time
import uuid
from collections.abc import Mapping
from typing import Self
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from tests.support.postgres_programs import (
    ENVIRONMENT,
    SUPERUSER,
    free_port,
    owned_folder,
    program,
    run_as_server,
    server_user,
)
from tests.support.process_tree import ProcessTree, TreeInFolder

PATIENCE = 60.0  # seconds until a server that neither starts nor ends is given up


class PostgresDatabases:
    """A running server in which tests create databases, which `drop_databases` takes away.

    The database that the server's URL names, postgres if none, is connected to and left as it is.
    """

    def __init__(self, server: str, prefix: str = "") -> None:
        self._server, self._prefix = urlsplit(server), prefix
        self._created: list[str] = []

    def url(self, database: str = "") -> str:
        """Return the URL of a database, of the one that came with the server if none is named."""
        path = f"/{database}" if database else self._server.path
        return self._server._replace(path=path).geturl()

    def create_database(self, name: str = "") -> str:
        """Create an empty database, of a name that no other has by default; return its URL."""
        return self._create(name, sql.SQL(""))

    def copy_database(self, url: str) -> str:
        """Return the URL of a new copy of a database that nobody is connected to."""
        return self._create(
            "", sql.SQL("TEMPLATE {}").format(sql.Identifier(urlsplit(url).path[1:]))
        )

    def drop_databases(self) -> None:
        """Drop every database that was created here, whoever is connected to it."""
        while self._created:
            name = sql.Identifier(self._created.pop())
            self.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))

    def _create(self, name: str, options: sql.Composable) -> str:
        database = self._prefix + (name or f"heed_{uuid.uuid4().hex[:12]}")
        self.execute(sql.SQL("CREATE DATABASE {} {}").format(sql.Identifier(database), options))
        self._created.append(database)
        return self.url(database)

    def execute(self, statement: sql.Composed) -> None:
        """Run one statement, as the user that the URL names and outside transactions."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(statement)


class PostgresServer(PostgresDatabases, TreeInFolder):
    """A private server that runs from its construction to `close`, with its data in a folder.

    It listens to 127.0.0.1 alone, without a socket file, and trusts whoever connects. Its
    processes end when this process does, however that ends.

    Args:
        settings: go into postgresql.conf; a standby has those of its primary.
        name: that standbys are known by to their primary.
        fsync: wait for the disk, as a server does that is to survive a loss of power.
        standby_of: a running server, of which this one becomes a standby by a base backup;
            nothing is made by initdb then.

    Raises:
        FileNotFoundError: no PostgreSQL is installed.
        RuntimeError: it does not start; the message holds its log.
    """

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        name: str = "",
        fsync: bool = False,
        standby_of: PostgresServer | None = None,
    ) -> None:
        self.port = free_port()
        super().__init__(f"postgresql://{SUPERUSER}@127.0.0.1:{self.port}/postgres")
        self.folder = owned_folder()
        self.data = self.folder / "data"
        self._log = self.folder / "server.log"
        # Not in the file, which is copied from one server to another.
        self._own_settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "dynamic_shared_memory_type": "mmap",  # files, which are removed with the folder
            "cluster_name": name,
            "fsync": "on" if fsync else "off",
        }
        try:
            if standby_of is None:
                self._make_data(settings or {})
            else:
                self.copy(standby_of)
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start a server that was stopped or killed, and wait until it takes connections."""
        assert not self.is_alive, "it runs"
        command = [program("postgres"), "-D", str(self.data)]
        for name, value in self._own_settings.items():
            command += ["-c", f"{name}={value}"]
        self._tree = ProcessTree(command, self._log, self.folder, server_user(), ENVIRONMENT)
        until = time.monotonic() + PATIENCE
        while not self._is_ready():
            if not self.is_alive or time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL did not start: {self.log()}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Shut the server down in order: it ends its connections and writes a checkpoint."""
        if self._tree is not None and self._tree.is_alive:
            self.thaw()
            self._tree.send(signal.SIGINT)
            self._tree.wait(PATIENCE)

    def configure(self, name: str, value: object) -> None:
        """Set something for now and for later starts, as ALTER SYSTEM does."""
        setting = sql.SQL("ALTER SYSTEM SET {} = {}")
        self.execute(setting.format(sql.Identifier(name), sql.Literal(str(value))))
        self.execute(sql.SQL("SELECT pg_reload_conf()").format())

    def copy(self, primary: PostgresServer) -> None:
        """Replace the data by a base backup of a running server, whose standby this will be."""
        shutil.rmtree(self.data, ignore_errors=True)
        run_as_server(
            [
                program("pg_basebackup"),
                *("--pgdata", str(self.data), "--dbname", primary.url()),
                *("--write-recovery-conf", "--checkpoint", "fast", "--no-sync"),
            ],
            self.folder,
        )

    def rewind(self, primary: PostgresServer) -> None:
        """Take back what this server alone has, so that it can be a standby of another.

        It was killed or stopped, and shares its past with `primary`, which was promoted.
        """
        run_as_server(
            [
                program("pg_rewind"),
                *("--target-pgdata", str(self.data), "--source-server", primary.url()),
                *("--write-recovery-conf", "--no-sync"),
            ],
            self.folder,
        )

    def _make_data(self, settings: Mapping[str, object]) -> None:
        run_as_server(
            [
                program("initdb"),
                *("--pgdata", str(self.data), "--username", SUPERUSER, "--encoding", "UTF8"),
                *("--auth", "trust", "--data-checksums", "--no-sync", "--no-instructions"),
                "--no-locale",
            ],
            self.folder,
        )
        with (self.data / "postgresql.conf").open("a") as file:
            for name, value in settings.items():
                quoted = str(value).replace("'", "''")
                file.write(f"{name} = '{quoted}'\n")

    def _is_ready(self) -> bool:
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            # A killed server has left its file there, which says that it is ready.
            return (
                self._tree is not None and int(lines[0]) == self._tree.pid and "ready" in lines[7]
            )
        except (FileNotFoundError, IndexError, ValueError):
            return False
