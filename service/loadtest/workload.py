"""Requests about users and items of the service itself, and removal of the events they wrote."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import orjson

from models.compute.progress import ProgressCallback
from service.domain.errors import Invalid, NotFound, Unavailable
from service.loadtest.memory import read_metrics
from service.loadtest.options import Options

PREFIX = "loadtest-"  # of the users and events that load tests write
PREPARED = 1_000  # requests of each kind, which are sent again and again
_PAGE = 1_000
_PAGES = 20  # of each list; enough to sample from, and soon read
_QUERIES = 2_000
_PATIENCE = 30.0  # seconds for one answer outside of the load


def no_progress(_done: int, _total: int) -> None:
    """Report no progress."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Users, items and words of titles, drawn from those of a running service."""

    users: Sequence[str]
    history_lengths: Sequence[int]  # of each user; 1,000 stands for that many and more
    items: Sequence[str]  # visible ones
    queries: Sequence[str]
    counts: dict[str, int]  # items, users and events that the service has
    version: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for the report."""
        least, median, most = np.quantile(self.history_lengths or [0], (0.0, 0.5, 1.0)).tolist()
        return {
            **self.counts,
            "sampled_users": len(self.users),
            "history_lengths": {"least": int(least), "median": median, "most": int(most)},
            "sampled_items": len(self.items),
            "queries": len(self.queries),
            "heed": self.version,
        }


def open_http(options: Options) -> httpx.Client:
    """Open a client for the requests before and after the load; the caller closes it."""
    return httpx.Client(base_url=options.url, headers=list(options.headers), timeout=_PATIENCE)


def draw_sample(
    http: httpx.Client, users: int, seed: int, progress: ProgressCallback = no_progress
) -> Sample:
    """Sample the first 20,000 users and items of a service.

    Args:
        http: client of the service.
        users: at most how many.
        seed: of the draws.
        progress: called with the number of users whose histories have been read.

    Raises:
        NotFound: when the service has no items, or no users.
        Unavailable: when it refuses, or does not answer.
    """
    rng = random.Random(seed)
    visible = [item for item in _pages(http, "items") if not item["hidden"]]
    if not visible:
        raise NotFound(f"{http.base_url} has no items to ask about; import a catalogue first")
    names = [user["user_id"] for user in _pages(http, "users")]
    # A load test that was killed may have left its own.
    names = [name for name in names if not name.startswith(PREFIX)]
    if not names:
        raise NotFound(f"{http.base_url} has no users to ask for; import events first")
    chosen = rng.sample(names, min(users, len(names)))
    lengths = []
    for number, name in enumerate(chosen):
        progress(number, len(chosen))
        page = _get(http, f"/v1/users/{quote(name, safe='')}/history", limit=_PAGE)
        lengths.append(len(page["events"]))
    titles = [words for item in visible if (words := item["title"].split())]
    queries = [_phrase(rng.choice(titles), rng) for _ in range(_QUERIES)] if titles else []
    metrics = read_metrics(http)
    counts = {"items": len(visible), "users": len(names)} | {
        name: int(metrics[f"heed_{name}"])
        for name in ("items", "users", "events")
        if f"heed_{name}" in metrics
    }
    items = [item["item_id"] for item in visible]
    return Sample(chosen, lengths, items, list(dict.fromkeys(queries)), counts, _version(http))


class Requests:
    """Prepared requests of each kind of a mix, and the events that they wrote.

    Each event gets an id of its own when it is sent: one that is stored already would not be
    written. Events are of users of the load test's own, unless `options.write_to_users`.

    Raises:
        Invalid: when the mix has searches and no item has a title.
    """

    def __init__(self, kinds: Sequence[str], sample: Sample, options: Options) -> None:
        if "search" in kinds and not sample.queries:
            raise Invalid("--mix", "no item has a title to search for; leave search out")
        self.kinds, self.run = list(kinds), secrets.token_hex(4)
        self.writes_to_users = options.write_to_users
        own = [f"{PREFIX}{self.run}-{number}" for number in range(len(sample.users))]
        writers = sample.users if options.write_to_users else own
        rng = random.Random(options.seed)
        count = min(options.targets, len(sample.items))
        draw: dict[str, Callable[[], dict[str, Any]]] = {
            "score": lambda: {
                "user_id": rng.choice(sample.users),
                "item_ids": rng.sample(sample.items, count),
            },
            "recommend": lambda: {"user_id": rng.choice(sample.users), "limit": options.limit},
            "search": lambda: {"query": rng.choice(sample.queries), "limit": options.limit},
            "events": lambda: {
                "events": [
                    {
                        "event_id": self._event_id(0),
                        "user_id": rng.choice(writers),
                        "item_id": rng.choice(sample.items),
                    }
                ]
            },
        }
        self._bodies = {kind: [draw[kind]() for _ in range(PREPARED)] for kind in kinds}
        self.written: dict[str, str] = {}  # user by event id

    def encode(self) -> Callable[[int, int], tuple[str, bytes]]:
        """Encode all requests; returns path and body by index of the kind and of the request."""
        paths = [f"/v1/{kind}" for kind in self.kinds]
        encoded = [[orjson.dumps(body) for body in self._bodies[kind]] for kind in self.kinds]
        placeholder = self._event_id(0).encode()  # all event ids have one length
        events = self.kinds.index("events") if "events" in self.kinds else -1

        def request(kind: int, pick: int) -> tuple[str, bytes]:
            content = encoded[kind][pick]
            if kind == events:
                content = content.replace(placeholder, self._write(pick).encode())
            return paths[kind], content

        return request

    def written_paths(self) -> list[str]:
        """Return the paths to DELETE: users of the load test's own, or single events of others."""
        if not self.writes_to_users:
            return [f"/v1/users/{user}" for user in sorted(set(self.written.values()))]
        return [
            f"/v1/users/{quote(user, safe='')}/history/{event_id}"
            for event_id, user in self.written.items()
        ]

    def _event_id(self, number: int) -> str:
        return f"{PREFIX}{self.run}-{number:010d}"

    def _write(self, pick: int) -> str:
        event_id = self._event_id(len(self.written) + 1)
        self.written[event_id] = self._bodies["events"][pick]["events"][0]["user_id"]
        return event_id


def delete_all(
    http: httpx.Client, paths: Sequence[str], progress: ProgressCallback = no_progress
) -> list[str]:
    """DELETE each path; returns those that are left once a request fails."""
    for number, path in enumerate(paths):
        progress(number, len(paths))
        try:
            status = http.delete(path).status_code
        except (httpx.HTTPError, KeyboardInterrupt):
            return list(paths[number:])
        if status not in (200, 204, 404):  # an event that was refused is not there
            return list(paths[number:])
    return []


# ------------------------------------------------------------------------------ the parts


def _get(http: httpx.Client, path: str, **params: Any) -> Any:
    try:
        answer = http.get(path, params=params)
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise Unavailable(f"{http.base_url} does not answer: {why}") from None
    if answer.status_code in (401, 403):
        raise Unavailable(
            f"GET {path} was answered with {answer.status_code}: give your key as "
            '--header "Authorization: Bearer …"'
        )
    try:
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPStatusError, ValueError):
        raise Unavailable(
            f"GET {http.base_url}{path.lstrip('/')} was answered with {answer.status_code}: "
            f"{answer.text[:300]!r}; is this the address of a Heed?"
        ) from None


def _pages(http: httpx.Client, name: str) -> Iterator[Any]:
    cursor: dict[str, str] = {}
    for _ in range(_PAGES):
        page = _get(http, f"/v1/{name}", limit=_PAGE, **cursor)
        yield from page[name]
        if page["cursor"] is None:
            return
        cursor = {"cursor": page["cursor"]}


def _phrase(words: Sequence[str], rng: random.Random) -> str:
    """One to three consecutive words of a title."""
    length = min(len(words), rng.randint(1, 3))
    start = rng.randint(0, len(words) - length)
    return " ".join(words[start : start + length])


def _version(http: httpx.Client) -> str:
    """The version in /openapi.json, which a proxy may hide."""
    try:
        return str(http.get("/openapi.json").json()["info"]["version"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return "of unknown version"
