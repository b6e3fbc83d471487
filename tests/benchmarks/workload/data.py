"""Data directories that are measured on, generated or copied."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import torch

from models.recommender.artifact import TrainedModel
from models.recommender.co_occurrence import TransitionCounts
from models.recommender.recommender import MAX_REQUEST_GAP, Recommender, RecommenderConfig
from service.domain.errors import NotFound
from service.domain.records import Event, Item
from service.domain.settings import Settings
from service.runtime.data_layout import EMBEDDINGS_FILE, MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import open_encoder
from service.stores.sqlite.database_file import checksum_vfs
from service.stores.sqlite.store import SQLiteStore

LENGTHS = (200, 1_000)  # events of the users whose questions are timed
_OTHERS = 18
_TITLES = 1_000
_DAY = 86_400_000_000  # microseconds
_WORDS = (
    *("river", "stone", "garden", "winter", "letter", "music", "shadow", "engine", "harbour"),
    *("mirror", "summer", "island", "paper", "copper", "window", "forest", "market", "silver"),
    *("thunder", "valley", "bridge", "candle", "desert", "falcon", "glass", "hammer", "meadow"),
)


@dataclass(frozen=True, slots=True)
class BenchmarkData:
    """A data directory that may be written to, and is gone afterwards."""

    data: Path
    source: str  # where it came from
    items: int  # listed in the catalogue
    users: int
    events: int
    item_ids: tuple[str, ...]  # the catalogue's
    titles: tuple[str, ...]  # of some of them
    askers: tuple[tuple[str, int], ...]  # users whose questions are timed, and their events
    others: tuple[str, ...]  # some more users, at random
    model: str | None  # the version that serves

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for the report."""
        return {
            "source": self.source,
            "items": self.items,
            "users": self.users,
            "events": self.events,
            "histories": [events for _, events in self.askers],
            "model": self.model or "none: the identity on content",
        }


@contextmanager
def prepare_data(
    data: Path | None, *, items: int = 4_000, users: int = 500, seed: int = 0
) -> Iterator[BenchmarkData]:
    """A copy of the store and the models in `data`, or generated ones.

    Args:
        data: a data directory, which is only read; None generates.
        items: how many to generate.
        users: how many to generate; two have histories of `LENGTHS`, the others 20 to 80 events.
        seed: of all that is generated.

    Raises:
        NotFound: when there is no store in `data`, or nothing in it.
    """
    with tempfile.TemporaryDirectory(prefix="heed-bench-") as folder:
        target = Path(folder)
        if data is None:
            source = f"generated, seed {seed}: items and events at random, a model without training"
            _generate(target, items, users, seed)
        else:
            source = f"a copy of {data}"
            _copy(data, target)
        yield describe_data(target, source)


def describe_data(target: Path, source: str) -> BenchmarkData:
    """Describe a data directory.

    Args:
        target: the directory.
        source: where it came from.

    Raises:
        NotFound: when there is nothing in its store.
    """

    async def look() -> BenchmarkData:
        store = SQLiteStore(target / STORE_FILE)
        try:
            counts = await store.counts()
            listed = {i.item_id: i.title for i in store.scan_items() if not i.hidden}
            titles = [title for title in listed.values() if title]
            seen = np.zeros(0, dtype=np.int64)
            names: list[str] = []
            for columns in store.scan():
                names = columns.user_ids
                more = np.bincount(columns.users, minlength=max(len(names), len(seen)))
                more[: len(seen)] += seen
                seen = more
            if not listed or not names:
                raise NotFound(f"there is nothing to measure in {source}: no items, or no events")
            nearest = dict.fromkeys(int(np.abs(seen - length).argmin()) for length in LENGTHS)
            return BenchmarkData(
                data=target,
                source=source,
                items=len(listed),
                users=counts["users"],
                events=counts["events"],
                item_ids=tuple(listed),
                titles=tuple(random.Random(0).sample(titles, min(_TITLES, len(titles)))),
                askers=tuple((names[at], int(seen[at])) for at in nearest),
                others=tuple(random.Random(0).sample(names, min(_OTHERS, len(names)))),
                model=Registry(target / MODELS_FOLDER).current(),
            )
        finally:
            await store.close()

    return asyncio.run(look())


def count_stored(ground: BenchmarkData) -> int:
    """Count the events in the store of a data directory, one by one."""
    store = SQLiteStore(ground.data / STORE_FILE)
    try:
        return sum(len(columns) for columns in store.scan())
    finally:
        asyncio.run(store.close())


def random_model(items: int, *, content: int = 256, seed: int = 0, **shape: Any) -> Recommender:
    """A recommender of the shape that training gives, without any training.

    Its items lie in clusters and its heads look sharply enough that attention is neither uniform
    nor a lookup, so that approximations have something to get wrong. `shape` is the rest of it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Recommender(RecommenderConfig(n_items=items, content_dim=content, **shape))
        centres = torch.randn(max(1, round(items**0.5)), model.config.dim)
        own = torch.randn(items, model.config.dim)
        with torch.no_grad():
            chosen = centres[torch.randint(len(centres), (items,))]
            model.id_embedding.weight.copy_(0.1 * (chosen + 0.7 * own))
            attention, width = model.cross_attention, model.config.dim**0.5
            # Logits have a standard deviation of about 2, of which the user has the larger part.
            attention.w_q.weight.normal_(std=1 / width)
            attention.w_k.weight.normal_(std=1 / width)
            if model.state_attention is not None:
                model.state_attention.query.weight.normal_(std=1.5 / width)
            if attention.w_v is not None:
                attention.w_v.weight.normal_(std=0.6 / width)
            attention.w_o.weight.normal_(std=4 / width)  # of vectors of a length below 2
            model.prior.copy_(0.3 * torch.randn(items))
        room = (items, model.config.transitions_per_item)
        columns = torch.randint(max(1, items), room, dtype=torch.int32)
        model.statistics.load(
            TransitionCounts(columns, 10 * torch.rand(room) ** 4), MAX_REQUEST_GAP
        )
    return model.eval()


# ------------------------------------------------------------------------------ the parts


def _generate(target: Path, items: int, users: int, seed: int) -> None:
    rng = random.Random(seed)
    catalogue = [
        Item(
            f"item-{number}",
            title=" ".join(rng.sample(_WORDS, 3)),
            description=" ".join(rng.choices(_WORDS, k=20)),
            categories=(rng.choice(_WORDS),),
        )
        for number in range(items)
    ]
    lengths = [*LENGTHS, *(rng.randint(20, 80) for _ in range(users - len(LENGTHS)))]
    counts = np.zeros(items, dtype=np.int64)

    def events(user: int, length: int) -> list[Event]:
        # Squared, so that some items are popular.
        rows = [int(items * rng.random() ** 2) for _ in range(length)]
        np.add.at(counts, rows, 1)
        at = sorted(rng.randrange(365 * _DAY) for _ in rows)
        start = 1_700_000_000_000_000  # in November 2023
        return [
            Event(f"user-{user}", f"item-{row}", timestamp=start + offset)
            for row, offset in zip(rows, at, strict=True)
        ]

    async def fill() -> None:
        store = SQLiteStore(target / STORE_FILE)
        try:
            await store.put_items(catalogue)
            log = [event for user, length in enumerate(lengths) for event in events(user, length)]
            await store.append(log)
        finally:
            await store.close()

    asyncio.run(fill())
    ids = tuple(item.item_id for item in catalogue)
    encoder = open_encoder(Settings.read().encoder)
    model = random_model(items, content=encoder.dimension, seed=seed)
    trained = TrainedModel(model, ids, counts, encoder.name, {})
    Registry(target / MODELS_FOLDER).publish(trained.to_files(), {"metrics": {}})


def _copy(data: Path, target: Path) -> None:
    """The store, the models and what is derived of texts; nothing in `data` is changed."""
    store = data / STORE_FILE
    if not store.is_file():
        raise NotFound(f"there is no store in {data}: {STORE_FILE} is missing")
    log = store.with_name(store.name + "-wal")
    if log.exists() and log.stat().st_size:
        # Someone may be writing. A copy through SQLite is of one moment, and opens only to read.
        uri = store.absolute().as_uri() + "?mode=ro"
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        source = apsw.Connection(uri, flags=flags, vfs=checksum_vfs())
        copy = apsw.Connection(str(target / STORE_FILE), vfs=checksum_vfs())
        try:
            with copy.backup("main", source, "main") as backup:
                while not backup.done:
                    backup.step(10_000)
        finally:
            copy.close()
            source.close()
    else:
        shutil.copyfile(store, target / STORE_FILE)
    if (data / MODELS_FOLDER).is_dir():
        ignored = shutil.ignore_patterns("staging", "lock")
        shutil.copytree(data / MODELS_FOLDER, target / MODELS_FOLDER, ignore=ignored)
    if (data / EMBEDDINGS_FILE).is_file():
        shutil.copyfile(data / EMBEDDINGS_FILE, target / EMBEDDINGS_FILE)
