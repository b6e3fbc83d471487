"""A user's memory: keys and values of what they did and said, and the summary of the recent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.memory import KeyValueMemory
from models.recommender import ItemTables
from models.snapshot import Snapshot

Vector = NDArray[np.float32]

FOREVER = 2**62  # microseconds or events: an age and a distance in the last bucket


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """What the asker did, oldest first, as rows of the catalogue; and the profile beside it."""

    rows: NDArray[np.int32]  # [n] item rows, -1 = an item the catalogue does not know
    timestamps: NDArray[np.int64]  # [n] microseconds UTC
    weights: NDArray[np.float32]  # [n] > 0; they enter as + log w
    visible: NDArray[np.bool_] | None = None  # [n], True = may be attended
    vectors: Mapping[int, tuple[Vector | None, Vector | None]] = field(default_factory=dict)
    # event -> its own key and value, of the content space [D]; they stand in for the item's, and
    # where that has none, one stands for both
    profile_rows: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    profile_content: Vector | None = None  # [p, D] for profile entries that are no items

    @classmethod
    def nothing(cls) -> Past:
        """No event and no profile."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True, eq=False)
class UserMemory:
    """Keys and values of what can be attended, m rows: events, then profile entries."""

    memory: KeyValueMemory  # keys and values [m, H, d]
    bias: Tensor  # [H, m], the memory's: recency + log weight
    rows: Tensor  # int64 [m] item rows, -1 where the row is no item
    source: NDArray[np.int64]  # [m] event of the past; -1 - i is profile entry i
    distance: Tensor  # int64 [m] events between this one and the newest
    age: Tensor  # int64 [m] microseconds at the request
    log_weights: Tensor  # [m]
    summary: Tensor  # [dim] h_u, zero without events

    def __len__(self) -> int:
        return len(self.memory)

    def take(self, rows: Tensor) -> UserMemory:
        """The memory of these rows [k] alone, int64; their places and ages stay."""
        return UserMemory(
            self.memory.take(rows),
            self.bias[:, rows],
            self.rows[rows],
            self.source[rows.numpy()],
            self.distance[rows],
            self.age[rows],
            self.log_weights[rows],
            self.summary,
        )


@torch.inference_mode()
def summarise(snapshot: Snapshot, past: Past) -> Tensor:
    """h_u [dim], the encoder's summary of the newest events that can be seen; zero without any."""
    model = snapshot.model
    source, rows = _attendable(snapshot, past)
    items = rows[rows >= 0][-model.config.window :]
    if model.encoder is None or not len(items):
        return torch.zeros(model.config.dim)
    times = torch.from_numpy(past.timestamps[source])[rows >= 0][-model.config.window :]
    return model.summaries(snapshot.tables.vectors[items][None], times[None])[0, -1]


@torch.inference_mode()
def remember(
    snapshot: Snapshot, past: Past, at: int, *, summary: Tensor | None = None
) -> UserMemory:
    """The memory of a past: what cannot be seen is left out as if it had never happened.

    Args:
        snapshot: whose tables hold the keys and values.
        past: what the asker did.
        at: the request's time, microseconds UTC; an event after it has age 0.
        summary: from `summarise` with the same arguments, where the caller has it.
    """
    tables = snapshot.tables
    source, rows = _attendable(snapshot, past)
    keys = _heads_last(tables.keys, rows)  # (n, H, d)
    values = _heads_last(tables.values, rows)
    own = [(at_row, past.vectors[int(event)]) for at_row, event in enumerate(source)
           if int(event) in past.vectors] if past.vectors else []  # fmt: skip
    for at_row, (key, value) in own:
        row = int(rows[at_row])
        alone = row < 0 or not snapshot.known[row]  # no item to take a missing one from: K = V
        own_key = value if key is None and alone else key
        own_value = key if value is None and alone else value
        if own_key is not None:
            keys[at_row] = _projected(snapshot, own_key).keys[:, 0]
        if own_value is not None:
            values[at_row] = _projected(snapshot, own_value).values[:, 0]
    log_weights = torch.from_numpy(np.log(past.weights[source]))
    times = torch.from_numpy(past.timestamps[source])
    distance = torch.arange(len(source) - 1, -1, -1)
    age = (at - times).clamp(min=0)

    if summary is None:
        summary = summarise(snapshot, past)
    profile = _profile(snapshot, past)
    if profile is not None:
        extra_keys, extra_values, extra_rows = profile
        count = len(extra_rows)
        keys, values = torch.cat([keys, extra_keys]), torch.cat([values, extra_values])
        rows = torch.cat([rows, extra_rows])
        # A profile is timeless: it weighs as the oldest of events do.
        distance = torch.cat([distance, torch.full((count,), FOREVER)])
        age = torch.cat([age, torch.full((count,), FOREVER)])
        log_weights = torch.cat([log_weights, torch.zeros(count)])
        source = np.concatenate([source, -1 - np.arange(count)])
    bias = snapshot.model.recency(distance[None], age[None])[:, 0] + log_weights  # (H, m)
    memory = KeyValueMemory(keys, values, bias=bias)
    return UserMemory(memory, bias, rows, source, distance, age, log_weights, summary)


def _attendable(snapshot: Snapshot, past: Past) -> tuple[NDArray[np.int64], Tensor]:
    """The events that can be attended [n], and their item rows int64 [n], -1 for no item."""
    inside = (past.rows >= 0) & (past.rows < len(snapshot.known))
    attendable = np.zeros(len(past.rows), dtype=np.bool_)
    attendable[inside] = snapshot.known[past.rows[inside]]
    for event in past.vectors:
        attendable[event] = True
    if past.visible is not None:
        attendable &= past.visible
    source = np.flatnonzero(attendable)
    return source, torch.from_numpy(np.where(inside, past.rows, -1)[source].astype(np.int64))


def _profile(snapshot: Snapshot, past: Past) -> tuple[Tensor, Tensor, Tensor] | None:
    """Keys, values [p, H, d] and item rows [p] of the profile entries."""
    rows = torch.from_numpy(past.profile_rows.astype(np.int64))
    if not len(rows):
        return None
    keys = _heads_last(snapshot.tables.keys, rows)
    values = _heads_last(snapshot.tables.values, rows)
    if past.profile_content is not None:
        words = rows < 0
        projected = _projected(snapshot, past.profile_content)
        keys[words] = projected.keys.transpose(0, 1)[words]
        values[words] = projected.values.transpose(0, 1)[words]
    return keys, values, rows


def _projected(snapshot: Snapshot, content: Vector) -> ItemTables:
    """The tables of things that are no items, from their content vectors [D] or [p, D]."""
    vectors = torch.from_numpy(np.atleast_2d(content).astype(np.float32))
    rows = torch.full((len(vectors),), -1)
    return snapshot.model.tables(rows, vectors)


def _heads_last(table: Tensor, rows: Tensor) -> Tensor:
    """[H, N, d] at rows [m] -> [m, H, d], a copy; row -1 gives anything."""
    return table.transpose(0, 1)[rows.clamp(min=0)] if table.shape[1] else table.new_zeros(
        len(rows), table.shape[0], table.shape[2]
    )  # fmt: skip
