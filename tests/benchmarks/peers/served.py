"""Requests, responses and the server of the FastAPI apps of peers.

Runs in the environments of peers: only FastAPI and uvicorn are imported.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class Question(BaseModel):
    """Score items for a user, or recommend to them from all that they have not had."""

    user: int
    targets: list[int] | None = None
    limit: int = 20
    fresh: bool = False  # with what the user did since the model was fitted, where that costs more


class Lists(NamedTuple):
    """Functions by which a library answers."""

    answer: Callable[[Question], tuple[Sequence[int], Sequence[float]]]
    everyone: Callable[[int], int]  # lists for all users in one call; how many users
    settings: str  # chosen how, in words


def app_of(lists: Lists) -> FastAPI:
    """Routes of an app; plain functions, which FastAPI runs on threads beside its loop."""
    app = FastAPI()

    @app.post("/ask")
    def ask(question: Question) -> dict[str, Any]:
        items, scores = lists.answer(question)
        return {"items": list(items), "scores": list(scores)}

    @app.post("/everyone")
    def everyone(question: Question) -> dict[str, Any]:
        started = time.perf_counter()
        users = lists.everyone(question.limit)
        return {"users": users, "seconds": time.perf_counter() - started}

    @app.post("/settings")
    def settings() -> dict[str, str]:
        return {"settings": lists.settings}

    return app


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        sys.stdout.write(f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()


def serve(lists: Lists) -> None:
    """On a free port of this machine, until told to stop; the address is said on stdout."""
    config = uvicorn.Config(
        app_of(lists), "127.0.0.1", 0, log_level="warning", access_log=False,
        timeout_keep_alive=60,
    )  # fmt: skip
    _Server(config).run()
