"""Observation of requests: their ids, stage times, log lines, metrics and traces."""

from service.http.telemetry.metrics import Metrics, merge_workers
from service.http.telemetry.middleware import REQUEST_ID, STAGES, Telemetry

__all__ = ["REQUEST_ID", "STAGES", "Metrics", "Telemetry", "merge_workers"]
