"""The floor: a bare FastAPI app that reads the same questions and writes the same answers.

It stores nothing, computes nothing, and checks no more than the types of a request.

    python -m tests.benchmarks.floor ANSWERS.json

The file has `{name: {"ask": "score", "answer": what Heed answered}}`. Under each name are two
routes: `/typed/NAME` answers through a response model, as FastAPI's tutorial does; `/plain/NAME`
writes the bytes with orjson.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel


class Score(BaseModel):
    """Body of a score."""

    user_id: str
    item_ids: list[str]
    at: str | None = None


class Recommend(BaseModel):
    """Body of a recommendation."""

    user_id: str
    limit: int
    at: str | None = None


class Search(BaseModel):
    """Body of a search."""

    query: str
    limit: int


class AnswerItem(BaseModel):
    """Item of an answer."""

    item_id: str
    score: float
    title: str | None = None
    parts: dict[str, float] | None = None
    reason: str | None = None
    weight: float | None = None
    matched: dict[str, float] | None = None


class Answer(BaseModel):
    """Answer of Heed, as far as clients of these questions see it."""

    items: list[AnswerItem]
    model_version: str
    retrieval: str
    degraded: bool
    rows_scanned: int | None = None
    memory_rows: int | None = None
    candidates: int | None = None
    keys_attended: int | None = None
    mass: float | None = None
    cursor: str | None = None


BODIES: dict[str, type[BaseModel]] = {"score": Score, "recommend": Recommend, "search": Search}


def floor_app(answers: dict[str, dict[str, Any]]) -> FastAPI:
    """The app of these answers."""
    app = FastAPI()
    for name, each in answers.items():
        typed, plain = _handlers(BODIES[each["ask"]], each["answer"])
        app.post(f"/typed/{name}", response_model=Answer, response_model_exclude_unset=True)(typed)
        app.post(f"/plain/{name}")(plain)
    return app


def _handlers(
    body: type[BaseModel], answer: dict[str, Any]
) -> tuple[Callable[..., Awaitable[Any]], Callable[..., Awaitable[Response]]]:
    async def typed(question: Any) -> Any:  # read, and not needed
        return answer

    async def plain(question: Any) -> Response:
        return Response(orjson.dumps(answer), media_type="application/json")

    for handler in (typed, plain):
        handler.__annotations__["question"] = body
    return typed, plain


class FloorServer(uvicorn.Server):
    """Prints its address once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets=sockets)
        sys.stdout.write(f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()


def serve(app: FastAPI) -> None:
    """Serve on a free port until told to stop."""
    gc.collect()
    gc.freeze()  # as Heed does
    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False, loop="uvloop")
    FloorServer(config).run()


if __name__ == "__main__":
    serve(floor_app(orjson.loads(Path(sys.argv[1]).read_bytes())))
