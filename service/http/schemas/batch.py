"""Several questions in one request, and their answers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from service.http.schemas.base import Body, example

MAX_BATCH = 100


class BatchedIn(Body):
    """One question: where it would be posted, and the body that it would have there."""

    path: str = Field(examples=["/v1/search"])
    body: dict[str, Any] = Field({}, description="What that route takes.")


class BatchIn(Body):
    """Questions to answer in order."""

    model_config = example(
        requests=[
            {"path": "/v1/search", "body": {"query": "asyncio", "limit": 3}},
            {"path": "/v1/items/talk-7/similar", "body": {"limit": 3}},
        ]
    )

    requests: Annotated[list[BatchedIn], Field(min_length=1, max_length=MAX_BATCH)]


class BatchedOut(BaseModel):
    """What one question got: its own status, and its answer or the problem with it."""

    status: int
    body: dict[str, Any]


class BatchOut(BaseModel):
    """An answer for each question, in their order."""

    responses: list[BatchedOut]
