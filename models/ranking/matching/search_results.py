"""`SearchResults`: items that match a query, with their weights in the softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from models.data.vocabulary import RowIndices
from models.ranking.steering.lineup import Moved


@dataclass(frozen=True, slots=True, eq=False)
class SearchResults:
    """Items that match, best first.

    Boosts are in neither weights nor scores. A pinned item that was not compared has no weight, and
    a score of -inf.
    """

    rows: RowIndices  # [L] item rows
    weights: NDArray[np.float32]  # [L] share of the softmax gathered over the item's keys
    scores: NDArray[np.float32]  # [L] log of the weight before normalising, plus any personal part
    matched: tuple[dict[str, float], ...]  # [L] each field's share of the item's weight
    mode: Literal["exact", "coarse"]
    keys: int  # that were attended
    mass: float  # share of the softmax over all allowed keys that these hold; may be estimated
    # [L] of the scores, what the requester's memory added; None = nothing was added
    personal: NDArray[np.float32] | None = None
    moved: tuple[Moved | None, ...] = ()  # [L] of steered results; empty = by score alone
    boosts: NDArray[np.float32] | None = None  # [L] that are ranked with the scores
