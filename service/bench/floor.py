"""The floor: a bare FastAPI app that reads the same questions and writes the same answers.

It stores nothing, computes nothing, checks no more than the request's type, and runs as Heed does.

    python -m service.bench.floor ANSWERS.json

Under each name in the file are two routes: `/typed/NAME` answers through the response model, as
FastAPI's tutorial does; `/plain/NAME` writes the bytes with orjson, as Heed does.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import uvicorn
import uvloop
from fastapi import FastAPI, Response
from pydantic import BaseModel

from service.listening import configure
from service.schemas.answers import AnswerOut
from service.schemas.ask import RecommendIn, ScoreIn, SearchIn
from service.schemas.base import Body
from service.schemas.rendering import Json
from service.schemas.stored import AppendedOut
from service.schemas.write import EventsIn

BODIES: dict[str, tuple[type[Body], type[BaseModel]]] = {
    "score": (ScoreIn, AnswerOut),
    "recommend": (RecommendIn, AnswerOut),
    "search": (SearchIn, AnswerOut),
    "events": (EventsIn, AppendedOut),
}


def floor_app(answers: dict[str, dict[str, Any]]) -> FastAPI:
    """The app.

    Args:
        answers: by name, `{"ask": one of BODIES, "answer": what Heed answered}`.
    """
    app = FastAPI()
    for name, each in answers.items():
        body, model = BODIES[each["ask"]]
        typed, plain = _handlers(body, each["answer"])
        app.post(f"/typed/{name}", response_model=model, response_model_exclude_unset=True)(typed)
        app.post(f"/plain/{name}")(plain)
    return app


def _handlers(
    body: type[Body], answer: dict[str, Any]
) -> tuple[Callable[..., Awaitable[Any]], Callable[..., Awaitable[Response]]]:
    async def typed(question: Any) -> Any:  # noqa: ARG001  # read, and not needed
        return answer

    async def plain(question: Any) -> Response:  # noqa: ARG001
        return Json(answer)

    for handler in (typed, plain):
        handler.__annotations__["question"] = body
    return typed, plain


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        sys.stdout.write(f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()


def main(path: Path) -> None:
    """Serve until told to stop; the settings are those of `serving_http`."""
    config = configure(floor_app(orjson.loads(path.read_bytes())), "127.0.0.1", 0, drain=10.0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Server(config).serve())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
