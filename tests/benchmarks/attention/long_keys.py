"""Keys to attend over, of any number: a trained model's, and drawn ones."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.catalogue.snapshot import Snapshot
from service.domain.errors import Invalid
from service.runtime.data_layout import EMBEDDINGS_FILE, MODELS_FOLDER, STORE_FILE
from service.snapshots.live_snapshot import LiveSnapshot
from service.snapshots.registry import Registry
from service.snapshots.served import Served
from service.snapshots.text_embeddings import EmbeddingCache, open_encoder
from service.stores.sqlite.store import SQLiteStore
from tests.benchmarks.attention.long_attention import Material

_HEADS, _WIDTH = 4, 16  # of drawn keys, as the recommender's
_USERS = 50  # the longest histories
_MIXED = 0.3  # of the second of two items at most, where a row is made of both


class Long(NamedTuple):
    """A served model, and what the users of the longest histories took."""

    snapshot: Snapshot
    rows: NDArray[np.int64]  # item rows, event by event
    longest: int  # events of the longest history


def long_users(data: Path, encoder: str) -> Long:
    """The current model of a data directory and its longest histories.

    Raises:
        Invalid: where no model is trained, or nobody did anything.
    """

    async def load() -> Long:
        store = SQLiteStore(data / STORE_FILE)
        try:
            embeddings = EmbeddingCache(open_encoder(encoder), data / EMBEDDINGS_FILE)
            with ThreadPoolExecutor(1) as workers:
                serving = LiveSnapshot(
                    store, Registry(data / MODELS_FOLDER), Served(embeddings), workers
                )
                await serving.open()
            snapshot = serving.snapshot
            if snapshot.trained is None:
                raise Invalid("", f"{data} has no model: heed train --data {data} makes one")
            counts: dict[str, int] = {}
            for part in store.scan(200_000):
                seen = np.bincount(part.users, minlength=len(part.user_ids))
                for at in np.flatnonzero(seen).tolist():
                    counts[part.user_ids[at]] = counts.get(part.user_ids[at], 0) + int(seen[at])
            longest = sorted(counts, key=lambda user: -counts[user])[:_USERS]
            if not longest:
                raise Invalid("", f"{data} has no events: heed import puts some in")
            rows = [
                snapshot.catalogue.rows((await store.history(user)).item_ids) for user in longest
            ]
            joined = np.concatenate(rows).astype(np.int64)
            known = joined[(joined >= 0) & snapshot.has_vector[joined.clip(0)]]
            return Long(snapshot, known, counts[longest[0]])
        finally:
            await store.close()

    return asyncio.run(load())


def distinct(long: Long, n: int, targets: int, factor: float = 1.0) -> Material:
    """N rows of which no two are alike: items that those users took, each with some of another.

    Queries are `factor` times as long as the model's: the more, the more peaked is attention.
    """
    generator = torch.Generator().manual_seed(n)
    items = torch.from_numpy(np.unique(long.rows))
    one = torch.randint(len(items), (n,), generator=generator)
    other = one + torch.randint(1, max(2, len(items)), (n,), generator=generator)
    first, second = items[one], items[other % len(items)]
    share = _MIXED * torch.rand(n, 1, generator=generator)
    tables = long.snapshot.tables
    keys, values = (
        torch.lerp(table[:, first], table[:, second], share).detach()
        for table in (tables.keys, tables.values)
    )
    queries, metric = _asked(long, targets)
    return Material(
        "trained, distinct" if factor == 1 else f"trained, distinct, x{factor:g}",
        keys,
        values,
        torch.zeros(keys.shape[:2]),
        queries * factor,
        n,
        metric=metric * factor**2,
    )


def repeated(long: Long, n: int, targets: int) -> Material:
    """N events on the items that those users took, as often as they did: rows of many in one."""
    generator = np.random.default_rng(n)
    events = long.rows[:n] if n <= len(long.rows) else generator.choice(long.rows, n)
    items, counts = np.unique(events, return_counts=True)
    tables, chosen = long.snapshot.tables, torch.from_numpy(items)
    queries, metric = _asked(long, targets)
    log_weights = torch.from_numpy(np.log(counts)).float().expand(len(tables.keys), -1)

    def whole() -> tuple[Tensor, Tensor]:
        each = torch.from_numpy(events)
        return tables.keys[:, each].detach(), tables.values[:, each].detach()

    return Material(
        "trained, as taken",
        tables.keys[:, chosen].detach(),
        tables.values[:, chosen].detach(),
        log_weights.contiguous(),
        queries,
        n,
        whole,
        metric,
    )


def drawn(n: int, targets: int, spread: float = 1.0) -> Material:
    """Normal keys and values that have nothing to do with each other; scores of that spread."""
    generator = torch.Generator().manual_seed(n)

    def normal(count: int) -> Tensor:
        return torch.randn(_HEADS, count, _WIDTH, generator=generator)

    metric = torch.eye(_WIDTH).expand(_HEADS, -1, -1) * spread**2
    return Material(
        f"random, spread {spread:g}",
        normal(n),
        normal(n),
        torch.zeros(_HEADS, n),
        spread * normal(targets),
        n,
        metric=metric,
    )


def _asked(long: Long, targets: int) -> tuple[Tensor, Tensor]:
    """Queries of targets [H, T, d], and the mean of qqᵀ over the catalogue."""
    tables = long.snapshot.tables
    items = np.flatnonzero(long.snapshot.has_vector)
    generator = np.random.default_rng(targets)
    chosen = torch.from_numpy(generator.choice(items, targets, replace=targets > len(items)))
    every = tables.queries[:, torch.from_numpy(items)].detach()
    return tables.queries[:, chosen].detach(), every.mT @ every / every.shape[1]
