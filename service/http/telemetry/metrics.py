"""Metrics of one process for Prometheus, in a registry of its own for each app."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping
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
from starlette.types import Scope

from service import __version__
from service.domain.stage_clock import StageClock
from service.engine.monitoring.measurements import Measurement
from service.stores.sqlite.schema import SCHEMA_VERSION

SERVED = "heed.served"  # the namespace, which exists, that a request under /v1/ is about
NAMESPACE_LABEL = "namespace"
BUILD = {
    "version": __version__,
    "schema": str(SCHEMA_VERSION),
    "python": platform.python_version(),
}
# Limits that refuse requests: of requests, streams, bytes and connections, and the deadline.
REFUSALS = ("requests", "streams", "bodies", "connections", "deadline")

# They double the text, and Prometheus knows by itself when a counter was reset.
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
        """Drop the series of a namespace that was removed."""
        for metric in (self._namespace_requests, self._namespace_seconds):
            metric.remove_by_labels({NAMESPACE_LABEL: namespace})
        self.namespace_requests.cache_clear()
        self.namespace_seconds.cache_clear()

    def count_error(self, kind: str) -> None:
        """Count one request that was answered with a problem."""
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
            only: a namespace, of which alone there are series then.
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
    """Return the samples of a metric that are of one namespace."""
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
        """Return the families."""
        return self._families


def method_label(scope: Scope) -> str:
    """The method of a request, `OTHER` for one that HTTP does not define."""
    return scope["method"] if scope["method"] in _METHODS else "OTHER"


def route_label(scope: Scope) -> str:
    """The template of a request's route, never its path, which carries ids without number."""
    return getattr(scope.get("route"), "path", "unmatched")
