"""Work on a thread of its own that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_in_daemon_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The outcome of work that takes minutes, and cannot be stopped.

    Args:
        work: what to do.
        name: of the thread.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(settled: Callable[[], None]) -> None:
        if not outcome.done():  # else nobody waits any more
            settled()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failed = error
            told = lambda: outcome.set_exception(failed)  # noqa: E731
        else:
            told = lambda: outcome.set_result(result)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, told)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
