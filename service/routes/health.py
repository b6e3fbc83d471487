"""Whether the service lives, whether it can answer, and what it measured."""

from __future__ import annotations

import math

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import Scope

from service.limits import Traffic
from service.problems import documented, problem
from service.routes.context import In
from service.schemas.answers import Json, LiveOut, ReadyOut
from service.telemetry import Metrics

router = APIRouter(tags=["run"])

_EXEMPT = frozenset({"/", "/health/live", "/health/ready", "/metrics", "/docs", "/openapi.json"})


def is_exempt(scope: Scope) -> bool:
    """True for what must answer also when the service is full: it costs nothing."""
    return scope["path"].removeprefix(scope["root_path"]) in _EXEMPT


@router.get("/health/live", responses={200: {"model": LiveOut}})
async def live() -> Response:
    """The process answers; it says nothing more, to anyone."""
    return Json({"live": True})


@router.get("/health/ready", responses={200: {"model": ReadyOut}, **documented(503)})
async def ready(request: Request, context: In) -> Response:
    """200 when store and model answer and the service is not on its way out, else 503."""
    traffic: Traffic = request.app.state.traffic
    is_ready, checks = await context.engine.ready()
    if is_ready and not traffic.draining:
        return Json({"ready": True, "checks": dict(checks)})
    why = "The service is shutting down." if traffic.draining else "Store or model do not answer."
    return problem(
        request.scope,
        503,
        "Not Ready",
        why,
        headers={"Retry-After": "1"},
        ready=False,
        checks=dict(checks),
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request, context: In) -> Response:
    """Counters, gauges and histograms in the text format of Prometheus."""
    measured: Metrics = request.app.state.metrics
    gauges = {k: float(v) for k, v in (await context.engine.stats()).items() if math.isfinite(v)}
    return Response(measured.render(gauges), media_type=CONTENT_TYPE_LATEST)
