"""Data directories with a large event log, written straight into the tables of the store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import apsw
import numpy as np

from models.recommender.artifact import TrainedModel
from service.domain.records import Item
from service.domain.settings import Settings
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import open_encoder
from service.stores.sqlite.database_file import DatabaseFile
from service.stores.sqlite.schema import COUNT_STORED_EVENTS
from service.stores.sqlite.store import SQLiteStore
from tests.benchmarks.workload.data import random_model

_SYLLABLES = ("ba", "co", "di", "fu", "ga", "lo", "mi", "ne", "po", "ru", "sa", "te", "vi", "zo")
_WORDS = 20_000  # of the vocabulary that titles and descriptions are drawn from
_PART = 10_000  # items that are stored at once
_TICK_USERS = 100  # users of one version of the store, as after an import of many batches
SECONDS = 365 * 86_400
FIRST_TIME = 1_700_000_000_000_000  # microseconds UTC, in November 2023
TYPES = ("view", "like", "purchase", "dislike")
TYPE_SHARES = (0.8, 0.12, 0.07, 0.01)


def generate(
    target: Path, events: int, *, items: int = 100_000, users: int = 100_000, seed: int = 0
) -> None:
    """Write a store with a catalogue and a log, and publish a model of random weights.

    Items have a title of three words, a description of twenty and three attributes. Users and items
    are drawn with probabilities that fall as those of shops do: a few have most of the events.
    """
    asyncio.run(_store_items(target, items, seed))
    _write_events(target, events, items, users, seed)
    encoder = open_encoder(Settings.read().encoder)
    trained = TrainedModel(
        random_model(items, content=encoder.dimension, seed=seed),
        tuple(f"item-{number}" for number in range(items)),
        np.ones(items, np.int64),
        encoder.name,
        {},
    )
    Registry(target / MODELS_FOLDER).publish(trained.to_files(), {"metrics": {}})


def generate_items(count: int, seed: int) -> Iterator[Item]:
    """Yield so many items `item-0`, `item-1`, … with texts and attributes."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(_SYLLABLES, k=3)) for _ in range(_WORDS)]
    for number in range(count):
        drawn = [words[int(_WORDS * rng.random() ** 2)] for _ in range(23)]
        yield Item(
            f"item-{number}",
            title=" ".join(drawn[:3]),
            description=" ".join(drawn[3:]),
            categories=(drawn[0],),
            attributes={
                "price": round(rng.lognormvariate(3, 1), 2),
                "brand": f"brand-{rng.randrange(500)}",
                "in_stock": rng.random() < 0.9,
            },
        )


def user_lengths(count: int, users: int, seed: int) -> list[int]:
    """Return the number of events of each user; the numbers sum to `count`."""
    shares = np.random.default_rng(seed).lognormal(0, 1.2, users)
    ends = np.round(np.cumsum(shares / shares.sum()) * count).astype(np.int64)
    ends[-1] = count
    return [int(length) for length in np.diff(ends, prepend=0)]


async def _store_items(target: Path, count: int, seed: int) -> None:
    store = SQLiteStore(target / STORE_FILE)
    try:
        catalogue = generate_items(count, seed)
        while part := list(islice(catalogue, _PART)):
            await store.put_items(part)
    finally:
        await store.close()


def _write_events(target: Path, count: int, items: int, users: int, seed: int) -> None:
    """Write the log in the order of its table, which takes a few seconds a million events."""
    connection = DatabaseFile(target / STORE_FILE).writer()
    try:
        connection.pragma("synchronous", "OFF")  # a crash would cost the benchmark alone
        connection.execute("BEGIN IMMEDIATE")
        execute, executemany = connection.execute, connection.executemany
        tick = execute("UPDATE state SET clock = clock + 1 RETURNING clock").get
        executemany("INSERT INTO types VALUES (?, ?)", enumerate(TYPES, 1))
        lengths = user_lengths(count, users, seed)
        executemany(
            "INSERT INTO users VALUES (?, ?, ?, ?, ?, NULL)",
            (
                (n, f"user-{n}", tick + n // _TICK_USERS, tick, length + 1)
                for n, length in enumerate(lengths, 1)
            ),
        )
        execute("UPDATE state SET clock = clock + ?", (users // _TICK_USERS,))
        numbers: dict[str, int] = dict(execute("SELECT item_id, item_no FROM items"))
        item_nos = np.array([numbers[f"item-{number}"] for number in range(items)])
        executemany(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?, 1.0, ?, 0, NULL)",
            _event_rows(lengths, item_nos, seed),
        )
        execute(COUNT_STORED_EVENTS)
        execute("UPDATE state SET users = users + ?, events = events + ?", (users, count))
        connection.execute("COMMIT")
        _checkpoint(connection)
    finally:
        connection.close()


def _event_rows(lengths: list[int], item_nos: Any, seed: int) -> Iterator[tuple[Any, ...]]:
    rng = np.random.default_rng(seed)
    number = 0
    for user_no, length in enumerate(lengths, 1):
        times = np.sort(rng.integers(0, SECONDS, length)) * 1_000_000 + FIRST_TIME
        rows = item_nos[(len(item_nos) * rng.random(length) ** 3).astype(np.int64)]
        kinds = rng.choice(len(TYPES), length, p=TYPE_SHARES) + 1
        columns = zip(times.tolist(), rows.tolist(), kinds.tolist(), strict=True)
        for seq, (time, item_no, type_no) in enumerate(columns, 1):
            number += 1
            yield user_no, time, seq, item_no, type_no, f"event-{number:010}"


def _checkpoint(connection: apsw.Connection) -> None:
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
