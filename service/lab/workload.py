"""Requests of a load test, drawn from what a running service holds, and the server's memory."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import orjson

from service.domain.errors import Invalid, NotFound, Unavailable
from service.lab.load_options import Options
from service.lab.open_loop import PREPARED, REFUSED, Recording

PREFIX = "loadtest-"  # of the users and events that load tests write
_OWN = re.compile(rf"{PREFIX}([0-9a-f]{{8}})-(\d+)")  # a user of a load test: its run and number
_PAGE = 1_000
_PAGES = 20  # of each list; enough to sample from, and soon read
_QUERIES = 2_000
_PATIENCE = 30.0  # seconds for one answer outside of the load


@dataclass(frozen=True, slots=True)
class Sample:
    """Users, items and words of titles, drawn from those of a running service."""

    users: Sequence[str]
    items: Sequence[str]  # visible ones
    queries: Sequence[str]
    strays: Mapping[str, int]  # by earlier run, how many users it may have left


def open_http(options: Options) -> httpx.Client:
    """Open a client for the requests before and after the load; the caller closes it."""
    return httpx.Client(base_url=options.url, headers=options.headers(), timeout=_PATIENCE)


def ask(http: httpx.Client, method: str, path: str, **given: Any) -> Any:
    """Send a request and return the JSON of its response.

    Raises:
        Unavailable: when the service refuses it, or does not answer.
    """
    try:
        answer = http.request(method, path, **given)
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise Unavailable(f"{http.base_url} does not answer: {why}") from None
    said = f"{method} {path} was answered with {answer.status_code}"
    if answer.status_code in (401, 403):
        raise Unavailable(
            f"{said}: give an API key that may, by HEED_API_KEY, --key-file or --header"
        )
    try:
        return answer.raise_for_status().json()
    except (httpx.HTTPStatusError, ValueError):
        raise Unavailable(
            f"{said}: {answer.text[:300]!r}; is {http.base_url} the address of a Heed?"
        ) from None


def draw_sample(http: httpx.Client, users: int, seed: int) -> Sample:
    """Sample at most `users` of the first 20,000 users of a service, its items and their titles.

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
    strays: dict[str, int] = {}
    for run, number in (found.groups() for name in names if (found := _OWN.fullmatch(name))):
        strays[run] = max(strays.get(run, 0), 1 + int(number))
    names = [name for name in names if not name.startswith(PREFIX)]
    if not names:
        raise NotFound(f"{http.base_url} has no users to ask for; import events first")
    titles = [words for item in visible if (words := item["title"].split())]
    queries = [_phrase(rng.choice(titles), rng) for _ in range(_QUERIES)] if titles else []
    asking = rng.sample(names, min(users, len(names)))
    return Sample(asking, [item["item_id"] for item in visible], queries, strays)


class Requests:
    """Prepared requests of each kind of a mix, and the events that they wrote.

    Each event gets an id of its own when it is sent: one that is stored already would not be
    written. Events are of users of the load test's own, unless `options.write_to_users`.

    Raises:
        Invalid: when the mix has searches and no item has a title.
    """

    def __init__(self, kinds: Collection[str], sample: Sample, options: Options) -> None:
        if "search" in kinds and not sample.queries:
            raise Invalid("--mix", "no item has a title to search for; leave search out")
        self.run = secrets.token_hex(4)
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
                "user_id": rng.choice(writers),
                "item_id": rng.choice(sample.items),
            },
        }
        drawn = {kind: [draw[kind]() for _ in range(PREPARED)] for kind in kinds}
        self._events = drawn.pop("events", [])
        self._bodies = {kind: [orjson.dumps(each) for each in drawn[kind]] for kind in drawn}
        self.written: dict[str, str] = {}  # user by event id
        self.acknowledged = self.unanswered = 0  # of the events

    def encode(self, kind: str, pick: int) -> tuple[str, bytes]:
        """Return path and body of one of the prepared requests of a kind."""
        if kind != "events":
            return f"/v1/{kind}", self._bodies[kind][pick]
        event_id = f"{PREFIX}{self.run}-{len(self.written)}"
        event = {"event_id": event_id, **self._events[pick]}
        self.written[event_id] = event["user_id"]
        return "/v1/events", orjson.dumps({"events": [event]})

    def note(self, recording: Recording) -> None:
        """Count the acknowledged and the unanswered events of a load."""
        if "events" in recording.schedule.kinds:
            events = recording.schedule.kind == recording.schedule.kinds.index("events")
            status = recording.status[events & np.isfinite(recording.sent)]
            self.acknowledged += int(((status >= 200) & (status < 300)).sum())
            self.unanswered += int((status == 0).sum())

    def written_paths(self) -> list[str]:
        """Return the paths to DELETE: users of the load test's own, or single events of others."""
        if not self.writes_to_users:
            return [f"/v1/users/{user}" for user in sorted(set(self.written.values()))]
        return [
            f"/v1/users/{quote(user, safe='')}/history/{event_id}"
            for event_id, user in self.written.items()
        ]


def delete_all(http: httpx.Client, paths: Iterable[str]) -> tuple[int, list[str]]:
    """DELETE each path, waiting where the service is busy.

    Returns:
        The number of events that were deleted, and the paths that are left once a request fails.
    """
    events, left = 0, list[str]()
    for path in paths:
        try:
            deleted = None if left else _delete(http, path)
        except (httpx.HTTPError, KeyboardInterrupt):
            deleted = None
        if deleted is None:
            left.append(path)
        else:
            events += deleted
    return events, left


def by_hand(url: str, paths: Iterable[str]) -> list[str]:
    """Return commands that DELETE paths with a final number, as few as curl's lists allow."""
    numbers = defaultdict(list)
    for path in paths:
        stem, _, number = path.rpartition("-")
        numbers[stem].append(number)
    return [f"curl -X DELETE '{url}{stem}-{{{','.join(each)}}}'" for stem, each in numbers.items()]


# ------------------------------------------------------------------------------ the parts


def _delete(http: httpx.Client, path: str) -> int | None:
    """DELETE a path until it is not refused; return the number of deleted events."""
    until = time.monotonic() + _PATIENCE
    while (answer := http.delete(path)).status_code in REFUSED and time.monotonic() < until:
        wait = answer.headers.get("retry-after", "")
        time.sleep(min(float(wait) if wait.isdigit() else 1.0, _PATIENCE))
    if answer.status_code == 200:
        return int(answer.json()["forgotten"])
    # An event that was refused is not there.
    return {204: 1, 404: 0}.get(answer.status_code)


def _pages(http: httpx.Client, name: str) -> Iterator[Any]:
    cursor: dict[str, str] = {}
    for _ in range(_PAGES):
        page = ask(http, "GET", f"/v1/{name}", params={"limit": _PAGE, **cursor})
        yield from page[name]
        if page["cursor"] is None:
            return
        cursor = {"cursor": page["cursor"]}


def _phrase(words: Sequence[str], rng: random.Random) -> str:
    """One to three consecutive words of a title."""
    length = min(len(words), rng.randint(1, 3))
    start = rng.randint(0, len(words) - length)
    return " ".join(words[start : start + length])


# prometheus_client's parser takes longer than a request, on the generator's core.
_SAMPLE = re.compile(
    r"^(heed_(?:items|users|events|worker_up)|process_resident_memory_bytes)"
    r"(?:\{([^}]*)\})? (\S+)$",
    re.MULTILINE,
)
_DEFAULT = 'namespace="default"'
_METRICS_PATIENCE = 5.0  # seconds for one answer

Readings = list[tuple[float, float]]  # seconds since the first one, bytes


def read_metrics(http: httpx.Client) -> dict[str, float]:
    """Read memory and `heed_worker_up`, summed over the workers, and counts, the same in each.

    The counts are those of the namespace `default`. Empty if `/metrics` does not answer.
    """
    found: dict[str, float] = {}
    try:
        text = http.get("/metrics", timeout=_METRICS_PATIENCE).raise_for_status().text
    except httpx.HTTPError:
        return found  # a server that is too busy shows in the latencies
    samples = _SAMPLE.findall(text)
    has_default = any(_DEFAULT in labels for _, labels, _ in samples)
    for name, labels, value in samples:
        if name in ("process_resident_memory_bytes", "heed_worker_up"):
            found[name] = found.get(name, 0.0) + float(value)
        elif _DEFAULT in labels or not has_default:
            found[name] = float(value)
    return found


async def sample_memory(http: httpx.Client, interval: float, readings: Readings) -> None:
    """Append the resident memory of all workers now and then, until cancelled.

    Memory that workers share is counted for each of them. A server without the metric is asked
    once. Each reading takes the server some milliseconds.
    """
    started = time.monotonic()
    while True:
        metrics = await asyncio.to_thread(read_metrics, http)
        size = metrics.get("process_resident_memory_bytes")
        if size is not None:
            readings.append((time.monotonic() - started, size))
        elif not readings:
            return
        await asyncio.sleep(interval)


def summarize_memory(readings: Readings) -> dict[str, Any] | None:
    """Return bytes at the start, after a third of the time, at the end and at most.

    In the first third caches fill; growth after it does not end. None without any
    reading.
    """
    if not readings:
        return None
    third = readings[-1][0] / 3
    return {
        "start": readings[0][1],
        "third": next(size for at, size in readings if at >= third),
        "end": readings[-1][1],
        "most": max(size for _, size in readings),
        "readings": readings,
    }
