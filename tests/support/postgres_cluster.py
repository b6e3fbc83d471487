"""A PostgreSQL primary and its standbys, which take over when they are told to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import psycopg

from tests.support.postgres_programs import SUPERUSER, multi_host_url
from tests.support.postgres_server import PostgresServer
from tests.support.waiting import eventually


class PostgresCluster:
    """Servers of which one is the primary and the others follow it by streaming replication.

    A commit waits until one standby, whichever is first, has it on its disk. That also holds of a
    standby that was promoted: without a standby of its own its commits wait until another joins,
    or until `require_standby(False)`. Nothing is promoted automatically.
    """

    def __init__(
        self, standbys: int = 1, settings: Mapping[str, object] | None = None, fsync: bool = False
    ) -> None:
        self.nodes: list[PostgresServer] = []
        self._names = [f"node{number}" for number in range(standbys + 1)]
        self._fsync = fsync
        try:
            # What a standby that was away for a while has missed is kept without a slot, for slots
            # stay behind when another server takes over.
            self.primary = self._node({"wal_keep_size": "256MB", **(settings or {})}, None)
            for _ in range(standbys):
                self._node(None, self.primary)
            self.require_standby(True)
            self.wait_for_standbys()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def standbys(self) -> list[PostgresServer]:
        """All servers but the primary, whatever state they are in."""
        return [node for node in self.nodes if node is not self.primary]

    def url(self, database: str = "postgres", **options: object) -> str:
        """Return a URL of all servers, by which libpq finds the one that takes writes.

        Further options are libpq's; without connect_timeout, psycopg gives a frozen server 130 s
        before it asks the next.
        """
        ports = [node.port for node in self.nodes]
        return multi_host_url(ports, database, target_session_attrs="read-write", **options)

    def promote(self, standby: PostgresServer) -> None:
        """Make a standby the primary. The old one is neither asked nor told; other standbys follow.

        Two primaries are one too many: kill or freeze the old one before.
        """
        assert standby in self.standbys
        with psycopg.connect(standby.url(), autocommit=True) as connection:
            promoted = connection.execute("SELECT pg_promote(wait => true)").fetchone()
            assert promoted == (True,), standby.log()
            connection.execute("CHECKPOINT")  # notes the new timeline, which pg_rewind compares
        self.primary = standby
        for other in self.standbys:
            if other.answers and _is_standby(other):
                self._follow(other)

    def rejoin(self, node: PostgresServer) -> None:
        """Kill a node that is not the primary, and bring it back as a standby."""
        assert node in self.standbys
        node.kill()
        node.rewind(self.primary)
        node.start()

    def require_standby(self, wanted: bool) -> None:
        """Set whether commits wait for a standby, of the primary and of whoever is promoted.

        Commits that wait go on if none does any more.
        """
        value = f"ANY 1 ({', '.join(self._names)})" if wanted else ""
        for node in self.nodes:
            if node.answers:
                node.configure("synchronous_standby_names", value)

    def wait_for_standbys(self, count: int | None = None) -> None:
        """Wait until standbys, all if `count` is None, stream and count for commits."""
        wanted = len(self.nodes) - 1 if count is None else count
        with psycopg.connect(self.primary.url(), autocommit=True) as connection:
            eventually(
                lambda: self._following(connection) >= wanted,
                lambda: "\n".join(node.log()[-2000:] for node in self.nodes),
            )

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def _node(
        self, settings: Mapping[str, object] | None, primary: PostgresServer | None
    ) -> PostgresServer:
        name = self._names[len(self.nodes)]
        node = PostgresServer(settings, name=name, fsync=self._fsync, standby_of=primary)
        self.nodes.append(node)
        return node

    def _follow(self, standby: PostgresServer) -> None:
        standby.configure(
            "primary_conninfo", f"host=127.0.0.1 port={self.primary.port} user={SUPERUSER}"
        )

    @staticmethod
    def _following(connection: psycopg.Connection[tuple[Any, ...]]) -> int:
        found = connection.execute(
            "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
            " AND sync_state IN ('sync', 'quorum')"
        ).fetchone()
        return int(found[0]) if found else 0


def _is_standby(node: PostgresServer) -> bool:
    with psycopg.connect(node.url()) as connection:
        return connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)
