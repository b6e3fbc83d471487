"""Item-to-item weights of EASE, which predict each item from the others that a user has.

EASE is the embarrassingly shallow autoencoder of Steck 2019: a ridge regression with zero diagonal.
The score's similarity part is

    w Σ_i B[i, c]

over the distinct items i of the newest events, with a weight w that held-out cases choose.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.data.interactions import Interactions
from models.data.row_sets import user_item_keys
from models.recommender.item_rows import row_products, row_sums, top_items

MAX_EASE_ITEMS = 20_000
RIDGE = 200.0  # the penalty on squared weights
_ROUNDING = 0.01  # of the penalty that single precision may lose
SIMILARITY_DEPTH = 512  # newest events that count, no more than a long history attends one by one
WEIGHTS_PER_ITEM = 256  # largest that are kept of each item


class ItemSimilarity(NamedTuple):
    """The K largest similarity weights of each of N items, in units of the score.

    Wherever `recent` stands below, it is a user's item rows, int64 [n], newest first, of which the
    first `SIMILARITY_DEPTH` count; -1 is an item outside the table. `liked` is bool [n].
    """

    items: Tensor  # int32 [N, K], N where fewer than K items have a weight
    weights: Tensor  # float32 [N, K], 0 there

    def scaled(self, factor: float) -> ItemSimilarity:
        """Return the weights times a factor."""
        return self._replace(weights=self.weights * factor)

    def to(self, device: torch.device) -> ItemSimilarity:
        """Return the table on a device."""
        return ItemSimilarity(self.items.to(device), self.weights.to(device))

    def sums(self, recent: Tensor, liked: Tensor) -> Tensor:
        """Return the part of every item, [N]."""
        recent = recent[:SIMILARITY_DEPTH]
        return row_sums(self.items, self.weights, recent, event_shares(recent, liked))

    def top(self, recent: Tensor, sums: Tensor, count: int) -> Tensor:
        """Return the items [≤ count] of the largest `sums` above 0, in descending order."""
        return top_items(self.items, sums, recent[:SIMILARITY_DEPTH], count)

    def shares(self, recent: Tensor, liked: Tensor, targets: Tensor) -> Tensor:
        """Return what each recent event adds to targets, int64 [T]: [T, min(n, depth)]."""
        recent = recent[:SIMILARITY_DEPTH]
        return row_products(self.items, self.weights, recent, event_shares(recent, liked), targets)


def event_shares(recent: Tensor, liked: Tensor) -> Tensor:
    """Return the share of each recent event in its item, [n]: an item counts once.

    The liked events on an item have equal shares; others, and those on row -1, have none.
    """
    counts = liked[: len(recent)] & (recent >= 0)
    _, item, events = torch.unique(
        torch.where(counts, recent, -1), return_inverse=True, return_counts=True
    )
    shares: Tensor = counts / events[item]
    return shares


def ease_similarity(log: Interactions) -> ItemSimilarity:
    """Compute the weights of EASE and keep the largest of each item, by magnitude.

    Collective over the shards of the log. Raises ValueError as `ease_weights` does.
    """
    weights = _solve(log, RIDGE)
    return log.shards.broadcast(lambda: _largest(weights))


def ease_weights(log: Interactions, *, ridge: float = RIDGE) -> Tensor:
    """Regress each item on the others: B, float32 [n_items, n_items], of source and target.

    With G = X'X of the binary user-item matrix X and P = (G + ridge I)^-1, B = I - P / diag(P).
    A user scores X_u B. Dislikes are left out, and the order of events is ignored. Time grows with
    n_items**3; memory is about 20 * n_items**2 bytes (8 GB at 20,000 items). Collective over the
    shards of the log, of which the first process inverts the sum of their matrices G.

    Raises:
        ValueError: for a catalogue of more than `MAX_EASE_ITEMS`.
    """
    return log.shards.broadcast_tensor(_solve(log, ridge))


def _solve(log: Interactions, ridge: float) -> Tensor:
    """Return the weights in the first process of the log's shards, float32, else some matrix."""
    if log.n_items > MAX_EASE_ITEMS:
        need = 20 * log.n_items**2 / 1e9
        raise ValueError(
            f"EASE inverts an n_items x n_items matrix: {log.n_items} items need about "
            f"{need:.0f} GB, and {MAX_EASE_ITEMS} are allowed"
        )
    gram = _gram(log.liked())
    log.shards.sum_on_first(gram)
    if log.shards.is_first:
        # No eigenvalue is above the largest row sum: where its rounding is small beside the ridge,
        # single precision solves the regression in half the time.
        largest = float(gram.sum(1).max()) if len(gram) else 0.0
        if largest * torch.finfo(torch.float32).eps <= _ROUNDING * ridge:
            gram = gram.float()
        gram.diagonal().add_(ridge)
        torch.linalg.cholesky(gram, out=gram)
        torch.cholesky_inverse(gram, out=gram)
        gram /= -gram.diagonal().clone()
        gram.fill_diagonal_(0.0)
    return gram.float()


def _largest(weights: Tensor) -> ItemSimilarity:
    """Keep the largest weights [N, N] of each item, by magnitude."""
    n = len(weights)
    kept = min(WEIGHTS_PER_ITEM, max(1, n))
    items = weights.abs().topk(min(kept, n), dim=1).indices
    values = weights.gather(1, items)
    return ItemSimilarity(torch.where(values != 0, items, n).int(), values.contiguous())


def _gram(log: Interactions) -> Tensor:
    """Count the users of both items in this shard, float64 [n_items, n_items]."""
    held = np.unique(user_item_keys(log.users, log.items, max(log.n_items, 1)))
    users, items = (torch.from_numpy(part) for part in np.divmod(held, max(log.n_items, 1)))
    shape = (log.n_items, log.n_users)
    taken_by = torch.sparse_coo_tensor(
        torch.stack((items, users)), torch.ones(len(held)), shape, check_invariants=True
    ).coalesce()
    gram = torch.zeros(log.n_items, log.n_items, dtype=torch.float64)
    width = max(1, (1 << 26) // max(log.n_users, 1))  # dense columns held at once: 256 MB
    for start in range(0, log.n_items, width):
        inside = (items >= start) & (items < start + width)
        block = torch.zeros(log.n_users, min(width, log.n_items - start))
        block[users[inside], items[inside] - start] = 1.0
        gram[:, start : start + width] = torch.sparse.mm(taken_by, block)
    return gram
