"""Failures in the background: one line each, and none for their repetitions."""

from __future__ import annotations

import logging

import pytest

from service.domain.errors import StoreUnreachable
from service.runtime.logs import RepeatedWork, log_failure

LOG = logging.getLogger("heed.test")


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, bool]]:
    """The messages since the last call, and whether they have a traceback."""
    found = [(each.getMessage(), each.exc_info is not None) for each in caplog.records]
    caplog.clear()
    return found


def test_an_expected_failure_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Failures of stores and disks have a reason and no traceback; bugs have theirs."""
    log_failure(LOG, "it failed; it goes on", StoreUnreachable("no answer\n\tfrom the server"))
    log_failure(LOG, "it failed", OSError(28, "No space left on device"))
    log_failure(LOG, "it failed; it goes on", KeyError("x"))
    assert lines(caplog) == [
        ("it failed: no answer; it goes on", False),
        ("it failed: [Errno 28] No space left on device", False),
        ("it failed; it goes on", True),
    ]


def test_an_outage_of_many_watches_is_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    """One line when the first fails, one when the first succeeds; each fault has its own."""
    caplog.set_level(logging.INFO)
    work = RepeatedWork()
    for _ in range(3):
        for name in ("a", "b", "c"):
            work.failed(LOG, name, f"{name} failed", StoreUnreachable("no answer"))
    assert lines(caplog) == [("a failed: no answer", False)]
    for _ in range(2):
        work.failed(LOG, "d", "d failed", KeyError("x"))
        work.failed(LOG, "e", "e failed", KeyError("x"))
    assert lines(caplog) == [("d failed", True), ("e failed", True)]
    for name in ("b", "a", "c"):
        work.succeeded(LOG, name)
    (back,) = lines(caplog)
    assert "again, after StoreUnreachable" in back[0]
    work.ended("d")
    work.failed(LOG, "d", "d failed", KeyError("x"))
    work.failed(LOG, "b", "b failed", StoreUnreachable("no answer"))
    assert lines(caplog) == [("d failed", True), ("b failed: no answer", False)]
