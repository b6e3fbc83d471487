"""What is answered about training, models and health."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class JobOut(BaseModel):
    """A job that was started."""

    job_id: str


class JobDocument(BaseModel):
    """A job: its state, progress and result."""

    model_config = ConfigDict(extra="allow")


class ModelsOut(BaseModel):
    """The versions that exist, with their metrics."""

    models: list[dict[str, Any]]


class ActivatedOut(BaseModel):
    """The version that serves now."""

    model_config = ConfigDict(extra="allow")


class LiveOut(BaseModel):
    """The process answers."""

    live: bool


class ReadyOut(BaseModel):
    """Store and model answer."""

    ready: bool
    checks: dict[str, Any]
