"""History of one user, as rows of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.catalogue.snapshot import Snapshot
from models.encoder.event_bias import MASKED

Vector = NDArray[np.float32]
V = TypeVar("V")


@dataclass(frozen=True, slots=True, eq=False)
class UserHistory:
    """A requester's events, oldest first, as rows of the catalogue; and the profile beside them."""

    rows: NDArray[np.int32]  # [n] item rows, -1 = an item the catalogue does not know
    timestamps: NDArray[np.int64]  # [n] microseconds UTC
    weights: NDArray[np.float32]  # [n] > 0; they enter as + log w
    types: NDArray[np.int32]  # [n] by `Snapshot.type_rows`
    visible: NDArray[np.bool_] | None = None  # [n], True = may be attended
    vectors: Mapping[int, tuple[Vector | None, Vector | None]] = field(default_factory=dict)
    # event -> its own key and value, of the content space [D]; they stand in for the item's, and
    # where that has none, one stands for both
    profile_rows: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    profile_content: Vector | None = None  # [p, D] for profile entries that are no items
    before: int = 0  # events before these on items that can be attended, which stand elsewhere

    @classmethod
    def empty(cls) -> UserHistory:
        none = np.zeros(0, np.int32)
        return cls(none, np.zeros(0, np.int64), np.zeros(0, np.float32), none)

    def without(self, source: int) -> UserHistory:
        """Remove one event, or profile entry -1 - source where that is below 0.

        Raises IndexError where there is no such event or entry.
        """
        if source < 0:
            entry, content = -1 - source, self.profile_content
            return replace(
                self,
                profile_rows=np.delete(self.profile_rows, entry),
                profile_content=None if content is None else np.delete(content, entry, 0),
            )
        return self._select(np.delete(np.arange(len(self.rows)), source))

    def newest(self, start: int, before: int) -> UserHistory:
        """Keep the events from `start` on, and the profile.

        `before` of the others are on items that can be attended.
        """
        return replace(self._select(slice(start, None)), before=self.before + before)

    def _select(self, events: NDArray[np.int64] | slice) -> UserHistory:
        return replace(
            self,
            rows=self.rows[events],
            timestamps=self.timestamps[events],
            weights=self.weights[events],
            types=self.types[events],
            visible=None if self.visible is None else self.visible[events],
            vectors=select_vectors(self.vectors, np.arange(len(self.rows))[events]),
        )


def select_vectors(vectors: Mapping[int, V], events: NDArray[np.int64]) -> dict[int, V]:
    """Return what some events [n] have, by their places among these."""
    if not vectors:
        return {}
    return {at: vectors[each] for at, each in enumerate(events.tolist()) if each in vectors}


def attendable_events(snapshot: Snapshot, history: UserHistory) -> tuple[NDArray[np.int64], Tensor]:
    """The events that can be attended [n], and their item rows int64 [n], -1 for no item."""
    inside = (history.rows >= 0) & (history.rows < len(snapshot.has_vector))
    attendable = inside.copy()
    if inside.any():  # without any item there is nothing to take from
        attendable &= snapshot.has_vector.take(history.rows, mode="clip")
    for event in history.vectors:
        attendable[event] = True
    if history.visible is not None:
        attendable &= history.visible
    attendable &= history.types != MASKED
    source = np.flatnonzero(attendable)
    return source, torch.from_numpy(np.where(inside, history.rows, -1)[source].astype(np.int64))
