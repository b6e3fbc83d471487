"""Answers about training, models and health, and the parameters of jobs."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from service.http.schemas.base import Params


class JobOut(BaseModel):
    """Id of a started job."""

    job_id: str


class JobDocument(BaseModel):
    """A job: its state, progress and result.

    `curve` has a point for each epoch that was told of: its `loss`, and the `hr` and `ndcg` on
    held-out events as last measured. `result` has the `version` that was published, a `sentence`
    that says whether it is better than what is served, and, in its `verdict`, whether it
    `is_served`.
    """

    model_config = ConfigDict(extra="allow")


class JobsParams(Params):
    """Query parameters of the newest jobs."""

    limit: int = Field(20, ge=1, le=100, description="The most jobs, the newest first.")


class JobsOut(BaseModel):
    """The newest jobs, newest first."""

    jobs: list[JobDocument]


class ModelsOut(BaseModel):
    """The versions that exist, with their metrics."""

    models: list[dict[str, Any]]


class ActivatedOut(BaseModel):
    """The served version."""

    model_config = ConfigDict(extra="allow")


class LiveOut(BaseModel):
    """Liveness of the process."""

    live: bool


class ReadyOut(BaseModel):
    """Readiness, and the state of store and model."""

    ready: bool
    checks: dict[str, Any] | None = Field(None, description="With keys on, only to a key.")
