"""Answers about training, models and health, and the parameters of jobs."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from service.http.schemas.base import Params
from service.http.schemas.scalars import Timestamp
from service.jobs.job import JobState


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
