"""The FastAPI app of a peer. Runs in the peers' environment, where Heed's libraries are missing."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from numpy.typing import NDArray
from pydantic import BaseModel

TOP = 10


class Question(BaseModel):
    """Score items for a user, or recommend from all that the user has not had."""

    user: int
    targets: list[int] | None = None
    limit: int = 20


Answer = tuple[Sequence[int], Sequence[float]]  # item rows, best first, and their scores


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        sys.stdout.write(f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()


def serve(answer: Callable[[Question], Answer]) -> None:
    """Serve on a free port of this machine until told to stop; the address is said on stdout."""
    app = FastAPI()

    @app.post("/ask")
    def ask(question: Question) -> dict[str, Any]:  # on a thread beside the loop
        items, scores = answer(question)
        return {"items": list(items), "scores": list(scores)}

    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False)
    _Server(config).run()


def mean_ndcg(lists: Sequence[Sequence[int]], targets: NDArray[np.int64]) -> float:
    """The mean NDCG@10 of lists with one target each."""
    gains = []
    for items, target in zip(lists, targets.tolist(), strict=True):
        best = list(items)[:TOP]
        gains.append(1 / np.log2(2 + best.index(target)) if target in best else 0.0)
    return float(np.mean(gains))
