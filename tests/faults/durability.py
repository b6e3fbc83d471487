"""Faults of the process and of the disk under a store that is written to."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.faults import writing
from tests.faults.matrix import Setup, Verdict
from tests.support.server import ROOT, Server, stored_events

KILLS = 200
SYNC_KILLS = 20
POWER_CYCLES = 50
_EXT4_IOC_SHUTDOWN = 0x8004587D  # of ext4's ioctls; what xfs_io -x -c shutdown calls
_NOLOGFLUSH = 2  # nothing more reaches the disk, not even the journal
_PATIENCE = 20.0  # seconds
_TRACED_SECONDS = 4.0  # of writing under a fault


def killed(setup: Setup) -> Verdict:
    """SIGKILL at random moments, and at syncs of the disk."""
    rng = setup.rng("moments")
    missing = _kill_at_random(setup, "full", setup.times(KILLS))
    syncs = setup.times(SYNC_KILLS)
    folder = setup.fresh("syncs")
    for number in range(syncs):
        path, journal = folder / f"{number // 5}.db", folder / f"{number // 5}.journal"
        call = f"fdatasync,fsync:signal=SIGKILL:when={rng.randint(2, 40)}"
        _traced(call, path, journal, number, "full")
        missing += writing.lost(path, journal)
    weaker = _kill_at_random(setup, "early", 20)
    return Verdict(
        missing == 0,
        f"{setup.times(KILLS)} kills at random moments and {syncs} at a sync: {missing} of the "
        "acknowledged batches lost",
        f"acknowledged before the commit: {weaker} lost",
        weaker > 0,
    )


def _kill_at_random(setup: Setup, mode: str, kills: int) -> int:
    """Kill writers, each store six times; return the number of lost batches."""
    rng, folder = setup.rng(f"kills-{mode}"), setup.fresh(f"kills-{mode}")
    missing = 0
    for number in range(kills):
        path, journal = folder / f"{number // 6}.db", folder / f"{number // 6}.journal"
        size = journal.stat().st_size if journal.exists() else 0
        child = writing.start(path, journal, number, mode)
        while number % 6 and child.is_alive():  # the first one is killed while it makes the store
            if journal.exists() and journal.stat().st_size > size:
                break
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.08))
        child.kill()
        child.join()
        journal.touch()
        missing += writing.lost(path, journal) if mode == "full" else _lost_early(path, journal)
    return missing


def _lost_early(path: Path, journal: Path) -> int:
    try:
        return writing.lost(path, journal)
    except AssertionError:
        return 1


def _traced(inject: str, path: Path, journal: Path, seed: int, mode: str) -> None:
    """Run a writer with a fault in its system calls, until it ends or has had time for it."""
    trace: list[str | Path] = [
        "strace",
        "-f",
        "-qq",
        "-o",
        os.devnull,
        "-e",
        "trace=fdatasync,fsync",
    ]
    writer: list[str | Path] = [
        sys.executable,
        "-m",
        "tests.support.doomed_writer",
        path,
        journal,
        str(seed),
        mode,
    ]
    with subprocess.Popen([*trace, "-e", f"inject={inject}", *writer], cwd=ROOT) as tracer:
        until = time.monotonic() + _PATIENCE  # to import and begin, which a trace slows down
        while tracer.poll() is None and time.monotonic() < until:
            if journal.exists() and journal.stat().st_size:
                break
            time.sleep(0.05)
        try:
            tracer.wait(_TRACED_SECONDS)
        except subprocess.TimeoutExpired:
            subprocess.run(["pkill", "-KILL", "-P", str(tracer.pid)], check=False)
            tracer.wait()
    journal.touch()


# ---------------------------------------------------------------------------- power


@contextmanager
def _mounted(image: Path, point: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "loop", image, point], check=True)
    try:
        yield
    finally:
        for _ in range(100):
            if subprocess.run(["umount", point], capture_output=True, check=False).returncode == 0:
                break
            time.sleep(0.02)


def power(setup: Setup) -> Verdict:
    """Loss of power: a file system on a loop device that stops taking writes."""
    missing = _power_cycles(setup, "full", setup.times(POWER_CYCLES))
    weaker = _power_cycles(setup, "normal", setup.times(10))
    return Verdict(
        missing == 0,
        f"{setup.times(POWER_CYCLES)} cycles: {missing} of the acknowledged batches lost",
        f"synchronous=NORMAL: {weaker} lost",
        weaker > 0,
    )


def _power_cycles(setup: Setup, mode: str, cycles: int) -> int:
    folder, rng = setup.fresh(f"power-{mode}"), setup.rng(f"power-{mode}")
    image, point = folder / "disk", folder / "mounted"
    point.mkdir()
    missing = 0
    for cycle in range(cycles):
        if cycle % 10 == 0:
            with image.open("wb") as file:
                file.truncate(64 << 20)
            subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
            (journal := folder / f"{cycle}.journal").touch()
        path = point / "heed.db"
        with _mounted(image, point):
            size = journal.stat().st_size
            child = writing.start(path, journal, cycle, mode)
            until = time.monotonic() + _PATIENCE
            while journal.stat().st_size < size + 500 and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.15))
            _cut(point)
            time.sleep(0.05)  # what is acknowledged now would be acknowledged without a disk
            child.kill()
            child.join()
        with _mounted(image, point):
            try:
                gone = writing.lost(path, journal)
            except Exception:
                if mode == "full":
                    raise
                gone = 1
            missing += gone
            if gone:  # what is lost once would be counted again; beside its mark no store begins
                for kept in point.glob(f"{path.name}*"):
                    kept.unlink()
                journal.write_text("")
    return missing


def _cut(point: Path) -> None:
    """Let the file system take no more writes."""
    descriptor = os.open(point, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NOLOGFLUSH))
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------- a failing disk


def sync_fails(setup: Setup) -> Verdict:
    """EIO of fsync, from some sync on."""
    folder, rng = setup.fresh("eio"), setup.rng("eio")
    after, stopped, times = 0, 0, setup.times(10)
    for number in range(times):
        path, journal = folder / f"{number}.db", folder / f"{number}.journal"
        _traced(f"fdatasync,fsync:error=EIO:when={rng.randint(15, 60)}+", path, journal, 1, "full")
        notes = writing.Journal(journal)
        after += notes.acks_after_error()
        stopped += "ack" not in {line[0] for line in notes.lines[-8:]}
        assert writing.lost(path, journal) == 0
    weak = folder / "weak.journal"
    _traced("fdatasync,fsync:error=EIO:when=15+", folder / "weak.db", weak, 1, "unsynced")
    weaker = sum(line[0] == "err" for line in writing.Journal(weak).lines)
    return Verdict(
        after == 0 and stopped == times,
        f"{times} disks: {after} acknowledgements after the first error, {stopped} stopped",
        f"synchronous=OFF: {len(writing.Journal(weak).acked)} batches, {weaker} errors",
        weaker == 0,
    )


def full_disk(setup: Setup) -> Verdict:
    """A tmpfs of a few MB that fills up, and is then made larger."""
    folder = setup.fresh("full")
    data = folder / "data"
    data.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "heed-full", data], check=True)
    try:
        shutil.copytree(setup.world.data, data, dirs_exist_ok=True)
        with Server(data) as server, server.client() as http:
            return _fill(http, data)
    finally:
        subprocess.run(["umount", "-l", data], check=False)


def _fill(http: httpx.Client, data: Path) -> Verdict:
    acked, refused = 0, set()
    for number in range(3_000):
        answer = http.post("/v1/events", json={"events": _events(number)})
        if answer.status_code == 200:
            acked += 100
        else:
            refused.add(answer.status_code)
            if "retry-after" not in answer.headers:
                refused.add(-1)
            if number % 50 == 49 or len(refused) > 3:
                break
    reads = [http.post("/v1/recommend", json={"user_id": "u1"}).status_code for _ in range(50)]
    reads += [http.get("/v1/users/u1/history").status_code for _ in range(50)]
    subprocess.run(["mount", "-o", "remount,size=64m", data], check=True)
    until, again = time.monotonic() + _PATIENCE, 0
    while again != 200 and time.monotonic() < until:
        again = http.post("/v1/events", json={"events": _events(100_000)}).status_code
        time.sleep(0.2)
    stored = sum(len(stored_events(http, f"full{user}")) for user in range(10))
    good = reads.count(200)
    return Verdict(
        refused <= {503, 507}
        and bool(refused)
        and good == 100
        and again == 200
        and stored >= acked + 100,
        f"{acked} events acknowledged, then {sorted(refused)}; {good} of 100 reads answered; with "
        f"more room writes {'go on' if again == 200 else f'get {again}'}, {stored} events stored",
    )


def _events(number: int) -> list[dict[str, Any]]:
    return [
        {"user_id": f"full{number % 10}", "item_id": f"i{n}", "event_id": f"f{number}-{n}"}
        for n in range(100)
    ]
