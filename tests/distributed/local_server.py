"""A running PostgreSQL server of this machine: its processes, to be killed, stopped and started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psycopg

from tests.support.process_tree import descendants

PATIENCE = 60.0  # seconds until a server that does not start is given up


class LocalServer:
    """A server that runs on this machine, as this user or with this user being root.

    Args:
        url: of any of its databases, as a superuser.

    Raises:
        ValueError: the server is elsewhere, or belongs to another user.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        with psycopg.connect(url) as connection:
            row = connection.execute(
                "SELECT split_part(pg_read_file('postmaster.pid'), E'\\n', 1)::int,"
                " current_setting('data_directory'), current_setting('port'),"
                " current_setting('unix_socket_directories')"
            ).fetchone()
        assert row is not None
        self._pid, folder, port, sockets = row
        self._folder = Path(folder)
        self._locks = [self._folder / "postmaster.pid"]
        for place in filter(None, (each.strip() for each in sockets.split(","))):
            self._locks += [Path(place, f".s.PGSQL.{port}{end}") for end in ("", ".lock")]
        process = Path("/proc", str(self._pid))
        try:
            os.kill(self._pid, 0)
            mine = process.joinpath("cwd").samefile(self._folder)
            self._command = process.joinpath("cmdline").read_bytes().split(b"\0")[:-1]
            self._command[0] = os.fsencode(process.joinpath("exe").readlink())
        except OSError:
            mine = False
        if not mine:
            raise ValueError(f"the server of {url} does not run here, as a user's who may stop it")

    def kill(self) -> None:
        """Kill every process at once, as a loss of power does, and wait until all have ended."""
        self.freeze()
        processes = self._processes()
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + PATIENCE
        while any(_runs(pid) for pid in processes):
            assert time.monotonic() < until, "it does not end"
            time.sleep(0.01)

    def freeze(self) -> None:
        """Stop every process where it stands: connections stay open and nothing answers."""
        stopped: set[int] = set()
        while new := [pid for pid in self._processes() if pid not in stopped]:
            for pid in new:
                os.kill(pid, signal.SIGSTOP)
            stopped.update(new)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        for pid in self._processes():
            os.kill(pid, signal.SIGCONT)

    def start(self) -> None:
        """Start a killed server, and wait until it takes connections."""
        for lock in self._locks:  # a dead process that nobody waits for passes for a live one
            lock.unlink(missing_ok=True)
        owner = self._folder.stat()
        is_root = os.geteuid() == 0
        subprocess.run(
            ["setsid", "--fork", *self._command],  # it goes on when this process ends
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            user=owner.st_uid if is_root else None,
            group=owner.st_gid if is_root else None,
            extra_groups=[] if is_root else None,
            check=True,
        )
        until = time.monotonic() + PATIENCE
        while True:
            try:
                psycopg.connect(self._url, connect_timeout=2).close()
            except psycopg.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
            else:
                self._pid = int(self._locks[0].read_text().split()[0])
                return

    def _processes(self) -> list[int]:
        return [self._pid, *descendants(self._pid)]


def _runs(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
