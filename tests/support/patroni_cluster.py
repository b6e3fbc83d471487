"""A PostgreSQL cluster that chooses its own primary: nodes run by Patroni, over one etcd."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
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
from tests.support.waiting import eventually

TTL = 10  # seconds for which a leader that does not answer stays the leader
LOOP_WAIT = 1  # seconds between two looks of a node at the cluster
RETRY_TIMEOUT = 3  # seconds until etcd or PostgreSQL counts as down
_REST_TIMEOUT = 2.0  # seconds until Patroni's own API is taken for silent


class PatroniNode(TreeInFolder):
    """A machine of the cluster: Patroni, and the PostgreSQL server that it runs."""

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

    """

    def __init__(self, fsync: bool = False) -> None:
        self.nodes: list[PatroniNode] = []
        self._etcd_folder = owned_folder()
        self._etcd: ProcessTree | None = None
        try:
            configuration = self._configuration(self._start_etcd())
            for number in range(2):
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
        """Wait until a node leads, but for one that was lost, and return it."""

        def found() -> PatroniNode | None:
            leader = self.leader()
            return None if leader is other_than else leader

        leader = eventually(found, self._logs)
        assert leader is not None
        return leader

    def wait_for_standbys(self, count: int | None = None) -> None:
        """Wait until standbys, all but the leader if `count` is None, follow; one synchronously."""
        wanted = len(self.nodes) - 1 if count is None else count

        def follow() -> bool:
            leader = self.leader()
            members = [] if leader is None else leader.members()
            following = [m for m in members if m["role"] != "leader" and m["state"] in _FOLLOWING]
            synchronous = any(member["role"] == "sync_standby" for member in following)
            return len(following) >= wanted and (synchronous or not wanted)

        eventually(follow, self._logs)

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
        log = self._etcd_folder / "etcd.log"

        def answers() -> bool:
            assert self._etcd is not None
            assert self._etcd.is_alive, log.read_text(errors="replace")
            with suppress(httpx.TransportError):
                answer = httpx.get(f"http://{client}/health", timeout=_REST_TIMEOUT)
                return bool(answer.json().get("health") == "true")
            return False

        eventually(answers, lambda: log.read_text(errors="replace"))
        return client

    @staticmethod
    def _configuration(etcd: str) -> dict[str, Any]:
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
                    "postgresql": {
                        "use_pg_rewind": True,
                        "parameters": {"wal_keep_size": "256MB"},
                    },
                },
                "initdb": [{"encoding": "UTF8"}, "no-locale", "data-checksums", "no-sync"],
            },
        }

    def _logs(self) -> str:
        return "\n".join(f"{node.name}: {node.log()[-4000:]}" for node in self.nodes)


_FOLLOWING = ("running", "streaming")  # words of older and of newer versions of Patroni


def patroni_program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(
            f"{name} is not on PATH: install Patroni and etcd (Debian: apt-get install patroni "
            "etcd-server, whose daemon etcd is not needed: systemctl disable --now etcd)"
        )
    return found
