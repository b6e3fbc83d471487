"""Clients of services over a distributed database: what they sent, and what they were answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx

from tests.support.journaled_clients import ITEMS
from tests.support.server import PATIENCE

_PAUSE = 0.05  # seconds between two requests of a client
_MANY = 20  # users of a large batch


class Question(NamedTuple):
    """A question about one user, and its answer."""

    user: int
    began: float  # monotonic, as the next
    ended: float
    outcome: str  # status of HTTP, "degraded" for 200 with a part of the history, "broken"


class Batch(NamedTuple):
    """Events that were sent at once, by their ids, and the answer."""

    ids: tuple[str, ...]
    began: float  # monotonic, as the next
    ended: float
    outcome: str


@dataclass
class Load:
    """Clients that ask and append at all replicas until they are told to stop.

    An event's id begins with its user. Each is sent until it is acknowledged, be it at the end.

    Args:
        urls: of the replicas.
        users: their number.
        seed: of what they do.
    """

    urls: Sequence[str]
    users: int
    seed: int
    questions: list[Question] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    acknowledged: set[str] = field(default_factory=set)
    refused: list[tuple[str, ...]] = field(default_factory=list)  # batches to be sent again

    def __post_init__(self) -> None:
        self._http = httpx.AsyncClient(timeout=PATIENCE)
        self._rng = random.Random(self.seed)
        self._stopped = False

    async def run(self, clients: int) -> None:
        """Run clients until `stop`."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client())

    def stop(self) -> None:
        """Let each client end what it is doing."""
        self._stopped = True

    async def ask(self, user: int, replica: int) -> Question:
        """Score two items for a user."""
        began = time.monotonic()
        body = {"user_id": str(user), "item_ids": ["i1", "i2"]}
        try:
            answer = await self._http.post(f"{self.urls[replica]}/v1/score", json=body)
        except httpx.TransportError:
            outcome = "broken"
        else:
            is_degraded = answer.status_code == 200 and answer.json()["degraded"]
            outcome = "degraded" if is_degraded else str(answer.status_code)
        question = Question(user, began, time.monotonic(), outcome)
        self.questions.append(question)
        return question

    async def append(self, ids: tuple[str, ...]) -> bool:
        """Send events, be it again; return whether they are acknowledged."""
        self.tried.update(ids)
        began = time.monotonic()
        sent = [
            {
                "user_id": id_.partition("-")[0],
                "item_id": f"i{int(id_.rpartition('-')[2]) % ITEMS}",
                "event_id": id_,
            }
            for id_ in ids
        ]
        url = self._rng.choice(self.urls)
        try:
            answer = await self._http.post(f"{url}/v1/events", json={"events": sent})
            outcome = str(answer.status_code)
        except httpx.TransportError:
            outcome = "broken"
        self.batches.append(Batch(ids, began, time.monotonic(), outcome))
        if outcome == "200":
            self.acknowledged.update(ids)
            return True
        self.refused.append(ids)
        return False

    async def settle(self, patience: float) -> bool:
        """Send what was refused again until all of it is acknowledged; False if time runs out."""
        until = time.monotonic() + patience
        while self.refused:
            if time.monotonic() > until:
                return False
            await self.append(self.refused.pop(0))
            await asyncio.sleep(_PAUSE)
        return True

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _client(self) -> None:
        rng = self._rng
        while not self._stopped:
            await asyncio.sleep(_PAUSE)
            kind = rng.random()
            if kind < 0.5:
                await self.ask(rng.randrange(self.users), rng.randrange(len(self.urls)))
            elif kind < 0.75 and self.refused:
                await self.append(self.refused.pop(rng.randrange(len(self.refused))))
            else:
                users = rng.sample(range(self.users), _MANY if kind > 0.95 else 1)
                first = len(self.tried)
                await self.append(tuple(f"{u}-{n}" for n, u in enumerate(users, first)))
