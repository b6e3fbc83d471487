"""A parent that forks worker processes, and replaces those that die or hang.

gunicorn was tried in its place: its workers outlive a parent that is killed, and take connections
from one socket, of a burst of 60 one worker 54.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.runtime.processes.heartbeats import BEAT_INTERVAL, Heartbeats, SilenceWatch
from service.runtime.processes.worker_table import WorkerTable

_log = logging.getLogger(__name__)

_STOP = (signal.SIGTERM, signal.SIGINT)
_AWAITED = (*_STOP, signal.SIGCHLD)
_MIN_DELAY, _MAX_DELAY = 0.5, 30.0  # seconds before a worker that died early is started again
_EARLY = 10.0  # seconds after its start within which a worker's death is early
_PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass(slots=True)
class _Slot:
    """One worker number, taken by one process after the other."""

    number: int
    pid: int = 0  # 0: no process runs
    started: float = 0.0  # 0: no process has run yet
    due: float = 0.0  # when the next process starts
    delay: float = 0.0  # the backoff after the last early death


class PreforkServer:
    """Runs `count` processes that do the same work, until SIGTERM or SIGINT.

    The process must be single-threaded: it forks, at the start and whenever a worker has died.

    Args:
        count: number of workers.
        work: called in each worker with its number, and whether it is the first process of that
            number; the process ends when it returns. It handles SIGTERM and SIGINT itself.
        grace: seconds between SIGTERM to the workers and SIGKILL.
        heartbeats: of the workers, which `work` keeps up once it serves.
        patience: seconds without a heartbeat after which a worker is killed and replaced.
        table: gets each start and end, for the workers to read.
    """

    def __init__(
        self,
        count: int,
        work: Callable[[int, bool], None],
        *,
        grace: float,
        heartbeats: Heartbeats,
        patience: float,
        table: WorkerTable | None = None,
    ) -> None:
        self._slots = [_Slot(number) for number in range(count)]
        self._work = work
        self._grace = grace
        self._watch = SilenceWatch(heartbeats)
        self._patience = patience
        self._table = table or WorkerTable(count)
        self._mask: set[int | signal.Signals] = set()  # of signals, before `run`

    def run(self) -> None:
        """Start the workers; return when all have ended after SIGTERM or SIGINT."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        try:
            while True:
                for slot in self._slots:
                    if not slot.pid and time.monotonic() >= slot.due:
                        self._start(slot)
                if self._wait_for_signal(min(BEAT_INTERVAL, self._next_start())) in _STOP:
                    break
                self._kill_hung()
                self._reap()
        finally:
            self._stop()
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _next_start(self) -> float:
        """Return the seconds until the next worker is due, an hour when all are running."""
        due = [slot.due for slot in self._slots if not slot.pid]
        return max(0.0, min(due) - time.monotonic()) if due else 3600.0

    @staticmethod
    def _wait_for_signal(seconds: float) -> int | None:
        received = signal.sigtimedwait(_AWAITED, seconds)
        return None if received is None else received.si_signo

    def _start(self, slot: _Slot) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent, first = os.getpid(), not slot.started
        self._watch.restart(slot.number)
        slot.started = time.monotonic()
        self._table.start(slot.number)
        slot.pid = os.fork()
        if not slot.pid:
            self._run_worker(slot.number, first, parent)

    def _run_worker(self, number: int, first: bool, parent: int) -> None:
        """Do the work in the forked process; does not return."""
        code = 1
        try:
            # A worker must not outlive the parent that restarts and stops it.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            if os.getppid() == parent:
                self._work(number, first)
            code = 0
        except KeyboardInterrupt:
            pass
        except BaseException:  # noqa: BLE001 - logged; the next process may succeed
            _log.exception("worker %d failed", number)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # An ordinary exit would touch, and so copy, every object in shared memory.
            os._exit(code)

    def _kill_hung(self) -> None:
        """Kill the workers that have been silent for too long; they are reaped like others."""
        self._watch.check()
        for slot in self._slots:
            silent = self._watch.silence(slot.number)
            if slot.pid and silent >= self._patience:
                _log.error(
                    "worker %d (process %d) hangs: no heartbeat for %.0f s; it is killed",
                    slot.number,
                    slot.pid,
                    silent,
                )
                os.kill(slot.pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Log the workers that have ended, and schedule their successors."""
        for slot, pid, code in self._ended():
            now = time.monotonic()
            early = now - slot.started < _EARLY
            slot.delay = min(_MAX_DELAY, max(_MIN_DELAY, 2 * slot.delay)) if early else 0.0
            slot.due = now + slot.delay
            _log.error(
                "worker %d (process %d) %s; the next one starts %s",
                slot.number,
                pid,
                f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}",
                f"in {slot.delay:g} s" if slot.delay else "now",
            )

    def _ended(self) -> list[tuple[_Slot, int, int]]:
        """Reap all ended children; return the slot, process id and exit code of each worker.

        As the first process of a container, this one also inherits orphans: they are reaped only.
        """
        ended: list[tuple[_Slot, int, int]] = []
        slots = {slot.pid: slot for slot in self._slots if slot.pid}
        with contextlib.suppress(ChildProcessError):  # there are no children
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = child
                if pid in slots:
                    slots[pid].pid = 0
                    self._table.end(slots[pid].number)
                    ended.append((slots[pid], pid, os.waitstatus_to_exitcode(status)))
        return ended

    def _stop(self) -> None:
        """Send SIGTERM to all workers, wait, and kill those that do not end within the grace."""
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + self._grace
        while any(slot.pid for slot in self._slots):
            left = deadline - time.monotonic()
            if left <= 0:
                _log.error("workers that did not stop within %g s are killed", self._grace)
                self._signal_all(signal.SIGKILL)
                deadline += self._grace
            if self._wait_for_signal(max(0.0, min(left, 1.0))) == signal.SIGINT:
                self._signal_all(signal.SIGINT)  # after a second Ctrl-C, workers stop at once
            self._ended()

    def _signal_all(self, number: signal.Signals) -> None:
        for slot in self._slots:
            if slot.pid:
                os.kill(slot.pid, number)
