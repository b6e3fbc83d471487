"""Log lines of a training's process, passed on to the log of the service."""

from __future__ import annotations

import logging
from typing import Any

import orjson

_log = logging.getLogger("heed.training")

_LEVELS = {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}
# Set anew when the line is logged, or names that records have already.
_OWN = frozenset({"event", "level", "logger", "timestamp", "exception", "name", "message", "job"})


def log_child_line(line: str, job_id: str) -> str:
    """Log a line of stderr that is a log line of `service.runtime.logs`; return its text.

    Any other line is returned as it is and not logged: what libraries and Python print may quote
    the data.
    """
    event = _parse(line)
    if event is None:
        return line
    text = str(event["event"])
    fields = {f"training_{name}": value for name, value in event.items() if name not in _OWN}
    fields["job"] = job_id
    if exception := event.get("exception"):
        fields["exception"] = exception
        text = f"{text}: {str(exception).splitlines()[-1]}"
    level = _LEVELS.get(str(event["level"]), logging.INFO)
    _log.log(level, "%s", event["event"], extra=fields)
    return text


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = orjson.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"event", "level"} <= event.keys() else None
