"""Liveness, readiness and metrics."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from service.engine.engine import Engine
from service.http.access.access_control import ANONYMOUS
from service.http.problems import documented, problem
from service.http.routes.context import Context, JsonRoute
from service.http.schemas.rendering import Json
from service.http.schemas.running import LiveOut, ReadyOut
from service.http.telemetry import Metrics, merge_workers
from service.runtime.worker_messages import WorkerPeers

router = APIRouter(route_class=JsonRoute, tags=["run"])

_PATIENCE = 1.0  # seconds for the other workers to say what they measured


@router.get("/health/live", responses={200: {"model": LiveOut}})
async def live() -> Response:
    """Answer 200 while the process runs."""
    return Json({"live": True})


@router.get("/health/ready", responses={200: {"model": ReadyOut}, **documented(503)})
async def ready(context: Context) -> Response:
    """Answer 200 when store and model answer, else 503. Where keys are on, a key sees `checks`."""
    is_ready, checks = await context.engine.ready()
    seen = {} if context.scope[ANONYMOUS] else {"checks": dict(checks)}
    if is_ready:
        return Json({"ready": True, **seen})
    return problem(
        context.scope,
        503,
        "Not Ready",
        "Store or model do not answer.",
        headers={"Retry-After": "1"},
        ready=False,
        **seen,
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(context: Context) -> Response:
    """Return the metrics of all workers in the text format of Prometheus."""
    peers: WorkerPeers | None = context.app.state.peers
    text = await render_metrics(context.app)
    if peers is not None:
        others = await peers.ask("metrics", _PATIENCE)
        text = merge_workers({**others, peers.number: text})
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def render_metrics(app: FastAPI) -> bytes:
    """Return the metrics of this process in the text format of Prometheus."""
    metrics: Metrics = app.state.metrics
    engine: Engine = app.state.engine
    return metrics.render(await engine.stats())
