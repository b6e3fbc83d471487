"""Heartbeats of forked workers: times in shared memory, which the parent and the peers read."""

from __future__ import annotations

import asyncio
import mmap
import time

BEAT_INTERVAL = 1.0  # seconds
STALLED = 5.0  # seconds without a beat, after which peers do not wait for a worker


class Heartbeats:
    """The last heartbeat of each worker; create it before the workers are forked.

    The event loop of a worker beats, so that a worker whose process is stopped or whose loop is
    blocked falls silent. Memory that is shared needs no reader, as a pipe would: a parent that is
    slow holds up nobody. Times are of the system's monotonic clock, the same in all processes.
    """

    def __init__(self, count: int) -> None:
        # One aligned double each, which is written in one piece.
        self._times = memoryview(mmap.mmap(-1, 8 * count)).cast("d")

    def beat(self, number: int) -> None:
        """Note that a worker is alive now."""
        self._times[number] = time.monotonic()

    def clear(self, number: int) -> None:
        """Forget a worker that has ended: its successor is silent until it serves."""
        self._times[number] = 0.0

    def last(self, number: int) -> float:
        """Return the time of a worker's last beat; 0.0 before its first."""
        return self._times[number]

    def is_stalled(self, number: int) -> bool:
        """True for a worker that does not serve now: silent for a while, ended, or starting."""
        return time.monotonic() - self._times[number] > STALLED

    async def keep_beating(self, number: int) -> None:
        """Beat until cancelled."""
        while True:
            self.beat(number)
            await asyncio.sleep(BEAT_INTERVAL)


class SilenceWatch:
    """Measures for how long workers have been silent while this process itself was running.

    A machine or a container that is paused stops parent and workers alike: the time of the pause
    counts for nothing, since it would be held against workers that had no chance to beat.
    """

    def __init__(self, heartbeats: Heartbeats) -> None:
        self._heartbeats = heartbeats
        self._checked = time.monotonic()
        self._silence: dict[int, tuple[float, float]] = {}  # number -> last beat, silent seconds

    def check(self) -> None:
        """Look at all workers that were added. Call it about once in `BEAT_INTERVAL`."""
        now = time.monotonic()
        passed, self._checked = min(now - self._checked, 2 * BEAT_INTERVAL), now
        for number, (last, silent) in self._silence.items():
            latest = self._heartbeats.last(number)
            self._silence[number] = (latest, silent + passed if latest == last else 0.0)

    def restart(self, number: int) -> None:
        """Begin anew with a worker, which is being started."""
        self._heartbeats.clear(number)
        self._silence[number] = (0.0, 0.0)

    def silence(self, number: int) -> float:
        """Return a worker's seconds of silence; 0.0 until its first beat, however long it loads."""
        last, silent = self._silence[number]
        return silent if last else 0.0
