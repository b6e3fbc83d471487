"""Data directories that are measured on, generated or copied, and the questions about them."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from service.domain.errors import NotFound
from service.domain.records import Event, Item
from service.domain.timestamps import to_rfc3339
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.benchmarks.harness.client import encode_post
from tests.support.untrained import publish_untrained

LENGTHS = (200, 1_000)  # events of the users whose questions are timed
TARGETS, LIMIT = 100, 20
AT = 1_893_456_000_000_000  # 2030, of every request: the same question then has the same answer
YEAR = 365 * 86_400_000_000  # microseconds, over which events are spread
FIRST_TIME = 1_700_000_000_000_000  # in November 2023
_PART = 10_000  # records that are stored at once
_OTHERS = 18
_LONGEST = 50
_TITLES = 1_000
_VARIANTS = 16  # requests of one kind with other targets
_QUERY_WORDS = 3
_SYLLABLES = ("ba", "co", "di", "fu", "ga", "lo", "mi", "ne", "po", "ru", "sa", "te", "vi", "zo")
_WORDS = 20_000  # that titles and descriptions are drawn from
_TYPES, _SHARES = ("view", "like", "purchase", "dislike"), (0.8, 0.12, 0.07, 0.01)


@dataclass(frozen=True, slots=True)
class BenchmarkData:
    """A data directory that may be written to, and is removed afterwards."""

    data: Path
    events: int
    item_ids: tuple[str, ...]
    titles: tuple[str, ...]  # of some items
    askers: tuple[tuple[str, int], ...]  # users whose questions are timed, and their events
    others: tuple[str, ...]  # some more users, at random
    longest: tuple[str, ...]  # users of most events


class Question(NamedTuple):
    """One kind of question, by one user or, for a search, by none."""

    name: str  # score-200
    ask: str  # score, recommend or search
    bodies: Sequence[dict[str, Any]]

    def requests(self) -> list[bytes]:
        """Encode the bodies."""
        return [encode_post(f"/v1/{self.ask}", body) for body in self.bodies]


@contextmanager
def prepare_data(
    data: Path | None, *, items: int = 4_000, users: int = 500
) -> Iterator[BenchmarkData]:
    """A copy of a data directory that no service writes to, or generated data.

    Args:
        data: is only read; None generates.
        items: how many to generate.
        users: how many to generate; two have histories of `LENGTHS`, the others 20 to 80 events.

    Raises:
        NotFound: when there is no store in `data`, or nothing in it.
    """
    with tempfile.TemporaryDirectory(prefix="heed-bench-") as folder:
        target = Path(folder) / "data"
        if data is None:
            rng = random.Random(0)
            lengths = [*LENGTHS, *(rng.randint(20, 80) for _ in range(users - len(LENGTHS)))]
            generate(target, items=items, lengths=lengths)
        elif not (data / STORE_FILE).is_file():
            raise NotFound(f"there is no store in {data}: {STORE_FILE} is missing")
        else:
            shutil.copytree(data, target, ignore=shutil.ignore_patterns("staging", "lock"))
        yield describe(target)


def describe(target: Path) -> BenchmarkData:
    """Describe a data directory. Raises NotFound when there is nothing in its store."""
    store = SQLiteStore(target / STORE_FILE)
    try:
        listed = {i.item_id: i.title for i in store.scan_items() if not i.hidden}
    finally:
        asyncio.run(store.close())
    counts = users_by_events(target)
    if not listed or not counts:
        raise NotFound(f"there is nothing to measure in {target}: no items, or no events")
    nearest = [min(counts, key=lambda user: abs(counts[user] - wanted)) for wanted in LENGTHS]
    titles = [title for title in listed.values() if title]
    return BenchmarkData(
        data=target,
        events=counts.total(),
        item_ids=tuple(listed),
        titles=tuple(random.Random(0).sample(titles, min(_TITLES, len(titles)))),
        askers=tuple((user, counts[user]) for user in dict.fromkeys(nearest)),
        others=tuple(random.Random(0).sample(sorted(counts), min(_OTHERS, len(counts)))),
        longest=tuple(user for user, _ in counts.most_common(_LONGEST)),
    )


def users_by_events(data: Path) -> Counter[str]:
    """Count the events of each user of a data directory."""
    store, counts = SQLiteStore(data / STORE_FILE), Counter[str]()
    try:
        for part in store.scan():
            seen = np.bincount(part.users, minlength=len(part.user_ids))
            for at in np.flatnonzero(seen).tolist():
                counts[part.user_ids[at]] += int(seen[at])
    finally:
        asyncio.run(store.close())
    return counts


def questions(ground: BenchmarkData, lengths: Sequence[int] = LENGTHS) -> list[Question]:
    """Score and recommend for the askers with the first histories of `lengths`, and search."""
    rng = random.Random(0)
    count, at = min(TARGETS, len(ground.item_ids)), to_rfc3339(AT)
    made = []
    for user, events in ground.askers[: len(lengths)]:
        scores: list[dict[str, Any]] = [
            {"user_id": user, "at": at, "item_ids": rng.sample(ground.item_ids, count)}
            for _ in range(_VARIANTS)
        ]
        made.append(Question(f"score {count}, {events:,} events", "score", scores))
        asked: dict[str, Any] = {"user_id": user, "at": at, "limit": LIMIT}
        made.append(Question(f"recommend {LIMIT}, {events:,} events", "recommend", [asked]))
    if ground.titles:
        titles = rng.sample(ground.titles, min(_VARIANTS, len(ground.titles)))
        words = [" ".join(title.split()[:_QUERY_WORDS]) for title in titles]
        bodies = [{"query": each, "limit": LIMIT} for each in words]
        made.append(Question("search", "search", bodies))
    return made


# ------------------------------------------------------------------------------ generated data


def generate(
    target: Path, *, items: int, lengths: Sequence[int], seed: int = 0, ids: bool = False
) -> None:
    """Write a store with a catalogue and a log, and publish a model without training.

    Args:
        target: the data directory.
        items: of the catalogue.
        lengths: events of each user `user-0`, `user-1`, …
        seed: of everything that is drawn.
        ids: name events by random UUIDs, as clients do.
    """
    target.mkdir(parents=True, exist_ok=True)
    fill(target, _items(items, seed), _events(items, lengths, seed, ids))
    publish_untrained(target, [f"item-{number}" for number in range(items)], seed=seed)


def fill(target: Path, items: Iterable[Item], events: Iterable[Event]) -> None:
    """Store items and events in a data directory, part by part."""

    async def put() -> None:
        store = SQLiteStore(target / STORE_FILE)
        try:
            source = iter(items)
            while listed := list(islice(source, _PART)):
                await store.put_items(listed)
            log = iter(events)
            while batch := list(islice(log, _PART)):
                await store.append(batch)
        finally:
            await store.close()

    asyncio.run(put())


def user_lengths(events: int, users: int, seed: int = 0) -> list[int]:
    """Return numbers of events that sum to `events`, as unequal as those of shops.

    They are lognormal: half of the users have half of the mean or less, one in eight twice the mean
    or more.
    """
    shares = np.random.default_rng(seed).lognormal(0, 1.2, users)
    ends = np.round(np.cumsum(shares / shares.sum()) * events).astype(np.int64)
    ends[-1] = events
    return [int(length) for length in np.diff(ends, prepend=0)]


def _items(count: int, seed: int) -> Iterator[Item]:
    rng = random.Random(seed)
    words = ["".join(rng.choices(_SYLLABLES, k=3)) for _ in range(_WORDS)]
    for number in range(count):
        drawn = [words[int(_WORDS * rng.random() ** 2)] for _ in range(23)]
        yield Item(
            f"item-{number}",
            title=" ".join(drawn[:3]),
            description=" ".join(drawn[3:]),
            categories=(f"category {int(200 * rng.random() ** 2)}",),
            attributes={
                "price": round(rng.lognormvariate(3, 1), 2),
                "brand": f"brand {int(500 * rng.random() ** 2)}",
                "in_stock": rng.random() < 0.9,
            },
        )


def _events(items: int, lengths: Sequence[int], seed: int, ids: bool) -> Iterator[Event]:
    """Events user by user; a few items have most of them."""
    rng, names = np.random.default_rng(seed), random.Random(seed)
    for user, length in enumerate(lengths):
        times = FIRST_TIME + np.sort(rng.integers(0, YEAR, length))
        rows = (items * rng.random(length) ** 3).astype(np.int64)
        kinds = rng.choice(len(_TYPES), length, p=_SHARES)
        for time, row, kind in zip(times.tolist(), rows.tolist(), kinds.tolist(), strict=True):
            event_id = str(uuid.UUID(int=names.getrandbits(128), version=4)) if ids else None
            yield Event(f"user-{user}", f"item-{row}", event_id, _TYPES[kind], 1.0, time)
