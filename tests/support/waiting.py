"""Waiting for what other processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tests.support.heed_process import PATIENCE

T = TypeVar("T")


def eventually(held: Callable[[], T], said: Callable[[], object] = lambda: "") -> T:
    """Return the first true result, for which a busy machine may need long; else say what is wrong.

    The longer it takes, the less often it is looked at: looking takes time from what is awaited.
    """
    deadline, pause = time.monotonic() + PATIENCE, 0.01
    while not (result := held()):
        assert time.monotonic() < deadline, said()
        time.sleep(pause)
        pause = min(1.3 * pause, 0.2)
    return result
