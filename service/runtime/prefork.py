"""Worker processes: forked from this one, watched, and started again when they die."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger(__name__)

_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_STOP = (signal.SIGTERM, signal.SIGINT)
_FIRST, _MOST = 0.5, 30.0  # seconds before a worker that died young is started again
_SOUND = 10.0  # seconds after which a worker did not die young
_PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass(slots=True)
class _Place:
    """Where one worker after the other works."""

    number: int
    pid: int = 0  # 0: nobody is there
    started: float = 0.0  # 0: nobody was there before
    due: float = 0.0  # when the next one starts
    delay: float = 0.0  # what the last one that died young was followed after


class Workers:
    """So many processes that do the same work, until SIGTERM or SIGINT.

    The process must have no threads: it is forked, now and whenever a worker has died.

    Args:
        count: how many.
        work: called in each with its number, and whether it is the first of that number; the
            process ends when it returns. SIGTERM and SIGINT are its own to handle.
        grace: seconds between the order to stop and SIGKILL.
    """

    def __init__(self, count: int, work: Callable[[int, bool], None], *, grace: float) -> None:
        self._places = [_Place(number) for number in range(count)]
        self._work = work
        self._grace = grace
        self._before: set[int | signal.Signals] = set()

    def run(self) -> None:
        """Return when all have stopped. The order to stop is handed on to each."""
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        try:
            while True:
                for place in self._places:
                    if not place.pid and time.monotonic() >= place.due:
                        self._start(place)
                if self._heard(self._wait()) in _STOP:
                    break
                self._bury()
        finally:
            self._stop()
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    # ------------------------------------------------------------------ the parts

    def _wait(self) -> float:
        """Seconds until the next worker is due; long when all are there."""
        due = [place.due for place in self._places if not place.pid]
        return max(0.0, min(due) - time.monotonic()) if due else 3600.0

    @staticmethod
    def _heard(seconds: float) -> int | None:
        told = signal.sigtimedwait(_HEARD, seconds)
        return None if told is None else told.si_signo

    def _start(self, place: _Place) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent, first = os.getpid(), not place.started
        place.started = time.monotonic()
        place.pid = os.fork()
        if not place.pid:
            self._be(place.number, first, parent)

    def _be(self, number: int, first: bool, parent: int) -> None:
        """The life of a worker, which does not return."""
        code = 1
        try:
            # Without whoever watches it, it would serve on unseen.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
            if os.getppid() == parent:
                self._work(number, first)
            code = 0
        except KeyboardInterrupt:
            pass
        except BaseException:  # noqa: BLE001 - said, and the next one may do better
            _log.exception("worker %d failed", number)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # An ordinary end would touch, and so copy, every object that is shared.
            os._exit(code)

    def _bury(self) -> None:
        """Note who died, and when the next one starts."""
        for place, pid, code in self._ended():
            now = time.monotonic()
            young = now - place.started < _SOUND
            place.delay = min(_MOST, max(_FIRST, 2 * place.delay)) if young else 0.0
            place.due = now + place.delay
            _log.error(
                "worker %d (process %d) %s; the next one starts %s",
                place.number,
                pid,
                _how(code),
                f"in {place.delay:g} s" if place.delay else "now",
            )

    def _ended(self) -> list[tuple[_Place, int, int]]:
        """The workers that have ended: where, which process, and its exit code.

        Others that have ended were given to this process as the first of a container; nobody asks
        after them.
        """
        found: list[tuple[_Place, int, int]] = []
        places = {place.pid: place for place in self._places if place.pid}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if not pid:
                return found
            if pid in places:
                places[pid].pid = 0
                found.append((places[pid], pid, os.waitstatus_to_exitcode(status)))

    def _stop(self) -> None:
        """Tell all to stop, wait, and kill who does not."""
        self._tell(signal.SIGTERM)
        deadline = time.monotonic() + self._grace
        while any(place.pid for place in self._places):
            left = deadline - time.monotonic()
            if left <= 0:
                _log.error("workers that did not stop within %g s are killed", self._grace)
                self._tell(signal.SIGKILL)
                deadline += self._grace
            if self._heard(max(0.0, min(left, 1.0))) == signal.SIGINT:
                self._tell(signal.SIGINT)  # told twice by Ctrl-C, they stop at once
            self._ended()

    def _tell(self, what: signal.Signals) -> None:
        for place in self._places:
            if place.pid:
                os.kill(place.pid, what)


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
