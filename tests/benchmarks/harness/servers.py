"""Servers as processes on one core: started, watched from outside, always stopped."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from service.domain.errors import Unavailable
from service.domain.settings import Settings

ROOT = Path(__file__).parents[3]
Place = int | frozenset[int] | None  # one core, some of them, any
_PATIENCE = 180.0  # seconds for a server to listen, on a machine that has other work
_STOP = 60.0
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")

# Run before the server in its own process: when the benchmark is killed, so is the server.
_LAUNCH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores of the server and of the client; the same one if there is only one."""

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
        return f"servers on core {self.server}, client on core {self.client}"


@contextlib.contextmanager
def pinned(core: Place) -> Iterator[None]:
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
    """A running server. Figures of processes need Linux."""

    pid: int
    port: int = 0

    def processes(self) -> list[int]:
        """The process that was started, then its workers."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [self.pid, *map(int, children.split())]

    def cpu_seconds(self) -> float:
        """Processor time of it and of its workers so far, also of those that have ended."""
        ticks = 0
        for pid in self.processes():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            # utime, stime, and those of children that were waited for: 14 to 17 of proc(5)
            ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory(self) -> list[dict[str, int]]:
        """Bytes of each process, private, shared and its part of all, of proc(5)."""
        return [memory_of(pid) for pid in self.processes()]

    def resident(self) -> int:
        """Bytes that it holds, those that several of its processes share counted once."""
        return sum(each["proportional"] for each in self.memory())

    def get(self, path: str) -> str | None:
        """Return the text of a 200, None for anything else."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as said:
                return str(said.read().decode())
        except (urllib.error.URLError, OSError):
            return None


def memory_of(pid: int | str = "self") -> dict[str, int]:
    """Bytes of a process."""
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
    core: Place = None,
    environment: Mapping[str, str] | None = None,
    python: str | Path = sys.executable,
    root: Path = ROOT,
    patience: float = _PATIENCE,
    log: Path | None = None,
) -> Iterator[Server]:
    """A Python server on `core` until the block ends; it says its address when it listens.

    Args:
        arguments: of the interpreter, such as `-m service.cli serve`.
        core: which one, or which.
        environment: its HEED_* variables; those of this process are not passed on.
        python: the interpreter.
        root: the checkout in which `-m` finds modules.
        patience: seconds until it must have said its address.
        log: gets what it prints.

    Raises:
        Unavailable: when it ends or stays silent, with its last words.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.upper().startswith("HEED_")}
    inherited |= {"PYTHONPATH": str(root), "COLUMNS": "400"}
    inherited |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    with contextlib.ExitStack() as stack:
        if log is None:
            words = stack.enter_context(tempfile.TemporaryFile())
        else:
            words = stack.enter_context(log.open("w+b"))
        with pinned(core):
            process = subprocess.Popen(
                [str(python), "-c", _LAUNCH, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                env={**inherited, **(environment or {})},
                cwd=root,  # which `-c` puts before PYTHONPATH
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


def heed(
    data: Path,
    *,
    core: Place = None,
    python: str | Path = sys.executable,
    root: Path = ROOT,
    patience: float = _PATIENCE,
    log: Path | None = None,
    **settings: object,
) -> AbstractContextManager[Server]:
    """`heed serve` over a data directory; settings are HEED_* variables in lower case."""
    own = Settings.read()
    given: dict[str, object] = {
        "deadline": 60,  # a request must not be cut off for being slow on a busy machine
        "log_level": "warning",
        "encoder": own.encoder,
        "embedding_dim": own.embedding_dim,
    }
    given |= settings
    return serving(
        ["-m", "service.cli", "serve", "--data", str(data), "--port", "0"],
        core=core,
        environment={f"HEED_{name.upper()}": str(value) for name, value in given.items()},
        python=python,
        root=root,
        patience=patience,
        log=log,
    )


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
