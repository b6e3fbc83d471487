"""A share of an executor: its shutdown waits only for its own calls."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.runtime.threads import ExecutorShare


def test_a_share_waits_for_its_own_calls_alone() -> None:
    """A share shuts down once its calls are done, while the other share's go on."""
    go, begun = threading.Event(), threading.Event()

    def wait() -> int:
        begun.set()
        assert go.wait(60)
        return 1

    with ThreadPoolExecutor(2) as pool:
        one, other = ExecutorShare(pool), ExecutorShare(pool)
        waiting = other.submit(wait)
        assert begun.wait(60)
        done = one.submit(int, "3")
        one.shutdown()
        assert done.done()
        assert not waiting.done()
        with pytest.raises(RuntimeError, match="shutdown"):
            one.submit(int, "3")
        go.set()
        other.shutdown()
        assert waiting.done()
        assert pool.submit(int, "4").result() == 4
