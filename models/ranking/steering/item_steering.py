"""`ItemSteering`: rules as boosts and masks over item rows, pins, quotas and exploration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.ranking.steering.boost_unit import boost_unit

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
    """Instructions about a ranking of the N items of a catalogue.

    Boosts are added to the scores, or are relative: in `boost_unit` of the scores that are ranked.
    """

    boost: NDArray[np.float32] | None = None  # [N]
    buried: NDArray[np.bool_] | None = None  # [N] behind all others
    pins: tuple[Pin, ...] = ()  # of distinct rows and positions
    quotas: tuple[Quota, ...] = ()
    explore: float = 0.0  # share of the places for items of fewer than `FEW_EVENTS` events
    seed: int = 0  # of the random draws of `explore`
    is_relative: bool = False

    @property
    def pinned(self) -> NDArray[np.int64]:
        """The rows of the pins, in their order."""
        return np.array([pin.row for pin in self.pins], dtype=np.int64)

    def boosts_of(self, rows: NDArray[np.integer]) -> NDArray[np.float32] | None:
        """Return the boosts of some rows [L]; None without any rule that boosts."""
        return None if self.boost is None else self.boost[rows]

    def scaled(self, scores: NDArray[np.floating[Any]]) -> ItemSteering:
        """Return this steering with boosts that are added, of a ranking by these scores [n].

        If the unit is so large that a boost would be no finite float32, as of scores that are sums
        of weights of 1e38, the unit is the largest one whose boosts are.
        """
        if self.boost is None or not self.is_relative:
            return self
        largest = max(1.0, float(np.abs(self.boost).max(initial=0.0)))
        # Half of it, so that no boost is rounded to infinity.
        unit = min(boost_unit(scores), float(np.finfo(np.float32).max) / largest / 2)
        return replace(self, boost=self.boost * np.float32(unit), is_relative=False)

    @property
    def reorders(self) -> bool:
        """Report whether more than the first items by score must be looked at."""
        return self.buried is not None or bool(self.quotas) or self.explore > 0


NO_STEERING = ItemSteering()
