"""Read-your-writes across replicas: what one has acknowledged, the next request to another has."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import httpx

from tests.support.journaled_clients import ITEMS, Replicas

_EVENTS = ITEMS // 2  # of a user, whom another one follows then


class Crossed(NamedTuple):
    """Counts of reads at once after a write at another replica."""

    writes: int
    in_history: int  # whose event was in the history, the newest
    in_answer: int  # whose item a recommendation left out, with all others of the user and no more


def read_across(replicas: Replicas, writes: int, rng: Random) -> Crossed:
    """Write at one replica and read at another at once, over and over.

    A recommendation of the whole catalogue leaves out exactly what the user has: it must know all
    of the user's events, the new one too.
    """
    found: list[Crossed] = []
    shares = [writes // 2, writes - writes // 2]  # of two clients
    threads = [
        threading.Thread(
            target=lambda n=n, share=share: found.append(
                _cross(replicas, share, Random(rng.random() + n), f"c{n}")
            )
        )
        for n, share in enumerate(shares)
    ]
    rng.random()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Crossed(*(sum(column) for column in zip(*found, strict=True)))


def _cross(replicas: Replicas, writes: int, rng: Random, prefix: str) -> Crossed:
    in_history = in_answer = 0
    places: Sequence[int] = range(len(replicas.servers))
    with httpx.Client(timeout=60) as http:
        order: list[int] = []
        for number in range(writes):
            if number % _EVENTS == 0:
                order = rng.sample(range(ITEMS), _EVENTS)
            user, position = f"{prefix}-{number // _EVENTS}", number % _EVENTS
            one, other = rng.sample(places, 2)
            event = {
                "user_id": user,
                "item_id": f"i{order[position]}",
                "event_id": f"{user}-{position}",
            }
            http.post(f"{replicas.url(one)}/v1/events", json={"events": [event]}).raise_for_status()
            page = http.get(f"{replicas.url(other)}/v1/users/{user}/history").json()
            in_history += [each["event_id"] for each in page["events"]] == [
                f"{user}-{n}" for n in range(position, -1, -1)
            ]
            body = {"user_id": user, "limit": ITEMS}
            answer = http.post(f"{replicas.url(other)}/v1/recommend", json=body).json()
            left = {item["item_id"] for item in answer["items"]}
            seen = {f"i{n}" for n in order[: position + 1]}
            in_answer += left == {f"i{n}" for n in range(ITEMS)} - seen
    return Crossed(writes, in_history, in_answer)
