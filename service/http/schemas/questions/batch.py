"""Body and answer of a batch of questions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from service.http.schemas.base import Body, example

MAX_BATCH = 100


class BatchedIn(Body):
    """One question: the path of its route, and the body for it."""

    path: str = Field(examples=["/v1/search"])
    body: dict[str, Any] = Field(
        {}, description="The body, or the query parameters, of that route."
    )


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
    """Status of one question, and its answer or problem document."""

    status: int
    body: dict[str, Any]


class BatchOut(BaseModel):
    """One response for each question, in their order."""

    responses: list[BatchedOut]
