"""Liveness, readiness and metrics."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from service.domain.names import DEFAULT_NAMESPACE
from service.engine.namespaces import Namespaces
from service.http.access.access_control import ANONYMOUS
from service.http.engines import namespace_of
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
    """Answer 200 when store and model answer, else 503. Where keys are on, a key sees `checks`.

    `checks.namespaces` has the other namespaces in use; a failure of theirs is no 503.
    """
    namespaces: Namespaces = context.app.state.namespaces
    is_ready, checks = await namespaces.ready(namespace_of(context.scope))
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
    """Return the metrics of all workers in the text format of Prometheus.

    A request that is about another namespace than `default` gets the series of that one alone.
    """
    peers: WorkerPeers | None = context.app.state.peers
    name = namespace_of(context.scope)
    text = await render_metrics(context.app, name)
    if peers is not None:
        others = await peers.ask(f"metrics {name}", _PATIENCE)
        text = merge_workers({**others, peers.number: text})
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def render_metrics(app: FastAPI, namespace: str) -> bytes:
    """Return the metrics of this process, of `default` all, as `Metrics.render` does."""
    metrics: Metrics = app.state.metrics
    namespaces: Namespaces = app.state.namespaces
    only = None if namespace == DEFAULT_NAMESPACE else namespace
    engines = namespaces.engines()
    gauges = {
        name: await engine.stats() for name, engine in engines.items() if only in (None, name)
    }
    return metrics.render(gauges, only=only)
