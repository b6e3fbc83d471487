"""A PostgreSQL cluster that chooses its own primary: nodes run by Patroni, over one etcd."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import yaml  # type: ignore[import-untyped]

from tests.support.postgres_programs import (
    ENVIRONMENT,
    SUPERUSER,
    free_port,
    multi_host_url,
    owned_folder,
    program,
    server_user,
)
from tests.support.process_tree import ProcessTree, TreeInFolder

PATIENCE = 120.0  # seconds until a cluster that has no leader is given up
TTL = 10  # seconds for which a leader that does not answer stays the leader
LOOP_WAIT = 1  # seconds between two looks of a node at the cluster
RETRY_TIMEOUT = 3  # seconds until etcd or PostgreSQL counts as down
_REST_TIMEOUT = 2.0  # seconds until Patroni's own API is taken for silent


class PatroniNode(TreeInFolder):
    """A machine of the cluster: Patroni and the PostgreSQL server that it runs.

    Attributes:
        name: that the cluster knows it by.
        port: of 127.0.0.1, where its server listens.
        url: of its server, which may be a standby.
    """

    def __init__(self, name: str, configuration: Mapping[str, Any], fsync: bool) -> None:
        self.name = name
        self.port, self._rest_port = free_port(), free_port()
        self.url = multi_host_url([self.port], "postgres")
        self.folder = owned_folder()
        self._log = self.folder / "patroni.log"
        self._file = self.folder / "patroni.yml"
        self._file.write_text(yaml.safe_dump({**configuration, **self._own(fsync)}))
        self._file.chmod(0o644)

    def start(self) -> None:
        """Start Patroni, which starts PostgreSQL once it has found its role."""
        assert not self.is_alive, "it runs"
        self._tree = ProcessTree(
            [patroni_program("patroni"), str(self._file)],
            self._log,
            self.folder,
            server_user(),
            {**ENVIRONMENT, "HOME": str(self.folder)},
        )

    def members(self) -> list[dict[str, Any]]:
        """Return the cluster's members as this node sees them, none if it does not answer."""
        answer = self._ask("/cluster")
        members: list[dict[str, Any]] = [] if answer is None else answer.json()["members"]
        return members

    def is_leader(self) -> bool:
        """True if the node says that it is the primary and holds the leader's lock."""
        answer = self._ask("/primary")
        return answer is not None and answer.status_code == 200

    def _ask(self, path: str) -> httpx.Response | None:
        if not self.answers:
            return None
        try:
            return httpx.get(f"http://127.0.0.1:{self._rest_port}{path}", timeout=_REST_TIMEOUT)
        except httpx.TransportError:
            return None

    def _own(self, fsync: bool) -> dict[str, Any]:
        postgres, rest = f"127.0.0.1:{self.port}", f"127.0.0.1:{self._rest_port}"
        return {
            "name": self.name,
            "restapi": {"listen": rest, "connect_address": rest},
            "postgresql": {
                "listen": postgres,
                "connect_address": postgres,
                "data_dir": str(self.folder / "data"),
                "bin_dir": str(Path(program("pg_ctl")).resolve().parent),
                "pgpass": str(self.folder / "pgpass"),
                "authentication": {
                    "superuser": {"username": SUPERUSER},
                    "replication": {"username": SUPERUSER},
                    "rewind": {"username": SUPERUSER},
                },
                "parameters": {
                    "unix_socket_directories": "",
                    "dynamic_shared_memory_type": "mmap",  # files, removed with the folder
                    "fsync": "on" if fsync else "off",
                },
                "pg_hba": [
                    "host all all 127.0.0.1/32 trust",
                    "host replication all 127.0.0.1/32 trust",
                ],
            },
        }


class PatroniCluster:
    """Nodes of which Patroni makes one the primary, and another when that one is lost.

    A commit waits for a standby while there is one (`synchronous_mode`). A lost leader's lock ends
    after `TTL` seconds; a standby that has all commits then takes over, and a former leader that
    comes back follows it. There is one etcd, which no fault of a node touches.

    Args:
        nodes: how many.
        settings: of PostgreSQL, on all nodes.
        fsync: whether PostgreSQL waits for the disk.
        strict: with no standby, let commits wait for one rather than go on alone.

    Raises:
        FileNotFoundError: Patroni, etcd or PostgreSQL is missing; the message says what to do.
    """

    def __init__(
        self,
        nodes: int = 2,
        settings: Mapping[str, object] | None = None,
        fsync: bool = False,
        strict: bool = False,
    ) -> None:
        self.nodes: list[PatroniNode] = []
        self._etcd_folder = owned_folder()
        self._etcd: ProcessTree | None = None
        try:
            configuration = self._configuration(self._start_etcd(), settings or {}, strict)
            for number in range(nodes):
                self.nodes.append(PatroniNode(f"node{number}", configuration, fsync))
            for node in self.nodes:
                node.start()
            self.wait_for_leader()
            self.wait_for_standbys()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def url(self, database: str = "postgres", **options: object) -> str:
        """Return a URL of all servers, by which libpq finds the one that takes writes.

        Further options are libpq's; without connect_timeout, psycopg gives a frozen server 130 s
        before it asks the next.
        """
        ports = [node.port for node in self.nodes]
        return multi_host_url(ports, database, target_session_attrs="read-write", **options)

    def leader(self) -> PatroniNode | None:
        """Return the node that leads, None while there is none."""
        return next((node for node in self.nodes if node.is_leader()), None)

    def wait_for_leader(self, other_than: PatroniNode | None = None) -> PatroniNode:
        """Wait until a node leads, and return it.

        Args:
            other_than: one that has been lost, and whose last words do not count.
        """
        until = time.monotonic() + PATIENCE
        while True:
            leader = self.leader()
            if leader is not None and leader is not other_than:
                return leader
            assert time.monotonic() < until, self._logs()
            time.sleep(0.1)

    def wait_for_standbys(self, count: int | None = None) -> None:
        """Wait until standbys, all but the leader if `count` is None, follow; one synchronously."""
        wanted = len(self.nodes) - 1 if count is None else count
        until = time.monotonic() + PATIENCE
        while True:
            leader = self.leader()
            members = [] if leader is None else leader.members()
            following = [m for m in members if m["role"] != "leader" and m["state"] in _FOLLOWING]
            synchronous = any(member["role"] == "sync_standby" for member in following)
            if len(following) >= wanted and (synchronous or not wanted):
                return
            assert time.monotonic() < until, self._logs()
            time.sleep(0.1)

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        if self._etcd is not None:
            self._etcd.kill()
        shutil.rmtree(self._etcd_folder, ignore_errors=True)

    def _start_etcd(self) -> str:
        """Start etcd, and return its address once it answers."""
        client, peer = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self._etcd = ProcessTree(
            [
                patroni_program("etcd"),
                f"--data-dir={self._etcd_folder / 'data'}",
                "--enable-v2",
                f"--listen-client-urls=http://{client}",
                f"--advertise-client-urls=http://{client}",
                f"--listen-peer-urls=http://{peer}",
                f"--initial-advertise-peer-urls=http://{peer}",
                f"--initial-cluster=default=http://{peer}",
            ],
            self._etcd_folder / "etcd.log",
            self._etcd_folder,
            server_user(),
            ENVIRONMENT,
        )
        until = time.monotonic() + PATIENCE
        while True:
            try:
                answer = httpx.get(f"http://{client}/health", timeout=_REST_TIMEOUT)
                if answer.json().get("health") == "true":
                    return client
            except httpx.TransportError:
                pass
            log = (self._etcd_folder / "etcd.log").read_text(errors="replace")
            assert self._etcd.is_alive and time.monotonic() < until, log  # noqa: PT018
            time.sleep(0.02)

    @staticmethod
    def _configuration(etcd: str, settings: Mapping[str, object], strict: bool) -> dict[str, Any]:
        return {
            "scope": "heed",
            # By version 2 of etcd's interface: before 3.1, Patroni's cache for version 3 stays old
            # in a node that was frozen (patroni/patroni#2779).
            "etcd": {"hosts": etcd},
            "bootstrap": {
                "dcs": {
                    "ttl": TTL,
                    "loop_wait": LOOP_WAIT,
                    "retry_timeout": RETRY_TIMEOUT,
                    "synchronous_mode": True,
                    "synchronous_mode_strict": strict,
                    "postgresql": {
                        "use_pg_rewind": True,
                        "parameters": {"wal_keep_size": "256MB", **settings},
                    },
                },
                "initdb": [{"encoding": "UTF8"}, "no-locale", "data-checksums", "no-sync"],
            },
        }

    def _logs(self) -> str:
        return "\n".join(f"{node.name}: {node.log()[-4000:]}" for node in self.nodes)


_FOLLOWING = ("running", "streaming")  # words of older and of newer versions of Patroni


def patroni_program(name: str) -> str:
    """Return the path of patroni or etcd.

    Raises:
        FileNotFoundError: it is not on PATH; the message says what to install.
    """
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(
            f"{name} is not on PATH: install Patroni and etcd (Debian: apt-get install patroni "
            "etcd-server, whose daemon etcd is not needed: systemctl disable --now etcd)"
        )
    return found
