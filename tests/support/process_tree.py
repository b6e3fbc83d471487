"""Programs that start processes of their own, none of which outlives the process that started it.

Backends of PostgreSQL each lead a session of their own, so that no signal to a group reaches all.
This file is also the program that stands between: Linux hands it every orphan below it, and it
kills them all once its standard input, a pipe from whoever started it, is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

PATIENCE = 60.0  # seconds until a program that does not end is given up
_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_IPC_RMID = 0  # of shmctl(2)


class ProcessTree:
    """A running program and all processes below it.

    Args:
        command: path of the program, and its arguments.
        log: stdout and stderr are appended to it.
        folder: in which it runs. Removed if this process ends before the program does.
        user: name of the user that it runs as; of this process if None.
        environment: its variables; of this process if None.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        folder: Path,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        task = {"command": list(command), "folder": str(folder), "user": user}
        with log.open("ab") as output:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, json.dumps(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,  # a Ctrl-C in the terminal is not for it
            )
        assert self._guardian.stdout is not None
        with self._guardian.stdout as said:
            first = said.readline()
        assert first, f"{command[0]} did not start: {log.read_text(errors='replace')}"
        self.pid = int(first)  # of the program itself

    @property
    def is_alive(self) -> bool:
        """True if the program or a process that it started runs."""
        return self._guardian.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program alone; none where it has ended."""
        if self.is_alive:
            _send(self.pid, number)

    def freeze(self) -> None:
        """Stop every process where it stands, the program first so that it starts no more."""
        stopped: set[int] = set()
        while new := [pid for pid in self._members() if pid not in stopped]:
            for pid in new:
                _send(pid, signal.SIGSTOP)
            stopped.update(new)

    def thaw(self) -> None:
        for pid in self._members():
            _send(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill every process by SIGKILL, all stopped before so that none sees another end."""
        self.freeze()
        members = self._members()
        for pid in members:
            _send(pid, signal.SIGKILL)
        self.wait()
        _remove_shared_memory(members)

    def wait(self, patience: float = PATIENCE) -> int:
        """Its exit code once all processes have ended; minus the number of a signal's.

        Raises:
            subprocess.TimeoutExpired: one still runs.
        """
        code = self._guardian.wait(patience)
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        return code if code < 128 else 128 - code

    def _members(self) -> list[int]:
        return descendants(self._guardian.pid) if self.is_alive else []


class TreeInFolder:
    """A server that is one tree of processes, with its log and its data in a folder of its own."""

    folder: Path
    _log: Path
    _tree: ProcessTree | None = None
    _frozen = False

    @property
    def is_alive(self) -> bool:
        """True if a process of the server runs, be it frozen."""
        return self._tree is not None and self._tree.is_alive

    @property
    def answers(self) -> bool:
        """True if the server runs and is not frozen."""
        return self.is_alive and not self._frozen

    def kill(self) -> None:
        """Kill every process of the server at once, as a loss of power does."""
        if self._tree is not None:
            self._tree.kill()
            self._frozen = False

    def freeze(self) -> None:
        """Stop every process where it stands: connections stay open and nothing answers."""
        assert self._tree is not None
        self._tree.freeze()
        self._frozen = True

    def thaw(self) -> None:
        assert self._tree is not None
        self._tree.thaw()
        self._frozen = False

    def log(self) -> str:
        """Return what the server has logged since it was made."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def descendants(root: int) -> list[int]:
    """List the ids of the processes below one, parents before their children."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                # The name, in parentheses, may hold spaces; state and parent follow.
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(folder.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found[1:]


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _guard(command: list[str], folder: str, user: str | None) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, lambda *_: None)  # and not SIG_IGN, which programs inherit
    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        cwd=folder,
        user=user,
        group=_group(user),
        extra_groups=None if user is None else [],
    )
    print(program.pid, flush=True)  # noqa: T201 - whoever started this reads it
    code = 0
    while True:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if pid == program.pid:
                    code = os.waitstatus_to_exitcode(status)
            if select.select([sys.stdin, woken], [], [])[0] == [sys.stdin]:
                _kill_all()
                shutil.rmtree(folder, ignore_errors=True)
                return 1
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            continue
        program.returncode = code  # reaped above
        return code if code >= 0 else 128 - code


def _kill_all() -> None:
    killed: set[int] = set()
    while below := descendants(os.getpid()):
        for pid in below:
            _send(pid, signal.SIGKILL)
        killed.update(below)
        time.sleep(0.01)
    _remove_shared_memory(killed)


def _remove_shared_memory(creators: Collection[int]) -> None:
    """Remove segments of System V that processes have left which were killed."""
    _, *segments = Path("/proc/sysvipc/shm").read_text().splitlines()
    for segment in segments:
        _, identifier, _, _, creator, _, attached = map(int, segment.split()[:7])
        if creator in creators and not attached:
            ctypes.CDLL(None).shmctl(identifier, _IPC_RMID, None)


def _group(user: str | None) -> int | None:
    if user is None:
        return None
    import pwd

    return pwd.getpwnam(user).pw_gid


if __name__ == "__main__":
    sys.exit(_guard(**json.loads(sys.argv[1])))
