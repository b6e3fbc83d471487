"""Access log: a line for each request that was answered, without anything that a client sent.

A line has the template of the route and never its path, since paths carry ids of users and items;
neither queries, bodies, headers nor keys are in it.
"""

from __future__ import annotations

import logging
import random
import time

from starlette.types import Scope

from service.domain.stage_clock import StageClock
from service.http.telemetry.metrics import method_label, route_label
from service.runtime import logs

_log = logging.getLogger("heed.access")

_SERVER_ERROR = 500
# Probes and scrapes would be most of the log of a quiet service.
_PROBES = frozenset({"/health/live", "/health/ready", "/metrics"})
_REFUSED = 400


class AccessLog:
    """Writes a line of level `info` for a fraction of the requests, and for each server error.

    Probes and scrapes that succeed have the level `debug`.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def write(self, scope: Scope, status: int, size: int, stages: StageClock) -> None:
        """Log one finished request, with the bytes of its answer's body."""
        if status < _SERVER_ERROR and random.random() >= self._fraction:
            return
        route = route_label(scope)
        level = logging.DEBUG if route in _PROBES and status < _REFUSED else logging.INFO
        if not _log.isEnabledFor(level):
            return
        milliseconds = 1e3 * (time.perf_counter() - stages.started)
        fields = {
            "method": method_label(scope),
            "route": route,
            "status": status,
            "milliseconds": round(milliseconds, 3),
            "stages": {name: round(1e3 * each, 3) for name, each in stages.seconds.items()},
            "bytes": size,
            "namespace": scope.get("heed.namespace", "default"),
        }
        # The name of the API key and nothing else of it.
        if (key := getattr(scope.get("heed.key"), "name", None)) is not None:
            fields["key"] = key
        logs.write(_log, level, "request", fields)
