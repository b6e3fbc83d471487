"""Middleware around all that answer: gives a request its id and clock, counts and logs its end.

Every response has `X-Request-ID` (the client's own if that is plain) and `Server-Timing`
(https://www.w3.org/TR/server-timing/), which shows the stage that made an answer slow. The access
log has a line for each request that was answered, with the template of the route and never its
path, since paths carry ids of users and items; queries, bodies, headers and keys are not in it.
"""

from __future__ import annotations

import logging
import random
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.domain.stage_clock import StageClock
from service.http.access.route_scopes import RouteScopes
from service.http.clients.disconnects import CLOSED_REQUEST, DISCONNECTED
from service.http.telemetry.metrics import Metrics, method_label, route_label
from service.runtime import logs, tracing

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


REQUEST_ID = "heed.request_id"
STAGES = "heed.stages"


_PLAIN_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class Telemetry:
    """Pure ASGI middleware around all that answer: gives each request its id and its clock."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, access_log: AccessLog) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        span = tracing.begin(scope["headers"])
        stages = scope[STAGES] = StageClock(keep_entries=span is not None)
        request_id = scope[REQUEST_ID] = _request_id(scope)
        status = 500  # what a server answers when the app ends without an answer
        size = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode("ascii")),
                    (b"server-timing", stages.header().encode("ascii")),
                ]
            elif message["type"] == "http.response.body":
                size += len(message.get("body", b""))
            await send(message)

        token = logs.REQUEST.set(request_id)
        trace = logs.TRACE.set(None if span is None else span.trace_id)
        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            self._metrics.in_flight.dec()
            if DISCONNECTED in scope:
                status = CLOSED_REQUEST
            is_refused = "route" not in scope and status >= _REFUSED  # before the routing
            if "route" not in scope:
                routes: RouteScopes = scope["app"].state.route_scopes
                path = scope["path"].removeprefix(scope["root_path"])
                scope["route"] = routes.nearest(scope["method"], path)
            self._metrics.observe(scope, status, stages, is_refused=is_refused)
            self._access_log.write(scope, status, size, stages)
            self._export(scope, status, size, stages, span)
            logs.TRACE.reset(trace)
            logs.REQUEST.reset(token)

    def _export(
        self, scope: Scope, status: int, size: int, stages: StageClock, span: tracing.Span | None
    ) -> None:
        """Hand the request to OpenTelemetry, by the names of its semantic conventions."""
        method, route = method_label(scope), route_label(scope)
        attributes: dict[str, str | int | float | bool] = {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
        }
        now = time.perf_counter()
        tracing.count_request(now - stages.started, attributes)
        if span is not None:
            epoch = time.time_ns() - int(1e9 * now)  # of perf_counter
            children = [
                (name, epoch + int(1e9 * begun), epoch + int(1e9 * ended))
                for name, begun, ended in stages.entries or ()
            ]
            details = {
                **attributes,
                "http.response.body.size": size,
                "heed.request_id": scope[REQUEST_ID],
                "heed.namespace": scope.get("heed.namespace", "default"),
            }
            span.end(f"{method} {route}", details, children, ok=status < _SERVER_ERROR)


def _request_id(scope: Scope) -> str:
    """The caller's id when it is plain enough for logs and headers, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _PLAIN_ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex
