"""The floor: a bare FastAPI app that reads the same questions and writes the same answers.

It stores nothing, computes nothing, checks no more than the request's type, and runs as Heed does.

    python -m tests.benchmarks.http.floor ANSWERS.json [DATA]

Under each name in the file are two routes: `/typed/NAME` answers through the response model, as
FastAPI's tutorial does; `/plain/NAME` writes the bytes with orjson, as Heed does. With the data
directory that the answers are from, `/typed/NAME` does the job before it answers, which is the
least that a service of the same kind can do.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import orjson
import uvicorn
import uvloop
from fastapi import FastAPI, Response

from service.domain.settings import Settings
from service.http.bodies import Arrivals
from service.http.routes.context import Json
from service.http.routes.record_bodies import AppendedOut, EventsIn
from service.http.server import configure
from service.http.telemetry import Metrics
from service.questions.answers import AnswerOut
from service.questions.asked import RecommendIn, ScoreIn, SearchIn
from service.questions.scalars import Body

NONE: Mapping[str, Sequence[Callable[[], object]]] = {}
BODIES: dict[str, tuple[type[Body], Any]] = {
    "score": (ScoreIn, AnswerOut),
    "recommend": (RecommendIn, AnswerOut),
    "search": (SearchIn, AnswerOut),
    "events": (EventsIn, AppendedOut),
}


def floor_app(
    answers: dict[str, dict[str, Any]], works: Mapping[str, Sequence[Callable[[], object]]] = NONE
) -> FastAPI:
    """The app.

    Args:
        answers: by name, `{"ask": one of BODIES, "answer": what Heed answered}`.
        works: by name, what `/typed` does before it answers, one after the other.
    """
    app = FastAPI()
    for name, each in answers.items():
        body, model = BODIES[each["ask"]]
        typed, plain = _handlers(body, each["answer"], cycle(works.get(name, (_nothing,))))
        app.post(f"/typed/{name}", response_model=model, response_model_exclude_unset=True)(typed)
        app.post(f"/plain/{name}")(plain)
    return app


def _nothing() -> None:
    """The job of an app that has none."""


def _handlers(
    body: type[Body], answer: dict[str, Any], works: Iterator[Callable[[], object]]
) -> tuple[Callable[..., Awaitable[Any]], Callable[..., Awaitable[Response]]]:
    async def typed(question: Any) -> Any:  # read, and not needed
        next(works)()
        return answer

    async def plain(question: Any) -> Response:
        return Json(answer)

    for handler in (typed, plain):
        handler.__annotations__["question"] = body
    return typed, plain


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        sys.stdout.write(f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()


def load_app(path: Path, data: Path | None = None) -> FastAPI:
    """Make the app of a file of answers; with their data directory, one that does the job."""
    app = floor_app(orjson.loads(path.read_bytes()), NONE if data is None else _jobs(data))
    app.state.arrivals = Arrivals(Settings(), Metrics())
    return app


def main(path: Path, data: Path | None = None) -> None:
    """Serve until told to stop, with the settings of `service.http.server`."""
    app = load_app(path, data)
    gc.collect()
    gc.freeze()  # as Heed does
    config = configure(app, Settings(port=0))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Server(config).serve())


def _jobs(data: Path) -> Mapping[str, Sequence[Callable[[], object]]]:
    # Here, because the floor that computes nothing loads no torch.
    import torch

    from tests.benchmarks.workload.data import describe_data
    from tests.benchmarks.workload.in_process import jobs
    from tests.benchmarks.workload.loaded import load_data
    from tests.benchmarks.workload.questions import questions

    torch.set_num_threads(1)
    ground = describe_data(data, str(data))
    return jobs(ground, load_data(ground), questions(ground))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
