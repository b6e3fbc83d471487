"""`ItemSteering`: rules as boosts and masks over item rows, pins, quotas and exploration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FEW_EVENTS = 20  # an item with fewer is explored


class Pin(NamedTuple):
    """An item that stands at a place whatever its score."""

    row: int
    position: int  # from 1


class Quota(NamedTuple):
    """The most items of an answer that may share a value of a field."""

    field: str  # of `ItemFields`, but not `item_id`
    most: int
    shown: tuple[int, ...] = ()  # rows of items before the answer, which count too


@dataclass(frozen=True, slots=True, eq=False)
class ItemSteering:
    """Instructions about a ranking of the N items of a catalogue."""

    boost: NDArray[np.float32] | None = None  # [N] added to the scores
    buried: NDArray[np.bool_] | None = None  # [N] behind all others
    pins: tuple[Pin, ...] = ()  # of distinct rows and positions
    quotas: tuple[Quota, ...] = ()
    explore: float = 0.0  # share of the places for items of fewer than `FEW_EVENTS` events
    seed: int = 0  # of the random draws of `explore`

    @property
    def pinned(self) -> NDArray[np.int64]:
        """The rows of the pins, in their order."""
        return np.array([pin.row for pin in self.pins], dtype=np.int64)

    def boosts_of(self, rows: NDArray[np.integer]) -> NDArray[np.float32] | None:
        """Return the boosts of some rows [L]; None without any rule that boosts."""
        return None if self.boost is None else self.boost[rows]

    @property
    def reorders(self) -> bool:
        """Whether more than the first items by score must be looked at."""
        return self.buried is not None or bool(self.quotas) or self.explore > 0


NO_STEERING = ItemSteering()
