"""Times of requests: their stages, and the traces and metrics that OpenTelemetry exports.

The export needs the extra `otel`.

An endpoint (`OTEL_EXPORTER_OTLP_ENDPOINT`, or that of one signal) switches the export on; the
standard variables of the SDK apply. Without an endpoint, nothing of the SDK is imported. The
providers are not made global, so that libraries with instrumentation of their own add no spans.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

_log = logging.getLogger(__name__)

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_NEEDED = "opentelemetry.exporter.otlp.proto.http"
_NAME = "heed"

Attributes = Mapping[str, str | int | float | bool]
# The span that work at hand belongs to, as a context of OpenTelemetry; None without one.
_current: ContextVar[Any] = ContextVar("heed.span", default=None)


class _Stage:
    """One entry of a stage; `contextlib.contextmanager` would take three times as long."""

    __slots__ = ("clock", "name", "started")

    def __init__(self, clock: StageClock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        clock, name, ended = self.clock, self.name, time.perf_counter()
        clock.seconds[name] = clock.seconds.get(name, 0.0) + ended - self.started
        if clock.entries is not None:
            clock.entries.append((name, self.started, ended))


class StageClock:
    """Clock of one request: `with stages("store"): …` adds to the seconds of that stage.

    Stage names are RFC 9110 tokens, since they go into a header. A stage may be entered many times,
    and stages may nest; the time of an inner stage counts for the outer one too.
    """

    __slots__ = ("entries", "seconds", "started")

    def __init__(self, *, keep_entries: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()
        # Each entry of a stage with its begin and end, by `perf_counter`; None if not kept.
        self.entries: list[tuple[str, float, float]] | None = [] if keep_entries else None

    def __call__(self, name: str) -> _Stage:
        """Return a context manager that adds the time of its block to the stage `name`."""
        return _Stage(self, name)

    def header(self) -> str:
        """Return the value of `Server-Timing`: each stage and the total so far, in milliseconds."""
        total = time.perf_counter() - self.started
        parts = [f"{name};dur={1e3 * seconds:.3f}" for name, seconds in self.seconds.items()]
        parts.append(f"total;dur={1e3 * total:.3f}")
        return ", ".join(parts)


class Measurement(NamedTuple):
    """A number that is exported as a metric. The name of a counter ends in `_total`."""

    name: str
    kind: Literal["gauge", "counter"]
    description: str
    value: float
    labels: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class _Exports:
    traces: Any  # a TracerProvider, or None, and then there is no tracer
    metrics: Any  # a MeterProvider, or None, and then there is no histogram of durations
    tracer: Any
    durations: Any


_exports: _Exports | None = None


def start(version: str) -> bool:
    """Start exporting from this process, if its environment asks for it; call it after a fork."""
    global _exports  # noqa: PLW0603 - one for each process, as loggers are
    signals = [name for name in ("TRACES", "METRICS") if _is_wanted(name)]
    if not signals:
        return False
    try:
        is_installed = importlib.util.find_spec(_NEEDED) is not None
    except ModuleNotFoundError:
        is_installed = False
    if not is_installed:
        _log.warning("%s is set, but needs: pip install 'heed[otel]'", _ENDPOINT)
        return False
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    if protocol != "http/protobuf":
        _log.warning("OTEL_EXPORTER_OTLP_PROTOCOL is %s; exporting by http/protobuf", protocol)
    from opentelemetry.sdk.resources import Resource

    # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME take precedence.
    named = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or _NAME}
    resource = Resource.create({"service.version": version, "process.pid": os.getpid(), **named})
    traces = _trace_provider(resource) if "TRACES" in signals else None
    metrics = _meter_provider(resource) if "METRICS" in signals else None
    tracer = traces.get_tracer(_NAME, version) if traces else None
    durations = metrics and metrics.get_meter(_NAME, version).create_histogram(
        "http.server.request.duration", "s", "Seconds from arrival to the end of the answer."
    )
    _exports = _Exports(traces, metrics, tracer, durations)
    return True


def stop() -> None:
    """Export what is left. Blocks, for at most the exporter's timeout."""
    global _exports
    exports, _exports = _exports, None
    if exports is not None:
        for provider in (exports.traces, exports.metrics):
            if provider is not None:
                provider.shutdown()


class Span:
    """A span in progress, to which spans and log lines of its context belong."""

    def __init__(self, tracer: Any, span: Any, token: Token[Any]) -> None:
        self._tracer = tracer
        self._span = span
        self._token = token

    @property
    def trace_id(self) -> str:
        """The id of its trace, 32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def end(
        self, name: str, attributes: Attributes, stages: Iterable[tuple[str, int, int]], *, ok: bool
    ) -> None:
        """End the span under its final name; `stages` are its children, in nanoseconds of 1970."""
        from opentelemetry.trace import StatusCode

        for stage, begun, ended in stages:
            child = self._tracer.start_span(stage, context=_current.get(), start_time=begun)
            child.end(ended)
        self._span.update_name(name)
        self._span.set_attributes(dict(attributes))
        if not ok:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
        _current.reset(self._token)


def begin(headers: Sequence[tuple[bytes, bytes]]) -> Span | None:
    """Begin the span of a request, which continues the trace of its `traceparent`; None if off."""
    if _exports is None or (tracer := _exports.tracer) is None:
        return None
    from opentelemetry.trace import SpanKind, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers
        if name in {b"traceparent", b"tracestate"}
    }
    parent = TraceContextTextMapPropagator().extract(carrier)
    span = tracer.start_span("request", context=parent, kind=SpanKind.SERVER)
    return Span(tracer, span, _current.set(set_span_in_context(span, parent)))


def record(name: str, begun: int, ended: int, attributes: Attributes, *, ok: bool) -> None:
    """Record a span of the current context after its end; times are nanoseconds since 1970."""
    if _exports is None or (tracer := _exports.tracer) is None:
        return
    from opentelemetry.trace import StatusCode

    span = tracer.start_span(
        name, context=_current.get(), start_time=begun, attributes=dict(attributes)
    )
    if not ok:
        span.set_status(StatusCode.ERROR)
    span.end(ended)


def count_request(seconds: float, attributes: Attributes) -> None:
    """Add the duration of a request to the histogram of durations."""
    if _exports is not None and _exports.durations is not None:
        _exports.durations.record(seconds, dict(attributes))


def export_readings(read: Callable[[], Sequence[Measurement]]) -> None:
    """Export readings as metrics `heed.NAME`; `read` is called on the exporter's thread."""
    if _exports is None or _exports.metrics is None:
        return
    from opentelemetry.metrics import CallbackOptions, Observation

    meter = _exports.metrics.get_meter(_NAME)
    last: list[Measurement] = []
    taken = 0.0

    def latest() -> list[Measurement]:
        nonlocal taken
        if time.monotonic() - taken > 0.1:  # all instruments of one export share a reading
            last[:], taken = read(), time.monotonic()
        return last

    def observer(name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: [
            Observation(each.value, dict(each.labels)) for each in latest() if each.name == name
        ]

    described = {each.name: each for each in latest()}
    for name, each in described.items():
        make = (
            meter.create_observable_counter
            if each.kind == "counter"
            else meter.create_observable_gauge
        )
        exported = f"heed.{name.removesuffix('_total')}"
        make(exported, [observer(name)], _unit(name), each.description)


def _unit(name: str) -> str:
    plain = name.removesuffix("_total")
    return "s" if plain.endswith("_seconds") else "By" if plain.endswith("_bytes") else ""


def _is_wanted(signal: str) -> bool:
    named = os.environ.get
    if named("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if named(f"OTEL_{signal}_EXPORTER", "otlp").strip().lower() == "none":
        return False
    return bool(named(_ENDPOINT) or named(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"))


def _trace_provider(resource: Any) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _meter_provider(resource: Any) -> Any:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    return MeterProvider([reader], resource=resource, shutdown_on_exit=False)
