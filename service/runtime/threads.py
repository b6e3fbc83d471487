"""Work on daemon threads, and shares of an executor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any, ParamSpec, TypeVar

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


P = ParamSpec("P")


class ExecutorShare(Executor):
    """Submits to another executor, and waits at shutdown for what it has submitted itself."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a call. Raises RuntimeError after `shutdown`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            future = self._executor.submit(fn, *args, **kwargs)
            self._pending.add(future)
        future.add_done_callback(self._discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls; wait for those that were submitted here, or cancel them."""
        with self._lock:
            self._closed = True
            pending = list(self._pending)
        if cancel_futures:
            for future in pending:
                future.cancel()
        if wait:
            _wait(pending)

    def _discard(self, future: Future[T]) -> None:
        with self._lock:
            self._pending.discard(future)


_wait = wait  # `shutdown` has a parameter of that name
