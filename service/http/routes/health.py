"""Liveness, readiness and metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from service.engine.engine import Engine
from service.http.problems import documented, problem
from service.http.routes.context import Context, JsonRoute
from service.http.schemas.rendering import Json
from service.http.schemas.running import LiveOut, ReadyOut
from service.http.telemetry import Metrics, merge_workers
from service.http.telemetry.metrics import DEFAULT_NAMESPACE
from service.http.telemetry.workers import render_workers
from service.runtime.worker_messages import WorkerPeers

router = APIRouter(route_class=JsonRoute, tags=["run"])

_PATIENCE = 1.0  # seconds for the other workers to say what they measured
_PING = 1.0  # seconds for them to say that they run


@router.get("/health/live", responses={200: {"model": LiveOut}})
async def live() -> Response:
    """Answer 200 while the process runs."""
    return Json({"live": True})


@router.get("/health/ready", responses={200: {"model": ReadyOut}, **documented(503)})
async def ready(context: Context) -> Response:
    """Answer 200 when the store, the disk and all workers are well, else 503.

    The answer of a 503 has the same `checks`: `store` is false once nothing is written or the file
    is gone, `disk` when it is all but full, `workers` when one of them hangs.
    """
    peers: WorkerPeers | None = context.app.state.peers
    (is_ready, checks), silent = await asyncio.gather(
        context.engine.ready(), _silent_workers(peers)
    )
    if peers is not None:
        details = {**checks.get("details", {}), "workers": {"silent": silent}}
        checks = {**checks, "workers": not silent, "details": details}
    if is_ready and not silent:
        return Json({"ready": True, "checks": dict(checks)})
    failed = [name for name, passes in checks.items() if passes is False]
    return problem(
        context.scope,
        503,
        "Not Ready",
        f"These checks fail: {', '.join(failed)}.",
        headers={"Retry-After": "1"},
        ready=False,
        checks=dict(checks),
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(context: Context) -> Response:
    """Return the metrics of all workers in the text format of Prometheus."""
    peers: WorkerPeers | None = context.app.state.peers
    if peers is None:
        text = await render_metrics(context.app) + render_workers(None, [0])
        return Response(text, media_type=CONTENT_TYPE_LATEST)
    own, others = await asyncio.gather(render_metrics(context.app), peers.ask("metrics", _PATIENCE))
    texts = {**others, peers.number: own}
    text = merge_workers(texts) + render_workers(peers.table, texts)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def render_metrics(app: FastAPI) -> bytes:
    """Return the metrics of this process in the text format of Prometheus."""
    metrics: Metrics = app.state.metrics
    engine: Engine = app.state.engine
    return metrics.render({DEFAULT_NAMESPACE: await engine.measure()})


async def _silent_workers(peers: WorkerPeers | None) -> list[int]:
    return [] if peers is None else await peers.silent(_PING)
