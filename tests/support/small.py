"""Small things to test on: a model with every weight drawn, a text encoder, a catalogue, logs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from models.catalogue.catalogue import Catalogue
from models.catalogue.item_values import ItemEntry
from models.catalogue.snapshot import Snapshot
from models.data.interactions import Interactions
from models.encoder.event_bias import UNKNOWN
from models.history.user_history import UserHistory
from models.recommender.artifact import TrainedModel
from models.recommender.co_occurrence import ItemSimilarity, TransitionCounts
from models.recommender.recommender import Recommender, RecommenderConfig

DIMENSION = 8  # of the text embeddings
TYPES = ("view", "dislike", "purchase")  # of the models that know several
TOLD: dict[str, Any] = {"n_event_types": 3, "dislike_type": 1, "dislike_heads": 1}  # their shape
SECOND = 1_000_000
DAY = 86_400 * SECOND


def encode(texts: Sequence[str]) -> NDArray[np.float32]:
    """Unit vectors that depend only on the text; zero for a text without a letter or digit."""
    out = np.zeros((len(texts), DIMENSION), dtype=np.float32)
    for row, text in enumerate(texts):
        if any(letter.isalnum() for letter in text):
            drawn = np.random.default_rng(zlib.crc32(text.encode())).normal(size=DIMENSION)
            out[row] = drawn / np.linalg.norm(drawn)
    return out


def random_model(seed: int = 0, **shape: Any) -> Recommender:
    """A recommender in which no weight has its initial value, so that none can be forgotten."""
    given: dict[str, Any] = {
        "n_items": 12,
        "content_dim": DIMENSION,
        "dim": 12,
        "heads": 3,
        "blocks": 2,
    }
    model = Recommender(RecommenderConfig(**given | {"transitions_per_item": 5} | shape))
    kept = random_followers(seed, model.config.n_items, model.config.transitions_per_item)
    lately = None
    if model.statistics.recent_popularity is not None:
        lately = torch.randn(
            model.statistics.recent_popularity.shape, generator=torch.Generator().manual_seed(seed)
        )
    model.statistics.load(kept, 2 * DAY, lately)
    if model.config.similar_items:
        model.set_similarity(random_similarity(seed, model.config.n_items, 5))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        own = model.new_prior  # drawn last: what the others are does not hang on there being one
        others = [(name, part) for name, part in model.named_parameters() if part is not own]
        for name, weight in [*others, ("new_prior", own)]:
            drawn = torch.randn(weight.shape, generator=generator)
            # Norms stay near 1, matrices near orthogonal, biases on the score of order 1.
            if "norm" in name and name.endswith("weight"):
                weight.copy_(1 + 0.3 * drawn)
            elif weight.dim() == 2 and "recency" not in name:
                weight.copy_(1.2 * drawn / weight.shape[1] ** 0.5)
            else:
                weight.copy_(0.7 * drawn)
    return model.eval()


def random_followers(seed: int, items: int, most: int) -> TransitionCounts:
    """None to `most` distinct followers of each item, the most frequent first."""
    rng = np.random.default_rng(seed)
    columns = np.full((items, most), items, dtype=np.int32)
    counts = np.zeros((items, most), dtype=np.float32)
    for row in range(items):
        some = int(rng.integers(0, min(most, items) + 1))
        columns[row, :some] = rng.choice(items, some, replace=False)
        counts[row, :some] = np.sort(rng.exponential(2, some))[::-1]
    return TransitionCounts(torch.from_numpy(columns), torch.from_numpy(counts))


def random_similarity(seed: int, items: int, most: int) -> ItemSimilarity:
    """None to `most` distinct items like each item, of weights of both signs."""
    columns, counts, _ = random_followers(seed + 1, items, most)
    drawn = torch.randn(counts.shape, generator=torch.Generator().manual_seed(seed))
    return ItemSimilarity(columns, drawn * (counts > 0))


def entries(count: int, first: int = 0) -> list[ItemEntry]:
    """Items i0, i1, …, each with a title and a description of its own."""
    return [
        ItemEntry(f"i{n}", f"title {n}", {"title": f"title {n}", "description": f"about {n}"})
        for n in range(first, first + count)
    ]


def catalogue(count: int) -> Catalogue:
    return Catalogue.empty(DIMENSION).updated(entries(count), [], encode)


def trained(model: Recommender, counts: ArrayLike | None = None) -> TrainedModel:
    """The model as trained on items i0, i1, …"""
    items = model.config.n_items
    given = np.arange(items) + 1 if counts is None else np.asarray(counts)
    ids = tuple(f"i{n}" for n in range(items))
    types = TYPES[: model.config.n_event_types]
    return TrainedModel(model, ids, given.astype(np.int64), "fake", {"note": "small"}, types)


def snapshot(
    items: int = 15, model: Recommender | None = None, counts: ArrayLike = (), **more: Any
) -> Snapshot:
    """Twelve trained items and a few that only their text describes."""
    made = trained(model or random_model())
    given = np.asarray(counts, dtype=np.int64)
    return Snapshot.build("v1", made, catalogue(items), given, **more)


def past(
    rows: ArrayLike, times: ArrayLike, weights: ArrayLike | None = None, **more: Any
) -> UserHistory:
    """A past of these columns."""
    items = np.asarray(rows, dtype=np.int32)
    given = np.ones(len(items)) if weights is None else np.asarray(weights)
    types = more.pop("types", np.full(len(items), UNKNOWN, np.int32))
    return UserHistory(items, np.asarray(times, np.int64), given.astype(np.float32), types, **more)


def random_past(seed: int, events: int, items: int, **more: Any) -> UserHistory:
    """Events over a few days, some at one moment, with weights around 1."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.choice(rng.integers(0, 5 * DAY, max(1, events)), events))
    return past(rng.integers(0, items, events), times, rng.uniform(0.2, 3, events), **more)


def cycle(users: int, length: int, items: int, seed: int = 0) -> Interactions:
    """Everyone goes round the items in one order, from a place of their own."""
    start = np.random.default_rng(seed).integers(0, items, users)
    step = np.arange(length)
    taken = (start[:, None] + step) % items
    return Interactions.from_columns(
        np.repeat(np.arange(users), length),
        taken.ravel(),
        np.tile(step * SECOND, users),
        n_users=users,
        n_items=items,
    )


def five_users() -> Interactions:
    """A log to work out by hand: user 1's two events at t=5 tie, and user 3 has none."""
    users = [0, 1, 0, 4, 1, 1, 2, 0, 4, 1, 2]  # arrival order is mixed on purpose
    items = [0, 3, 1, 5, 2, 4, 0, 2, 1, 0, 5]
    times = [30, 5, 10, 7, 5, 1, 40, 20, 6, 9, 41]
    return Interactions.from_columns(users, items, times, n_users=5, n_items=6)


class UserEvents(NamedTuple):
    """One user's events, oldest first: views into the log's columns, each [n]."""

    items: NDArray[np.int32]
    timestamps: NDArray[np.int64]
    weights: NDArray[np.float32]
    types: NDArray[np.int16]


def events_of(log: Interactions, user: int) -> UserEvents:
    rows = slice(log.offsets[user], log.offsets[user + 1])
    return UserEvents(log.items[rows], log.timestamps[rows], log.weights[rows], log.types[rows])


def sequences(log: Interactions) -> list[list[int]]:
    """Each user's items, oldest first."""
    return [events_of(log, u).items.tolist() for u in range(log.n_users)]


def newest_events(log: Interactions, n: int) -> Interactions:
    """The log of each user's n newest events, or all if there are fewer."""
    return log.where(log.positions >= np.repeat(log.lengths - n, log.lengths))
