"""Lines on stderr of a training's process: those of its log go on to the service's log."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from service.jobs.runner import log_child_line

CHILD = """
import logging
from service.runtime import logs
logs.configure("info", "json", uncaught=False)
logging.getLogger("a").warning("starts anew", extra={"rows": 3})
try:
    raise OSError(28, "No space left")
except OSError:
    logging.getLogger("a").exception("not written")
print("user-7 was printed", file=__import__("sys").stderr)
raise KeyError("user-7")
"""


def test_lines_of_the_log_go_on_and_others_do_not(caplog: pytest.LogCaptureFixture) -> None:
    """Log lines keep level and fields and get the job; what else is printed is not logged."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD], check=False, capture_output=True, text=True
    )
    lines = done.stderr.splitlines()
    with caplog.at_level(logging.INFO):
        texts = [log_child_line(line, "j1") for line in lines]
    warning, error = caplog.records
    assert (warning.levelno, warning.getMessage()) == (logging.WARNING, "starts anew")
    assert vars(warning) | {"job": "j1", "training_rows": 3} == vars(warning)
    assert (error.levelno, vars(error)["job"]) == (logging.ERROR, "j1")
    assert "No space left" in vars(error)["exception"]
    assert "user-7" not in caplog.text
    # The record of the job has a sentence of each, and all that was printed.
    assert texts[:2] == ["starts anew", "not written: OSError: [Errno 28] No space left"]
    assert texts[2:] == lines[2:]
    assert texts[-1] == "KeyError: 'user-7'"


def test_json_that_is_no_log_line_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    for line in (json.dumps({"event": "x"}), "[1]", "3", "{"):
        assert log_child_line(line, "j1") == line
    assert caplog.records == []
