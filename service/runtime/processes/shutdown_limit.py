"""Upper bound on the time that a process takes to end after its first signal to stop."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class ShutdownLimit:
    """Ends the process `seconds` after `start`, whatever it is still doing.

    Nothing that was acknowledged is lost by it: an acknowledged change is on disk, and one that is
    not has been refused or has no client left. It is a thread of its own, because the event loop, a
    pool's queue, the store's writer or a checkpoint may be what does not end.

    Args:
        seconds: from the first call of `start`.
        abandon: called before the end, to kill child processes. It must not wait.
    """

    def __init__(self, seconds: float, *, abandon: Callable[[], None]) -> None:
        self._seconds = seconds
        self._abandon = abandon
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Begin to count; later calls change nothing."""
        if self._timer is None:
            self._timer = threading.Timer(self._seconds, self._end)
            self._timer.daemon = True
            self._timer.start()

    def _end(self) -> None:
        with contextlib.suppress(Exception):
            _log.warning(
                "not stopped within %g s: the process ends with work left, all of it "
                "unacknowledged; the next start goes on from what is stored",
                self._seconds,
            )
            self._abandon()
            sys.stdout.flush()
            sys.stderr.flush()
        # A stop on request is a success; `sys.exit` would wait for threads.
        os._exit(0)
