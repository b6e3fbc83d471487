"""Servers as processes on one core: started, watched from outside, always stopped."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.domain.errors import Unavailable

_START = 180.0  # seconds for a server to say its address, on a machine that has other work
_STOP = 15.0
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")

# Run before the server in its own process: when whoever measures is killed, so is the server.
_LAUNCH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores of the server and of the client; the same one where there is only one."""

    server: int | None  # None: this system does not pin
    client: int | None

    @classmethod
    def choose(cls) -> Cores:
        """The first two cores that this process may use."""
        if not hasattr(os, "sched_getaffinity"):
            return cls(None, None)
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[0], allowed[min(1, len(allowed) - 1)])

    def __str__(self) -> str:
        if self.server is None:
            return "servers and client not pinned to cores"
        if self.server == self.client:
            return f"servers and client share core {self.server}"
        return f"servers on core {self.server}, client on core {self.client}"


@contextlib.contextmanager
def pinned(core: int | frozenset[int] | None) -> Iterator[None]:
    """Run this thread, and what it starts meanwhile, on one core, or on some."""
    if core is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core} if isinstance(core, int) else core)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    pid: int
    port: int

    def cpu_seconds(self) -> float | None:
        """Processor time of it and of its workers so far, also of those that have ended.

        None where there is no /proc.
        """
        ticks = 0
        try:
            for pid in self.processes():
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                # utime, stime, and those of children that were waited for: 14 to 17 of proc(5)
                ticks += sum(map(int, fields[11:15]))
        except OSError:
            return None
        return ticks / os.sysconf("SC_CLK_TCK")

    def processes(self) -> list[int]:
        """The one that was started, then its workers. Raises OSError where there is no /proc."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [self.pid, *map(int, children.split())]

    def shares(self) -> list[dict[str, int]]:
        """Bytes of each of its processes; see `share_of`. Raises OSError without /proc."""
        return [share_of(pid) for pid in self.processes()]

    def memory(self) -> dict[str, int] | None:
        """Bytes resident now and at the highest; None where there is no /proc."""
        return memory_of(self.pid)


def busy_seconds() -> float | None:
    """Processor time that everything on this machine has used; None where there is no /proc."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _waiting, *rest = map(int, first[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int | str = "self") -> dict[str, int] | None:
    """Bytes that a process has resident now and had at most; None where there is no /proc."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    sizes = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.MULTILINE))
    return {"resident": 1024 * int(sizes["VmRSS"]), "highest": 1024 * int(sizes["VmHWM"])}


def share_of(pid: int) -> dict[str, int]:
    """Bytes that a process holds alone and with others, and its part of all, of proc(5).

    Raises OSError where there is no /proc.
    """
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {name: 1024 * int(size) for name, size in re.findall(r"(\w+): +(\d+) kB", rollup)}
    return {
        "private": sizes["Private_Clean"] + sizes["Private_Dirty"],
        "shared": sizes["Shared_Clean"] + sizes["Shared_Dirty"],
        "proportional": sizes["Pss"],
    }


@contextlib.contextmanager
def serving(
    arguments: Sequence[str],
    *,
    core: int | frozenset[int] | None,
    environment: Mapping[str, str],
    python: str | None = None,
    patience: float = _START,
) -> Iterator[Server]:
    """A Python server on `core` until the block ends; it says its address when it listens.

    Args:
        arguments: of the interpreter, such as `-m service.cli serve`.
        core: which one, or which; None = any.
        environment: its HEED_* variables; those of this process are not passed on.
        python: the interpreter; this one if left out.
        patience: seconds until it must have said its address.

    Raises:
        Unavailable: when it ends or stays silent, with its last words.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.upper().startswith("HEED_")}
    root = str(Path(__file__).parents[3])  # `-m` finds this Heed wherever the command is run
    paths = [root, *filter(None, [inherited.get("PYTHONPATH")])]
    inherited |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with tempfile.TemporaryFile() as words:
        with pinned(core):
            process = subprocess.Popen(
                [python or sys.executable, "-c", _LAUNCH, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                env={**inherited, **environment},
            )
        try:
            yield Server(process.pid, _listening(process, words.fileno(), patience))
        finally:
            process.terminate()
            try:
                process.wait(_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _listening(process: subprocess.Popen[bytes], words: int, patience: float) -> int:
    """The port that the process says it listens on."""
    deadline = time.monotonic() + patience
    while True:
        ended = process.poll() is not None
        said = os.pread(words, 1 << 16, 0).decode("utf-8", "replace")
        found = _ADDRESS.search(said)
        if found:
            return int(found[1])
        if ended or time.monotonic() > deadline:
            what = f"ended with {process.returncode}" if ended else f"was silent for {patience:g} s"
            raise Unavailable(f"a server that was to be measured {what}: {said.strip()[-500:]}")
        time.sleep(0.02)
