"""Workers: restarts of those that exit early, peers that do not answer, arrays that they share."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from service.runtime.workers import (
    PreforkServer,
    SharedArrays,
    WorkerPeers,
    WorkerTable,
    worker_sockets,
)

SHORT_LIVED = """
import logging, os, sys
from service.runtime.workers import PreforkServer, WorkerTable
logging.basicConfig(format="%(message)s", stream=sys.stdout, level="ERROR")
def work(number, first):
    os.write(1, f"alive {number} {first}\\n".encode())  # in one piece, whoever else writes
    if number:
        os._exit(3)
    __import__("signal").pause()
PreforkServer(work, grace=5.0, table=WorkerTable(2), patience=30.0).run()
print("stopped")
"""


def test_restart_delay_doubles() -> None:
    """The restart delay of a worker that exits early doubles, and SIGTERM ends the server."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", SHORT_LIVED], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    while sum("next one starts" in line for line in lines) < 3:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(30) == 0
    process.stdout.close()
    said = "".join(lines)
    assert re.findall(r"ended with 3; the next one starts in ([\d.]+) s", said) == ["0.5", "1", "2"]
    assert sorted(re.findall(r"alive (\d) (\w+)", said)) == [
        *(("0", "True"), ("1", "False"), ("1", "False"), ("1", "True"))
    ]
    assert "stopped" in rest


def test_a_hung_worker_is_silent_and_a_new_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not answer is silent if it runs and is not just starting."""
    points, table = worker_sockets(4), WorkerTable(4)
    for number in (0, 1, 2):
        table.start(number)
    table.start(2)  # again
    later = time.monotonic() + 3_600
    monkeypatch.setattr("service.runtime.workers.time", SimpleNamespace(monotonic=lambda: later))
    table.end(2)

    async def talk() -> tuple[list[int], list[int]]:
        peers = WorkerPeers(points, 0, table)
        hung = await peers.silent(0.1)

        async def pong(_: str) -> bytes:
            return b"pong"

        answering = await WorkerPeers(points, 1, table).listen({"ping": pong})
        try:
            return hung, await peers.silent(0.5)
        finally:
            answering.close()

    assert asyncio.run(talk()) == ([1], [])
    assert [table[number].restarts for number in range(4)] == [0, 0, 1, 0]
    monkeypatch.undo()
    # It has just started.
    assert asyncio.run(WorkerPeers(points, 0, table).silent(0.1)) == []
    for point in points:
        point.close()


def test_a_worker_that_does_not_answer_is_left_out() -> None:
    """A request to all peers returns the answers of those that answer in time."""
    points, table = worker_sockets(4), WorkerTable(4)
    for number in (1, 2):  # the third has not begun to serve
        table.beat(number)

    async def talk() -> dict[int, bytes]:
        async def told(name: str) -> bytes:
            return name.encode() * 300_000

        answering = await WorkerPeers(points, 1, table).listen({"size": told})
        try:
            return await WorkerPeers(points, 0, table).ask("size x", 0.5)
        finally:
            answering.close()

    assert asyncio.run(talk()) == {1: b"x" * 300_000}
    for point in points:
        point.close()


def test_a_pause_of_all_processes_is_not_held_against_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Silence is counted while the parent runs: a worker that loads or was paused is not hung."""
    now, killed = [1000.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("os.kill", lambda *_: killed.append(now[0]))
    table = WorkerTable(1)
    server = PreforkServer(lambda *_: None, grace=5.0, table=table, patience=5.0)
    server._slots[0].pid = 1

    def pass_by(*seconds: float) -> None:
        for each in seconds:
            now[0] += each
            server.kill_hung()

    pass_by(*[1.0] * 100)  # it loads
    table.beat(0)
    pass_by(1.0, 3600.0)  # the machine was asleep, for which 2 s count
    pass_by(1.0, 1.0)
    assert not killed
    pass_by(1.0)
    assert killed == [now[0]]
    table.beat(0)
    pass_by(1.0, 1.0)
    assert len(killed) == 1


STUCK = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from service.runtime.workers import ShutdownLimit
ThreadPoolExecutor(1).submit(threading.Event().wait)  # which an ordinary exit would wait for
ShutdownLimit(0.2, abandon=lambda: print("abandoned")).start()
"""


def test_a_process_ends_although_a_thread_does_not() -> None:
    """At its limit a process that is stopping ends well, whatever still runs in it."""
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "abandoned\n")


# -------------------------------------------------------------------- shared arrays

# The first child claims the arrays and is killed before it has published them.
KILLED = """
import os, signal, time
import numpy as np
from service.runtime.workers import SharedArrays
shared, (read, write) = SharedArrays(), os.pipe()
first = os.fork()
if not first:
    assert shared.claim()
    os.pwrite(shared._file, b"x" * 5000, 0)
    os.write(write, b".")
    time.sleep(600)
os.read(read, 1)
assert not shared.claim() and not shared.is_published
os.kill(first, signal.SIGKILL)
os.waitpid(first, 0)
second = os.fork()
if not second:
    assert shared.claim()
    shared.publish({"numbers": np.arange(1000), "none": np.zeros((0, 3), np.float32)})
    os._exit(0)
assert os.waitpid(second, 0)[1] == 0
assert shared.is_published and not shared.claim()
numbers, none = shared.arrays()["numbers"], shared.arrays()["none"]
assert numbers.sum() == 499500 and none.shape == (0, 3) and none.dtype == np.float32
print("equal")
"""


def test_the_successor_of_a_killed_process_publishes() -> None:
    """A claim ends with its process, and what the next one publishes is read by all."""
    command = [sys.executable, "-c", KILLED]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("equal\n", "")


def test_arrays_are_mapped_and_not_writable() -> None:
    """Published arrays are pages of one file, and refuse writes; before, they cannot be read."""
    shared = SharedArrays()
    with pytest.raises(RuntimeError):
        shared.arrays()
    assert shared.claim()
    shared.publish({"bytes": np.ones(1 << 20, np.uint8)})
    shared.release()
    found = shared.arrays()["bytes"]
    assert found.all()
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 0
    with open(f"/proc/{os.getpid()}/maps") as maps:
        assert any("memfd:heed-shared" in line for line in maps)
