"""Telemetry: the id and the clock of each request, log lines, metrics and traces."""

from __future__ import annotations

import asyncio
import logging
import platform
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import __version__
from service.engine.engine import Engine
from service.http.access import RouteTable
from service.http.scope_keys import CLOSED_REQUEST, DISCONNECTED, REQUEST_ID, SERVED, STAGES
from service.runtime import logs, tracing
from service.runtime.logs import log_failure
from service.runtime.tracing import Measurement, StageClock
from service.runtime.workers import WorkerRow, WorkerTable
from service.stores.sqlite.schema import SCHEMA_VERSION

# metrics --------------------------------------------------------------------------------

NAMESPACE_LABEL = "namespace"
BUILD = {
    "version": __version__,
    "schema": str(SCHEMA_VERSION),
    "python": platform.python_version(),
}
# Limits that refuse requests: of requests, streams, bytes and connections, and the deadline.
REFUSALS = ("requests", "streams", "bodies", "connections", "deadline")

# They double the text, and Prometheus itself notices when a counter was reset.
disable_created_metrics()  # type: ignore[no-untyped-call]

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
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
            "Seconds from a request's arrival to the end of its answer, without refusals.",
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
        self.in_flight = Gauge(
            "heed_http_in_flight", "Requests being answered now.", registry=self.registry
        )
        self._namespace_requests = Counter(
            "heed_namespace_requests",
            "Requests under /v1/, by namespace, route and status.",
            ("method", NAMESPACE_LABEL, "route", "status"),
            registry=self.registry,
        )
        self._namespace_seconds = Histogram(
            "heed_namespace_request_duration_seconds",
            "Seconds from the arrival of a request under /v1/ to the end of its answer, without "
            "refusals.",
            (NAMESPACE_LABEL,),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._errors = Counter(
            "heed_errors",
            "Requests answered with a problem, by the type of the error.",
            ("type",),
            registry=self.registry,
        )
        self._refused = Counter(
            "heed_admission_refused",
            "Requests refused or given up because of a limit, by the limit.",
            ("reason",),
            registry=self.registry,
        )
        self._admitted = Gauge(
            "heed_admission_in_flight",
            "Requests that hold a place now.",
            ("kind",),
            registry=self.registry,
        )
        self._places = Gauge(
            "heed_admission_limit", "Places for requests.", ("kind",), registry=self.registry
        )
        self.deadline = Gauge(
            "heed_deadline_seconds",
            "Seconds that a request may take (`HEED_DEADLINE`).",
            registry=self.registry,
        )
        Info(
            "heed_build", "Versions of Heed, its store's schema and Python.", registry=self.registry
        ).info(BUILD)
        for reason in REFUSALS:
            self._refused.labels(reason)  # a series from the start, for rates
        # Looking a series up by its labels takes longer than counting.
        self.namespace_requests = cache(self._namespace_requests.labels)
        self.namespace_seconds = cache(self._namespace_seconds.labels)
        self.requests = cache(requests.labels)
        self.seconds = cache(seconds.labels)
        self.stage_seconds = cache(stage_seconds.labels)

    def forget_namespace(self, namespace: str) -> None:
        for metric in (self._namespace_requests, self._namespace_seconds):
            metric.remove_by_labels({NAMESPACE_LABEL: namespace})
        self.namespace_requests.cache_clear()
        self.namespace_seconds.cache_clear()

    def count_error(self, kind: str) -> None:
        self._errors.labels(kind).inc()

    def count_refusal(self, reason: str) -> None:
        """Count one request that a limit refused or ended; `reason` is one of `REFUSALS`."""
        self._refused.labels(reason).inc()

    def watch_places(self, kind: str, limit: int, in_flight: Callable[[], int]) -> None:
        """Show the number of places for a kind of request, and those that are taken."""
        self._places.labels(kind).set(limit)
        self._admitted.labels(kind).set_function(in_flight)

    def observe(
        self, scope: Scope, status: int, stages: StageClock, *, is_refused: bool = False
    ) -> None:
        """Count one finished request; a refusal without its time, which would look fast."""
        method, route = method_label(scope), route_label(scope)
        seconds = time.perf_counter() - stages.started
        namespace = scope.get(SERVED)
        self.requests(method, route, str(status)).inc()
        if namespace is not None:
            self.namespace_requests(method, namespace, route, str(status)).inc()
        if is_refused:
            return
        self.seconds(method, route).observe(seconds)
        if namespace is not None:
            self.namespace_seconds(namespace).observe(seconds)
        for stage, spent in stages.seconds.items():
            self.stage_seconds(route, stage).observe(spent)

    def render(
        self, engines: Mapping[str, Iterable[Measurement]], *, only: str | None = None
    ) -> bytes:
        """Return the metrics in the text format of Prometheus.

        Args:
            engines: the current measurements of each engine, by the name of its namespace.
            only: a namespace, to which the series are limited.
        """
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for namespace, measurements in engines.items():
            for each in measurements:
                family = families.get(each.name)
                if family is None:
                    made = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
                    labels = (*each.labels, NAMESPACE_LABEL)
                    family = made(f"heed_{each.name}", each.description, labels=labels)
                    families[each.name] = family
                family.add_metric((*each.labels.values(), namespace), each.value)
        own = generate_latest(Families(families.values()))
        if only is None:
            return generate_latest(self.registry) + own
        counted = (_of_namespace(metric, only) for metric in self.registry.collect())
        return generate_latest(Families(metric for metric in counted if metric.samples)) + own


def _of_namespace(metric: Metric, namespace: str) -> Metric:
    chosen = Metric(metric.name, metric.documentation, metric.type, metric.unit)
    chosen.samples = [
        each for each in metric.samples if each.labels.get(NAMESPACE_LABEL) == namespace
    ]
    return chosen


class Families(Collector):
    """Metric families with their values, as a collector."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def method_label(scope: Scope) -> str:
    """The method of a request, `OTHER` for one that HTTP does not define."""
    return scope["method"] if scope["method"] in _METHODS else "OTHER"


def route_label(scope: Scope) -> str:
    """The template of a request's route, never its path, which carries ids without number."""
    return getattr(scope.get("route"), "path", "unmatched")


# metrics of several workers -------------------------------------------------------------

_LABEL = ("worker",)


def merge_workers(texts: Mapping[int, bytes]) -> bytes:
    """Merge what each worker renders, by its number; each series gets its `worker` label.

    The label is put into the lines of the text, in the order of the families: prometheus_client's
    parser takes some fifty times as long, on the event loop.
    """
    heads: dict[str, list[str]] = {}  # of each family, its HELP and TYPE
    samples: dict[str, list[str]] = {}
    for number, text in sorted(texts.items()):
        label = f'worker="{number}"'
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, label))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "\n".join([*lines, ""]).encode()


def render_workers(table: WorkerTable | None, answered: Iterable[int]) -> bytes:
    """Render what is known of each worker: that it answered, its start and its restarts.

    Without a table this process is the only one, number 0.
    """
    answering = set(answered)
    rows = (
        [WorkerRow(True, _started, 0)]
        if table is None
        else [table[number] for number in range(len(table))]
    )
    up = GaugeMetricFamily(
        "heed_worker_up", "1 for a worker that answered this scrape in time.", labels=_LABEL
    )
    uptime = GaugeMetricFamily(
        "heed_worker_uptime_seconds", "Seconds since the worker's process started.", labels=_LABEL
    )
    restarts = CounterMetricFamily(
        "heed_worker_restarts", "Times that the worker's process was replaced.", labels=_LABEL
    )
    for number, row in enumerate(rows):
        label = (str(number),)
        up.add_metric(label, float(number in answering))
        running_for = time.monotonic() - row.started if row.is_running else 0.0
        uptime.add_metric(label, running_for)
        restarts.add_metric(label, row.restarts)
    return generate_latest(Families([up, uptime, restarts]))


_started = time.monotonic()


def _labelled(line: str, label: str) -> str:
    """Put one more label into a sample's line; the value has no brace, whatever labels have."""
    name, brace, value = line.rpartition("} ")
    if brace:
        return f"{name},{label}}} {value}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"


# middleware -----------------------------------------------------------------------------

_access_log = logging.getLogger("heed.access")
_log = logging.getLogger(__name__)

_SERVER_ERROR = 500
# Logged at level `debug`, or they would be most of the log of a quiet service.
_PROBES = frozenset({"/health/live", "/health/ready", "/metrics"})
_REFUSED = 400


_PLAIN_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class Telemetry:
    """Pure ASGI middleware around all that answer: gives each request its id and its clock."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, logged: float) -> None:
        self._app = app
        self._metrics = metrics
        self._logged = logged  # fraction of the requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
                table: RouteTable = scope["app"].state.route_table
                path = scope["path"].removeprefix(scope["root_path"])
                scope["route"] = table.nearest(scope["method"], path)
            self._metrics.observe(scope, status, stages, is_refused=is_refused)
            self._log(scope, status, size, stages)
            self._export(scope, status, size, stages, span)
            logs.TRACE.reset(trace)
            logs.REQUEST.reset(token)

    def _log(self, scope: Scope, status: int, size: int, stages: StageClock) -> None:
        """Write a line for a fraction of the requests, and for each server error."""
        if status < _SERVER_ERROR and random.random() >= self._logged:
            return
        route = route_label(scope)
        level = logging.DEBUG if route in _PROBES and status < _REFUSED else logging.INFO
        if not _access_log.isEnabledFor(level):
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
        logs.write(_access_log, level, "request", fields)

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


# OpenTelemetry --------------------------------------------------------------------------

_PATIENCE = 5.0  # seconds for the event loop to measure


def export_measurements(engine: Engine) -> None:
    """Export what `/metrics` has of an engine. Call it on the event loop that serves it."""
    loop = asyncio.get_running_loop()

    def read() -> Sequence[Measurement]:
        measured = asyncio.run_coroutine_threadsafe(engine.measure(), loop)
        try:
            return measured.result(_PATIENCE)
        except Exception as error:  # noqa: BLE001 - the next export may succeed
            measured.cancel()
            log_failure(_log, "an engine was not measured for OpenTelemetry", error)
            return []

    # Instruments are named by a first reading, for which the loop must be free.
    loop.run_in_executor(None, tracing.export_readings, read)
