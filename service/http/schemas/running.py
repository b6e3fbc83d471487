"""Answers about training, models and health."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class JobOut(BaseModel):
    """Id of a started job."""

    job_id: str


class JobDocument(BaseModel):
    """A job: its state, progress and result."""

    model_config = ConfigDict(extra="allow")


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
    checks: dict[str, Any]
