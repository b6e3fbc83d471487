"""What is asked, in which proportions: requests as bytes, made before the first leaves."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from service.domain.errors import Invalid
from service.loadtest.client import post
from service.loadtest.material import Material, Written

KINDS = ("score", "recommend", "search", "events")
DEFAULT = "score=4,recommend=2,search=3,events=1"
DISTINCT = 1_000  # requests of each kind; they come again and again


def parsed(text: str) -> dict[str, float]:
    """Shares by kind, of `score=4,recommend=2`; a kind that is not named is not asked.

    Raises:
        Invalid: for another kind, one that is named twice, or a share that is no positive number.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in KINDS:
            raise Invalid("--mix", f"{name!r} is no kind of request; those are {', '.join(KINDS)}")
        if name in found:
            raise Invalid("--mix", f"{name} is there twice")
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if not 0 <= share < float("inf"):
            raise Invalid("--mix", f"the share of {name} must be a number, 0 or more: {name}=4")
        found[name] = share
    found = {name: share for name, share in found.items() if share}
    if not found:
        raise Invalid("--mix", f"asks for nothing; for example {DEFAULT}")
    return found


class Requests:
    """The requests of each kind in a mix.

    Args:
        kinds: of the mix, in its order.
        material: what they ask about.
        written: whom events are of.
        targets: of a score.
        limit: items of a recommendation and of a search.
        seed: of what is drawn.

    Raises:
        Invalid: when there is a search among them and no item has a title.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        material: Material,
        written: Written,
        *,
        targets: int,
        limit: int,
        seed: int = 0,
    ) -> None:
        if "search" in kinds and not material.queries:
            raise Invalid("--mix", "no item has a title to search for; leave search out")
        self.kinds = list(kinds)
        self.written = written
        rng = random.Random(seed)
        count = min(targets, len(material.items))
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            "score": lambda: {
                "user_id": rng.choice(material.users),
                "item_ids": rng.sample(material.items, count),
            },
            "recommend": lambda: {"user_id": rng.choice(material.users), "limit": limit},
            "search": lambda: {"query": rng.choice(material.queries), "limit": limit},
            "events": lambda: self._event(rng, material),
        }
        self._owners: list[int] = []  # of each request of events, the user
        self._bodies = {name: [ways[name]() for _ in range(DISTINCT)] for name in kinds}
        self._number = 0

    def body(self, kind: str, pick: int = 0) -> dict[str, Any]:
        """One of a kind's `DISTINCT`; counted as written where it writes."""
        body = self._bodies[kind][pick]
        if kind != "events":
            return body
        return {"events": [body["events"][0] | {"event_id": self._named(pick)}]}

    def made(
        self,
        paths: Mapping[str, str],
        host: str,
        headers: Sequence[tuple[str, str]] = (),
    ) -> Callable[[int, int], bytes]:
        """The bytes of a kind's request, by the kind's place and the request's.

        Args:
            paths: of each kind.
            host: what to call the server.
            headers: of each request.
        """
        plain: list[list[bytes]] = []
        for kind in self.kinds:
            bodies = self._bodies[kind]
            plain.append([post(paths[kind], each, host=host, headers=headers) for each in bodies])
        if "events" not in self.kinds:
            return lambda kind, pick: plain[kind][pick]
        events = self.kinds.index("events")
        pattern = self.written.event_id(0).encode()
        parts = [each.partition(pattern) for each in plain[events]]

        def request(kind: int, pick: int) -> bytes:
            if kind != events:
                return plain[kind][pick]
            before, _, after = parts[pick]
            return before + self._named(pick).encode() + after

        return request

    def _event(self, rng: random.Random, material: Material) -> dict[str, Any]:
        owner = rng.randrange(len(self.written.users))
        self._owners.append(owner)
        event = {
            "event_id": self.written.event_id(0),
            "user_id": self.written.users[owner],
            "item_id": rng.choice(material.items),
        }
        return {"events": [event]}

    def _named(self, pick: int) -> str:
        """A new event's id: what has an id that was there already would not be written."""
        self._number += 1
        self.written.events[self._number] = self._owners[pick]
        return self.written.event_id(self._number)
