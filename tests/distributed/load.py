"""Clients of a service over a distributed database: what they sent, and what they were answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx

ITEMS = 50
_PAUSE = 0.05  # seconds before something is sent again
_MANY = 20  # users of a large batch


class Question(NamedTuple):
    """A question of one user, and its answer."""

    user: int
    began: float  # monotonic, as the next
    ended: float
    status: int  # of HTTP; 0: the connection was lost
    is_degraded: bool


@dataclass
class Events:
    """Events by their ids, of which each belongs to the user before the first hyphen."""

    tried: set[str] = field(default_factory=set)
    acknowledged: set[str] = field(default_factory=set)
    refused: list[list[str]] = field(default_factory=list)  # batches to be sent again

    def users(self, ids: Iterable[str]) -> set[int]:
        """Return the users of events."""
        return {int(id_.partition("-")[0]) for id_ in ids}


class Load:
    """Clients that ask and append at once until they are told to stop.

    Args:
        http: the service.
        users: their number.
        seed: of what they do.
    """

    def __init__(self, http: httpx.AsyncClient, users: int, seed: int) -> None:
        self._http, self._users = http, users
        self._rng = random.Random(seed)
        self._number = 0
        self._stopped = False
        self.questions: list[Question] = []
        self.batches: list[tuple[float, frozenset[int], int]] = []  # began, users, status
        self.events = Events()

    async def run(self, clients: int) -> None:
        """Run clients until `stop`."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client())

    def stop(self) -> None:
        """Let each client end what it is doing."""
        self._stopped = True

    async def ask(self, user: int) -> Question:
        """Score two items for a user."""
        began = time.monotonic()
        body = {"user_id": str(user), "item_ids": ["i1", "i2"]}
        try:
            answer = await self._http.post("/v1/score", json=body)
        except httpx.TransportError:
            question = Question(user, began, time.monotonic(), 0, True)
        else:
            is_degraded = answer.status_code != 200 or answer.json()["degraded"]
            now = time.monotonic()
            question = Question(user, began, now, answer.status_code, is_degraded)
        self.questions.append(question)
        return question

    async def append(self, ids: list[str]) -> int:
        """Send events, be it again; return the status."""
        self.events.tried.update(ids)
        began = time.monotonic()
        sent = [
            {
                "user_id": id_.partition("-")[0],
                "item_id": f"i{int(id_.rpartition('-')[2]) % ITEMS}",
                "event_id": id_,
            }
            for id_ in ids
        ]
        try:
            status = (await self._http.post("/v1/events", json={"events": sent})).status_code
        except httpx.TransportError:
            status = 0
        self.batches.append((began, frozenset(self.events.users(ids)), status))
        if status == 200:
            self.events.acknowledged.update(ids)
        else:
            self.events.refused.append(ids)
        return status

    async def settle(self, until: float) -> bool:
        """Send what was refused again until all of it is acknowledged; False if time runs out."""
        while self.events.refused:
            batches, self.events.refused = self.events.refused, []
            for ids in batches:
                if await self.append(ids) != 200:
                    await asyncio.sleep(_PAUSE)
            if time.monotonic() > until:
                return False
        return True

    async def _client(self) -> None:
        rng = self._rng
        while not self._stopped:
            kind = rng.random()
            if kind < 0.5:
                await self.ask(rng.randrange(self._users))
            elif kind < 0.6 and self.events.refused:
                ids = self.events.refused.pop(rng.randrange(len(self.events.refused)))
                if await self.append(ids) != 200:
                    await asyncio.sleep(_PAUSE)
            else:
                count = _MANY if kind > 0.95 else 1
                await self.append(self._new(rng.sample(range(self._users), count)))

    def _new(self, users: Collection[int]) -> list[str]:
        first = self._number
        self._number += len(users)
        return [f"{user}-{number}" for number, user in enumerate(users, first)]


def answered(questions: Iterable[Question]) -> str:
    """Return how questions were answered, in words."""
    counts = Counter(
        f"{each.status}{' degraded' if each.is_degraded and each.status == 200 else ''}"
        for each in questions
    )
    return ", ".join(f"{count} × {name}" for name, count in sorted(counts.items())) or "none"
