"""History of one user, as rows of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class UserHistory:
    """What the requester did, oldest first, as rows of the catalogue; and the profile beside it."""

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
        """A history without events and profile."""
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
        return replace(
            self,
            rows=np.delete(self.rows, source),
            timestamps=np.delete(self.timestamps, source),
            weights=np.delete(self.weights, source),
            types=np.delete(self.types, source),
            visible=None if self.visible is None else np.delete(self.visible, source),
            vectors={at - (at > source): own for at, own in self.vectors.items() if at != source},
        )

    def newest(self, start: int, before: int) -> UserHistory:
        """Keep the events from `start` on, and the profile.

        Args:
            start: how many events are left out.
            before: how many of those are on items that can be attended.
        """
        part = slice(start, None)
        return replace(
            self,
            rows=self.rows[part],
            timestamps=self.timestamps[part],
            weights=self.weights[part],
            types=self.types[part],
            visible=None if self.visible is None else self.visible[part],
            vectors={at - start: own for at, own in self.vectors.items() if at >= start},
            before=self.before + before,
        )
