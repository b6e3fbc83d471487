"""Traces and metrics that a real server sends to a collector by OTLP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.otlp_collector import Collector, attributes
from tests.support.server import Server
from tests.support.tiny import World, item_id
from tests.support.waiting import eventually

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "traced"}
USER = "private-user-4711"


def test_a_trace_goes_on_through_the_service(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's span continues the caller's trace, its stages and a training are its children."""
    data = world.copy(tmp_path / "data")
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        with Server(data) as server, server.client() as http:
            asked = {"user_id": USER, "item_ids": [item_id(0, 0)]}
            http.post("/v1/score", json=asked, headers=TRACEPARENT)
            http.get(f"/v1/users/{USER}/history")
            options = {"options": {"preset": "quick", "epochs": 1}}
            trained = http.post("/v1/models/train", json=options, headers=TRACEPARENT)
            job = trained.json()["job_id"]
            http.post(f"/v1/jobs/{job}/cancel", json={})
            eventually(lambda: any(span.name == "training" for span in collector.spans))
            eventually(lambda: "heed.events" in collector.metrics)
            eventually(lambda: "http.server.request.duration" in collector.metrics)
        spans = {span.name: span for span in collector.spans}

        score = spans["POST /v1/score"]
        assert (score.trace_id.hex(), score.parent_span_id.hex()) == (TRACE, PARENT)
        found = attributes(score.attributes)
        assert (found["http.route"], found["http.response.status_code"]) == ("/v1/score", 200)
        assert found["heed.request_id"] == "traced"
        stages = [s for s in collector.spans if s.parent_span_id == score.span_id]
        assert {"parse", "store", "attend"} <= {stage.name for stage in stages}
        for stage in stages:
            assert score.start_time_unix_nano <= stage.start_time_unix_nano
            assert stage.end_time_unix_nano <= score.end_time_unix_nano

        training = spans["training"]
        assert training.trace_id.hex() == TRACE
        assert training.parent_span_id == spans["POST /v1/models/train"].span_id
        assert attributes(training.attributes)["heed.job"] == job

        history = spans["GET /v1/users/{user_id}/history"]
        assert history.trace_id.hex() != TRACE  # without a header, a trace of its own
        assert all(USER not in str(span) for span in collector.spans)
        resource = collector.resources[0]
        assert resource["service.name"] == "heed"
        assert resource["deployment.environment.name"] == "test"
        (point,) = collector.metrics["heed.events"].gauge.data_points
        assert point.as_double == 480
        lines = [json.loads(line) for line in server.log().splitlines()]
        assert TRACE in {line.get("trace_id") for line in lines if line["event"] == "request"}


def test_nothing_is_imported_unless_it_is_asked_for() -> None:
    """Without OTEL_* variables, a server imports neither the SDK nor the exporter."""
    program = (
        "import sys; import service.http.server; from service.runtime import tracing;"
        "assert not tracing.start('1');"
        "unwanted = ('opentelemetry.sdk', 'opentelemetry.exporter');"
        "print([name for name in sys.modules if name.startswith(unwanted)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
