"""Log lines: one JSON object each, short enough for one write, without messages that quote data."""

from __future__ import annotations

import io
import json
import logging
import queue
import subprocess
import sys
import warnings
from collections.abc import Iterator
from logging.handlers import QueueHandler
from typing import Any

import pytest

from service.domain.errors import StoreUnreachable
from service.runtime import logs
from service.runtime.logs import RepeatedWork, log_failure


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The log of a configured process; afterwards the process is as before."""
    before = logging.root.handlers[:], logging.root.level
    hooks = sys.excepthook, sys.unraisablehook
    stream = io.StringIO()
    logs.configure("info", "json", stream, uncaught=False)
    yield stream
    logging.captureWarnings(False)
    logging.root.handlers[:], logging.root.level = before
    sys.excepthook, sys.unraisablehook = hooks


def is_of_lines(handler: logging.Handler) -> bool:
    return isinstance(handler, logs._Handler)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_the_record_and_the_context(stream: io.StringIO) -> None:
    """A line has event, level, logger, an ISO time, the extra fields and the request's id."""
    token = logs.REQUEST.set("r-1")
    logging.getLogger("a.b").warning("took %d s", 3, extra={"job": "j"})
    logs.REQUEST.reset(token)
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "took 3 s",
        "level": "warning",
        "logger": "a.b",
        "job": "j",
        "request_id": "r-1",
    }


def test_a_line_without_a_record_is_that_of_a_record(stream: io.StringIO) -> None:
    """`write` logs the line that the logger does, of levels that are logged, in the same order."""
    logger, fields = logging.getLogger("a.b"), {"status": 200, "stages": {"store": 0.25}}
    logging.root.handlers[:] = [each for each in logging.root.handlers if is_of_lines(each)]
    token = logs.REQUEST.set("r-1")
    logger.info("request", extra=fields)
    for level in (logging.DEBUG, logging.INFO):
        logs.write(logger, level, "request", fields)
    logs.REQUEST.reset(token)
    (expected, found) = lines(stream)
    assert list(found) == list(expected)
    assert {**found, "timestamp": expected["timestamp"]} == expected


@pytest.mark.parametrize("of_root", [True, False])
def test_other_handlers_see_records_of_lines(stream: io.StringIO, of_root: bool) -> None:
    """A handler of the logger itself, or beside that of the lines, gets a record from `write`."""
    logger, records = logging.getLogger("a.c"), queue.SimpleQueue[logging.LogRecord]()
    handled = logging.root if of_root else logger
    # pytest puts handlers of its own beside that of the lines.
    logging.root.handlers[:] = [each for each in logging.root.handlers if is_of_lines(each)]
    beside = QueueHandler(records)
    handled.addHandler(beside)
    logs.write(logger, logging.INFO, "request", {"status": 200})
    handled.removeHandler(beside)
    logs.write(logger, logging.INFO, "again", {"status": 404})
    assert vars(records.get_nowait())["status"] == 200
    assert records.empty()
    assert [line["event"] for line in lines(stream)] == ["request", "again"]


@pytest.mark.parametrize(
    ("error", "is_shown"),
    [(KeyError("user-7"), False), (ValueError("user-7"), False), (OSError(28, "user-7"), True)],
)
def test_messages_of_exceptions_are_logged_where_they_quote_no_data(
    stream: io.StringIO, error: Exception, is_shown: bool
) -> None:
    """A traceback has the frames and the type, and the message only of system errors."""
    try:
        raise error
    except Exception:
        logging.getLogger("a").exception("failed")
    (line,) = lines(stream)
    assert type(error).__name__ in line["exception"]
    assert "Traceback" in line["exception"]
    assert "test_logs.py" in line["exception"]
    assert ("user-7" in stream.getvalue()) is is_shown


def test_causes_come_before_what_they_caused(stream: io.StringIO) -> None:
    """A chained exception is logged after its cause."""
    try:
        try:
            raise KeyError("x")
        except KeyError as error:
            raise OSError("the end") from error
    except OSError:
        logging.getLogger("a").exception("failed")
    (line,) = lines(stream)
    assert line["exception"].index("KeyError") < line["exception"].index("the end")


def test_long_lines_are_cut_and_still_json(stream: io.StringIO) -> None:
    """However long a record is, its line is JSON of at most PIPE_BUF bytes and says what failed."""

    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise OSError("ü" * 900)

    try:
        deep(900)
    except OSError:
        logging.getLogger("a").exception("failed %s", "é" * 5_000)
    logging.getLogger("a").info("x" * 9_000, extra={f"f{n}": "y" * 900 for n in range(9)})
    # Only to this handler: no report of a test may hold a surrogate.
    (handler,) = (h for h in logging.getLogger().handlers if getattr(h, "stream", 0) is stream)
    odd = {"name": "a", "msg": "bad \ud800", "levelname": "INFO", "n": 1 << 70, "o": object()}
    handler.handle(logging.makeLogRecord(odd))
    found = lines(stream)
    assert len(found) == 3
    assert found[0]["exception"].endswith("ü")
    assert max(len(line.encode()) for line in stream.getvalue().splitlines()) < logs.MAX_LINE_BYTES


def test_warnings_and_reports_of_asyncio_are_one_sentence(stream: io.StringIO) -> None:
    """A warning is a line; the repr that asyncio appends to its sentence is not logged."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: <user-7>")
    careful, task = lines(stream)
    assert "careful" in careful["event"]
    assert task["event"] == "Task exception was never retrieved"


FAULTS = """
import logging, threading
from service.runtime import logs
logs.configure("info", "auto")
logging.getLogger("a").info("%d", "no number")
class Bad:
    def __del__(self):
        raise KeyError("user-7")
Bad()
def fail():
    raise KeyError("user-7")
thread = threading.Thread(target=fail, name="t1")
thread.start(); thread.join()
fail()
"""


def test_faults_are_lines_of_the_log() -> None:
    """Uncaught exceptions of any thread and finaliser, and faulty log calls, are JSON lines."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], check=False, capture_output=True, text=True
    )
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 1
    unwritten, *uncaught = found
    assert "could not be written" in unwritten["event"]
    assert [line["level"] for line in uncaught] == ["error", "critical", "critical"]
    assert all("KeyError" in line["exception"] for line in uncaught)
    assert "user-7" not in done.stderr


# ---------------------------------------------------------- failures in the background

LOG = logging.getLogger("heed.test")


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, bool]]:
    """The messages since the last call, and whether they have a traceback."""
    found = [(each.getMessage(), each.exc_info is not None) for each in caplog.records]
    caplog.clear()
    return found


def test_an_expected_failure_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Failures of stores and disks have a reason and no traceback; bugs have theirs."""
    log_failure(LOG, "it failed; it goes on", StoreUnreachable("no answer\n\tfrom the server"))
    log_failure(LOG, "it failed", OSError(28, "No space left on device"))
    log_failure(LOG, "it failed; it goes on", KeyError("x"))
    assert messages(caplog) == [
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
    assert messages(caplog) == [("a failed: no answer", False)]
    for _ in range(2):
        work.failed(LOG, "d", "d failed", KeyError("x"))
        work.failed(LOG, "e", "e failed", KeyError("x"))
    assert messages(caplog) == [("d failed", True), ("e failed", True)]
    for name in ("b", "a", "c"):
        work.succeeded(LOG, name)
    (back,) = messages(caplog)
    assert "again, after StoreUnreachable" in back[0]
    work.ended("d")
    work.failed(LOG, "d", "d failed", KeyError("x"))
    work.failed(LOG, "b", "b failed", StoreUnreachable("no answer"))
    assert messages(caplog) == [("d failed", True), ("b failed: no answer", False)]
