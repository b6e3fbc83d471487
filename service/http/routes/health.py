"""Liveness, readiness and metrics."""

from __future__ import annotations

import asyncio
import gzip

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.exposition import gzip_accepted
from starlette.responses import Response
from starlette.types import Scope

from service.domain.keys import ApiKey
from service.domain.names import DEFAULT_NAMESPACE
from service.engine.namespaces import Namespaces
from service.http.access.access_control import ANONYMOUS, KEY
from service.http.access.engines import namespace_of
from service.http.problems import documented, problem
from service.http.routes.context import Context, JsonRoute
from service.http.schemas.rendering import Json
from service.http.schemas.running import LiveOut, ReadyOut
from service.http.telemetry import Metrics, merge_workers
from service.http.telemetry.metrics import render_workers
from service.runtime.workers import WorkerPeers

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

    If keys are on, a key sees the `checks` of its namespace, also those of a 503: `store` is
    false once nothing is written or the file is gone, `disk` when it is all but full, `workers`
    when one of them hangs. `checks.namespaces` has the other namespaces in use, for a key that may
    read all metrics; a failure of theirs is no 503.
    """
    peers: WorkerPeers | None = context.app.state.peers
    namespaces: Namespaces = context.app.state.namespaces
    (is_ready, checks), silent = await asyncio.gather(
        namespaces.ready(namespace_of(context.scope)), _silent_workers(peers)
    )
    if _watches_all(context.scope) and (others := await namespaces.ready_others()):
        checks = {**checks, "namespaces": others}
    if peers is not None:
        details = {**checks.get("details", {}), "workers": {"silent": silent}}
        checks = {**checks, "workers": not silent, "details": details}
    seen = {} if context.scope[ANONYMOUS] else {"checks": dict(checks)}
    if is_ready and not silent:
        return Json({"ready": True, **seen})
    failed = ", ".join(name for name, passes in checks.items() if passes is False)
    return problem(
        context.scope,
        503,
        "Not Ready",
        f"These checks fail: {failed}." if seen else "The service is not ready; a key sees why.",
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
    """Return the metrics of all workers in the text format of Prometheus, by gzip if accepted.

    A request that is about another namespace than `default` gets the series of that one alone.
    """
    peers: WorkerPeers | None = context.app.state.peers
    name = namespace_of(context.scope)
    if peers is None:
        text = await render_metrics(context.app, name)
        workers = render_workers(None, [0])
        return _as_metrics(text + workers if name == DEFAULT_NAMESPACE else text, context)
    own, others = await asyncio.gather(
        render_metrics(context.app, name), peers.ask(f"metrics {name}", _PATIENCE)
    )
    texts = {**others, peers.number: own}
    text = merge_workers(texts)
    workers = render_workers(peers.table, texts)
    return _as_metrics(text + workers if name == DEFAULT_NAMESPACE else text, context)


def _as_metrics(text: bytes, context: Context) -> Response:
    headers = {"Vary": "Accept-Encoding"}
    if gzip_accepted(context.headers.get("accept-encoding", "")):
        # The page fetches them every second, and they are a tenth of the size so.
        text, headers["Content-Encoding"] = gzip.compress(text, compresslevel=1), "gzip"
    return Response(text, headers=headers, media_type=CONTENT_TYPE_LATEST)


async def render_metrics(app: FastAPI, namespace: str) -> bytes:
    """Return the metrics of this process, of `default` all, as `Metrics.render` does."""
    metrics: Metrics = app.state.metrics
    namespaces: Namespaces = app.state.namespaces
    only = None if namespace == DEFAULT_NAMESPACE else namespace
    if only is not None:
        namespaces.refresh(only)
    engines = {
        name: await engine.measure()
        for name, engine in namespaces.engines().items()
        if only in (None, name)
    }
    return metrics.render(engines, only=only)


def _watches_all(scope: Scope) -> bool:
    """Report whether a request's key may read the metrics of all namespaces."""
    if scope[ANONYMOUS] or namespace_of(scope) != DEFAULT_NAMESPACE:
        return False
    key: ApiKey | None = scope[KEY]
    return key is None or key.permits(frozenset({"metrics"}))


async def _silent_workers(peers: WorkerPeers | None) -> list[int]:
    return [] if peers is None else await peers.silent(_PING)
