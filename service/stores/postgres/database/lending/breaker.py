"""A circuit breaker for a database that does not answer.

While the circuit is open, calls fail at once instead of waiting for their timeouts. Now and then
one call is let through; the circuit closes when one succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE = 0.5  # seconds between two calls that are let through


class Breaker:
    """State of one circuit. Not thread-safe; a race costs a call its timeout."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open_until: float | None = None  # None: closed
        self.reason = ""

    @property
    def is_open(self) -> bool:
        """Report whether calls fail."""
        return self._open_until is not None

    def permits(self) -> bool:
        """Report whether a call may be tried now; the next one may be, after a pause."""
        if self._open_until is None:
            return True
        now = self._clock()
        if now < self._open_until:
            return False
        self._open_until = now + _PAUSE
        return True

    def succeeded(self) -> None:
        """Close the circuit."""
        self._open_until = None

    def failed(self, reason: str) -> None:
        """Open the circuit."""
        self.reason = reason
        self._open_until = self._clock() + _PAUSE
