"""Training in the background, and the versions of the model."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from service.http.problems import documented
from service.http.routes.context import Context, JsonRoute
from service.http.schemas.rendering import Json
from service.http.schemas.running import (
    ActivatedOut,
    JobDocument,
    JobOut,
    JobsOut,
    JobsParams,
    ModelsOut,
)
from service.http.schemas.scalars import PathName
from service.http.schemas.write import EmptyIn, TrainIn
from service.jobs.job import job_document

router = APIRouter(route_class=JsonRoute, tags=["models"])


@router.post(
    "/v1/models/train", status_code=202, responses={202: {"model": JobOut}, **documented(409, 507)}
)
async def train(context: Context, body: TrainIn | None = None) -> Response:
    """Start training in the background; 409 while a training is running."""
    job_id = await context.engine.jobs.start({} if body is None else body.options)
    return Json({"job_id": job_id}, 202, headers={"Location": f"/v1/jobs/{job_id}"})


@router.get("/v1/jobs", responses={200: {"model": JobsOut}})
async def list_jobs(params: Annotated[JobsParams, Query()], context: Context) -> Response:
    """List the newest trainings, newest first; the service keeps a hundred."""
    jobs = await context.engine.jobs.latest(params.limit)
    return Json({"jobs": [job_document(job) for job in jobs]})


@router.get("/v1/jobs/{job_id}", responses={200: {"model": JobDocument}, **documented(404)})
async def get_job(job_id: PathName, context: Context) -> Response:
    """Read a job's state, progress and result."""
    return Json(job_document(await context.engine.jobs.get(job_id)))


@router.post(
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


@router.get("/v1/models", responses={200: {"model": ModelsOut}})
async def list_models(context: Context) -> Response:
    """List the versions with their metrics."""
    models = await context.engine.models()
    return Json({"models": [dict(model) for model in models]})


@router.post(
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
