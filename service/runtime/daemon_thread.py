"""Work on a daemon thread, for which the end of the process does not wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_daemon_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run work that takes minutes and cannot be stopped; return the future of its result."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from now on only the awaiting side can be cancelled

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(outcome)
