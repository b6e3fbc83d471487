"""Routes of training, versions, health and metrics."""

from __future__ import annotations

import asyncio
import gzip
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.exposition import gzip_accepted
from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.types import Scope

from service.domain.keys import ApiKey
from service.domain.names import DEFAULT_NAMESPACE
from service.engine.namespaces import Namespaces
from service.http.access import namespace_of
from service.http.problems import documented, problem
from service.http.routes.context import Context, Json, JsonRoute
from service.http.routes.record_bodies import PathName
from service.http.scope_keys import ANONYMOUS, KEY
from service.http.telemetry import Metrics, merge_workers, render_workers
from service.jobs.job import JobState, job_document
from service.questions.scalars import Body, Options, Params, Timestamp
from service.runtime.workers import WorkerPeers

models_router = APIRouter(route_class=JsonRoute, tags=["models"])
health_router = APIRouter(route_class=JsonRoute, tags=["run"])

_PATIENCE = 1.0  # seconds for the other workers to say what they measured
_PING = 1.0  # seconds for them to say that they run


class TrainIn(Body):
    """Options of a training."""

    options: Options = Field(
        {},
        description="Options of `heed train`: `preset` (quick or best), `epochs`, `seed`.",
        examples=[{"preset": "best", "seed": 7}],
    )


class EmptyIn(Body):
    """An empty body: the path names the resource."""


class JobOut(BaseModel):
    """Id of a started job."""

    job_id: str


class JobDocument(BaseModel):
    """A job: its state, progress and result."""

    job_id: str
    state: JobState
    options: dict[str, Any] = Field(description="Those that the job was started with.")
    started_by: str | None = Field(description="The program and process that runs it.")
    created: Timestamp
    started: Timestamp | None
    finished: Timestamp | None
    progress: dict[str, Any] | None = Field(
        description="The last message of the training: `stage`, and `epoch`, `epochs`, `step`, "
        "`steps`, `loss` and `eta_s`, the seconds left in the stage, as far as it has them."
    )
    curve: list[dict[str, Any]] = Field(
        description="A point for each epoch: its `loss`, and the `hr` and `ndcg` on held-out "
        "events as last measured."
    )
    metrics: dict[str, Any] | None = Field(
        description="Of the result; until then, of the last measurement."
    )
    result: dict[str, Any] | None = Field(
        description="The `version` that was published, a `sentence` that says whether it is better "
        "than what is served, and, in its `verdict`, whether it `is_served`."
    )
    error: str | None = Field(description="Why the job failed or was cancelled.")


class JobsParams(Params):
    """Query parameters of the newest jobs."""

    limit: int = Field(20, ge=1, le=100, description="The most jobs, the newest first.")


class JobsOut(BaseModel):
    """The newest jobs, newest first."""

    jobs: list[JobDocument]


class ModelOut(BaseModel):
    """A version of the model."""

    version: str
    current: bool = Field(description="Whether it is served.")
    created: Timestamp | None
    bytes: int
    metrics: dict[str, Any] | None
    metadata: dict[str, Any]
    broken: str | None = Field(description="Why it cannot be served; null if it can.")


class ModelsOut(BaseModel):
    """The versions that exist, oldest first."""

    models: list[ModelOut]


class ActivatedOut(BaseModel):
    """The served version, and the one that was served before."""

    model_version: str
    previous: str


class LiveOut(BaseModel):
    """Liveness of the process."""

    live: bool


class ReadyOut(BaseModel):
    """Readiness, and the state of store and model."""

    ready: bool
    checks: dict[str, Any] | None = Field(None, description="With keys on, only to a key.")


# ---------------------------------------------------------------- training and versions


@models_router.post(
    "/v1/models/train", status_code=202, responses={202: {"model": JobOut}, **documented(409, 507)}
)
async def train(context: Context, body: TrainIn | None = None) -> Response:
    """Start training in the background; 409 while a training is running."""
    job_id = await context.engine.jobs.start({} if body is None else body.options)
    return Json({"job_id": job_id}, 202, headers={"Location": f"/v1/jobs/{job_id}"})


@models_router.get("/v1/jobs", responses={200: {"model": JobsOut}})
async def list_jobs(params: Annotated[JobsParams, Query()], context: Context) -> Response:
    """List the newest trainings, newest first; the service keeps a hundred."""
    jobs = await context.engine.jobs.latest(params.limit)
    return Json({"jobs": [job_document(job) for job in jobs]})


@models_router.get("/v1/jobs/{job_id}", responses={200: {"model": JobDocument}, **documented(404)})
async def get_job(job_id: PathName, context: Context) -> Response:
    """Read a job's state, progress and result."""
    return Json(job_document(await context.engine.jobs.get(job_id)))


@models_router.post(
    "/v1/jobs/{job_id}/cancel",
    status_code=202,
    responses={202: {"model": JobDocument}, **documented(404)},
)
async def cancel_job(
    job_id: PathName,
    context: Context,
    body: EmptyIn | None = None,  # noqa: ARG001  # refuses what it does not name
) -> Response:
    """Request that a training be stopped. An ended job does not change.

    The answer is the job as it is now; it is `cancelled` within some seconds, or `succeeded` if the
    training completes before.
    """
    return Json(job_document(await context.engine.jobs.cancel(job_id)), 202)


@models_router.get("/v1/models", responses={200: {"model": ModelsOut}})
async def list_models(context: Context) -> Response:
    """List the versions with their metrics."""
    models = await context.engine.models()
    return Json({"models": [dict(model) for model in models]})


@models_router.post(
    "/v1/models/{version}/activate",
    responses={200: {"model": ActivatedOut}, **documented(404, 409)},
)
async def activate(
    version: PathName,
    context: Context,
    body: EmptyIn | None = None,  # noqa: ARG001  # refuses what it does not name
) -> Response:
    """Serve this version from now on; requests in flight finish on theirs.

    A version that fails verification is refused with 409, and the old one goes on serving.
    """
    return Json(dict(await context.engine.activate(version)))


# --------------------------------------------------------------------- health and metrics


@health_router.get("/health/live", responses={200: {"model": LiveOut}})
async def live() -> Response:
    """Answer 200 while the process runs."""
    return Json({"live": True})


@health_router.get("/health/ready", responses={200: {"model": ReadyOut}, **documented(503)})
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


@health_router.get(
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
