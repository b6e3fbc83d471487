"""Request ids, stage timings and Prometheus metrics.

Every response has `X-Request-ID` (the client's own if that is plain) and `Server-Timing`
(https://www.w3.org/TR/server-timing/), which shows the stage that made an answer slow. The same
stage clock feeds the histograms, in a registry of its own for each app.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Mapping
from functools import cache

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.domain.stage_clock import StageClock
from service.http.clients.disconnects import CLOSED_REQUEST, DISCONNECTED

REQUEST_ID = "heed.request_id"
STAGES = "heed.stages"

_PLAIN_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_ERRORS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)
# Any other method is counted as OTHER, for each label value makes a new time series.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """The counters and histograms of one app, in a registry that no other app shares."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        requests = Counter(
            "heed_http_requests",
            "Requests answered, by route and status.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        seconds = Histogram(
            "heed_http_request_duration_seconds",
            "Seconds from a request's arrival to the end of its answer.",
            ("method", "route"),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        stage_seconds = Histogram(
            "heed_http_stage_duration_seconds",
            "Seconds that a request spent in one stage of its work.",
            ("route", "stage"),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.attention_error = Histogram(
            "heed_attention_relative_error",
            "True relative error of a target's contexts over a long history, of a share of answers "
            "computed again exactly.",
            buckets=_ERRORS,
            registry=self.registry,
        )
        self.attention_beyond = Counter(
            "heed_attention_error_bound_exceeded",
            "Targets of those whose true error was larger than the one that was stated.",
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "heed_http_in_flight", "Requests being answered now.", registry=self.registry
        )
        # Looking a series up by its labels takes longer than counting.
        self.requests = cache(requests.labels)
        self.seconds = cache(seconds.labels)
        self.stage_seconds = cache(stage_seconds.labels)

    def observe_error(self, true: float, stated: float) -> None:
        """Count one target whose true error is known."""
        self.attention_error.observe(true)
        if true > stated:
            self.attention_beyond.inc()

    def observe(self, scope: Scope, status: int, stages: StageClock) -> None:
        """Count one finished request."""
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        # The route's template, never the path: paths carry ids, and ids are without number.
        route = getattr(scope.get("route"), "path", "unmatched")
        self.requests(method, route, str(status)).inc()
        self.seconds(method, route).observe(time.perf_counter() - stages.started)
        for stage, seconds in stages.seconds.items():
            self.stage_seconds(route, stage).observe(seconds)

    def render(self, gauges: Mapping[str, float]) -> bytes:
        """All metrics in the text format of Prometheus, with the engine's current `gauges`."""
        families = [
            GaugeMetricFamily(f"heed_{name}", f"The engine's {name} now.", value=value)
            for name, value in sorted(gauges.items())
        ]
        return generate_latest(self.registry) + generate_latest(_Families(families))


def merge_workers(texts: Mapping[int, bytes]) -> bytes:
    """Merge what each worker renders, by its number; each series gets its `worker` label.

    Workers are not summed up: a worker that is started again counts from 0, which a reader of the
    sums could not tell from a worker that has ended.
    """
    merged: dict[str, Metric] = {}
    for number, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text.decode()):
            described = Metric(family.name, family.documentation, family.type)
            metric = merged.setdefault(family.name, described)
            for sample in family.samples:
                labels = {**sample.labels, "worker": str(number)}
                metric.add_sample(sample.name, labels, sample.value)
    return generate_latest(_Families(merged.values()))


class _Families(Collector):
    """Metric families with their values, as a collector."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class Telemetry:
    """Pure ASGI middleware, the outermost: gives each request its id and its clock."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stages = scope[STAGES] = StageClock()
        request_id = scope[REQUEST_ID] = _request_id(scope)
        status = 500  # what a server answers when the app ends without an answer

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode("ascii")),
                    (b"server-timing", stages.header().encode("ascii")),
                ]
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            self._metrics.in_flight.dec()
            is_closed = DISCONNECTED in scope
            self._metrics.observe(scope, CLOSED_REQUEST if is_closed else status, stages)


def _request_id(scope: Scope) -> str:
    """The caller's id when it is plain enough for logs and headers, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _PLAIN_ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex
