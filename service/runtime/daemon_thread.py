"""Work on a daemon thread, for which the end of the process does not wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_in_daemon_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run work that takes minutes and cannot be stopped; return the future of its result.

    Args:
        work: called on the new thread.
        name: of the thread.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not outcome.done():  # it may have been cancelled
            set_outcome()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            failed = error
            set_outcome = lambda: outcome.set_exception(failed)  # noqa: E731
        else:
            set_outcome = lambda: outcome.set_result(result)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, set_outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
