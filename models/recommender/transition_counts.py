"""Item-to-item transition counts: what followed a user's last items in other histories.

    F(c) = Σ_{k<depth} decay^k M[item k from the end, c],  M[a, b] = w_a Σ 1 / distance^power

over pairs of events at most 20 apart, with a weight w of each item. The score's transition part is
λ(m) · log(1 + 2 F(c)).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions
from models.recommender.cooccurrence import pair_chunks
from models.recommender.item_rows import row_products, row_sums, top_items

MAX_PAIR_DISTANCE = 20
_SMOOTHING = 5.0  # events added to each item's


class CooccurrenceWindow(NamedTuple):
    """Weights of a user's recent events, of their items, and of the distance within a pair."""

    decay: float  # of an event's weight for each newer event
    depth: int  # number of newest events that count
    power: float  # exponent of the distance within a pair
    damping: float = 0.0  # exponent of an item's popularity by which its counts are divided

    def item_weights(self, log: Interactions) -> NDArray[np.float32]:
        """Return w_a = ((n_a + 5) / (n̄ + 5))^-damping of items with n_a events, n̄ on average.

        What followed a popular item says less about the item than what followed a rare one.
        Collective over the shards of the log.

        Returns:
            NDArray: float32 [n_items].
        """
        counts = log.total_item_counts()
        mean = counts.mean() if len(counts) else 0.0
        weights: NDArray[np.float32] = (
            ((counts + _SMOOTHING) / (mean + _SMOOTHING)) ** -self.damping
        ).astype(np.float32)
        return weights


# In a sequence the newest events say most by far: the ninth from the end would weigh 7e-5.
SEQUENCE_WINDOW = CooccurrenceWindow(0.3, 8, 2.0)
# In a small log few events followed any one item, so that more of the newest have to say it.
SMALL_LOG_WINDOW = CooccurrenceWindow(0.7, 32, 1.0, damping=0.25)
# Items of one basket have no order, and the next basket follows from all of them alike.
BASKET_WINDOW = CooccurrenceWindow(1.0, 180, 1.0)


class TransitionCounts(NamedTuple):
    """The K largest transition counts of each of N items.

    Wherever `recent` stands below, it is a user's item rows, int64 [n], newest first, of which
    the first `window.depth` count; -1 is an item outside the table, which still takes its place.
    """

    items: Tensor  # int32 [N, K], N where fewer than K items followed
    counts: Tensor  # float32 [N, K], 0 there
    window: CooccurrenceWindow = SEQUENCE_WINDOW

    def sums(self, recent: Tensor) -> Tensor:
        """Return F(c) of every item c, [N]."""
        recent, decay = self._weighted(recent)
        return row_sums(self.items, self.counts, recent, decay)

    def top(self, recent: Tensor, count: int) -> Tensor:
        """Return the items [≤ count] with the largest F above 0, in descending order."""
        return top_items(self.items, self.sums(recent), recent[: self.window.depth], count)

    def shares(self, recent: Tensor, targets: Tensor, beyond: int = 0) -> Tensor:
        """Return what each recent item adds to F of targets, int64 [T].

        Args:
            recent: as above.
            targets: item rows.
            beyond: further items that would count if the depth were so much larger.

        Returns:
            Tensor: [T, min(n, depth + beyond)].
        """
        recent, decay = self._weighted(recent, beyond)
        return row_products(self.items, self.counts, recent, decay, targets)

    def _weighted(self, recent: Tensor, beyond: int = 0) -> tuple[Tensor, Tensor]:
        """Return the recent items that count, and their weights."""
        depth = self.window.depth + beyond
        recent = recent[:depth]
        weights = self.window.decay ** torch.arange(depth)
        return recent, weights.to(recent.device)[: len(recent)]


def count_transitions(
    log: Interactions, per_item: int, window: CooccurrenceWindow = SEQUENCE_WINDOW
) -> TransitionCounts:
    """Count the transitions of a log and keep the `per_item` largest counts of each item.

    Collective over the shards of the log.
    """
    n, shards, weights = log.n_items, log.shards, window.item_weights(log)
    items = np.full((n, per_item), n, dtype=np.int32)
    counts = np.zeros((n, per_item), dtype=np.float32)
    for keys, sums in pair_chunks(log, window=MAX_PAIR_DISTANCE, power=window.power):
        rows, columns = np.divmod(keys, max(n, 1))
        values = sums * weights[rows]
        order = np.lexsort((-values, rows))  # by row, largest first; ties keep the column order
        rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
        kept = rank < per_item
        largest = shards.gather(columns[order][kept]), shards.gather(values[order][kept])
        at = shards.gather(rows[kept]), shards.gather(rank[kept])
        items[at], counts[at] = largest
    return TransitionCounts(torch.from_numpy(items), torch.from_numpy(counts), window)
