"""Item-to-item counts and weights: transitions, and the similarity of EASE.

Transition counts say what followed a user's last items in other histories:

    F(c) = Σ_{k<depth} decay^k M[item k from the end, c],  M[a, b] = w_a Σ 1 / distance^power

over pairs of events at most 20 apart, with a weight w of each item. The score's transition part is
λ(m) · log(1 + 2 F(c)). EASE (the embarrassingly shallow autoencoder of Steck 2019: a ridge
regression with zero diagonal) predicts each item from the others that a user has. The score's
similarity part is

    w Σ_i B[i, c]

over the distinct items i of the newest events, with a weight w that held-out cases choose.

The rows of such matrices are sparse: `items` int32 [N, K], the column of each entry, N where a row
has fewer, and `values` float32 [N, K], 0 there. Rows are int64 [n]; row -1 is an item outside the
matrix, whose entries count for nothing. Weights are float [n].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions
from models.data.vocabulary import sorted_union, user_item_keys


def row_sums(items: Tensor, values: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of rows, [N]."""
    size = len(items)
    chosen = rows.clamp(min=0)
    entries = values.index_select(0, chosen) * (weights * (rows >= 0))[:, None]
    total = values.new_zeros(size + 1)
    total.index_add_(0, items.index_select(0, chosen).flatten(), entries.flatten())
    return total[:size]


def row_products(
    items: Tensor, values: Tensor, rows: Tensor, weights: Tensor, targets: Tensor
) -> Tensor:
    """Each row's addend to the sums of targets, int64 [T]: [T, n]; a target of -1 is no column.

    All tensors must be on the CPU: few entries are of a target, and NumPy finds these in a quarter
    of the time that torch takes to add up all.
    """
    columns, kept = items.numpy(), values.numpy()
    row, target = rows.numpy(), targets.numpy()
    # The place of each column among the targets; the last is of all others. A target of -1 shares
    # the entry N with what fills short rows up, which is 0.
    places = np.full(len(columns) + 1, len(target), np.int32)
    places[target] = np.arange(len(target), dtype=np.int32)
    chosen = np.maximum(row, 0)
    at = places.take(columns.take(chosen, axis=0))  # (n, K)
    place, entry = np.divmod(np.flatnonzero(at.ravel() < len(target)), columns.shape[1])
    weighted = kept[chosen[place], entry] * (weights.numpy() * (row >= 0))[place]
    products = np.bincount(
        at[place, entry] * len(row) + place, weighted, minlength=len(target) * len(row)
    ).reshape(len(target), len(row))
    return torch.from_numpy(products[places[target]].astype(kept.dtype))


def top_items(items: Tensor, total: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the columns [≤ count] with the largest `total` [N] above 0, in descending order.

    `total` is 0 where none of the rows has an entry.
    """
    near = items.index_select(0, rows.clamp(min=0)).flatten()
    if len(near) < len(total):  # in a large catalogue hardly any item has one
        reached = torch.from_numpy(sorted_union(near[near < len(total)].long().numpy()))
    else:
        reached = torch.arange(len(total))
    best, at = torch.topk(total[reached], min(count, len(reached)))
    return reached[at[best > 0]]


# Pairs sorted at once while counting: bounds the working memory to some 100 MB.
CHUNK = 1 << 22

PairSums = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Keys item * n_items + item that followed, ascending, and their sums."""


def transition_matrix(log: Interactions, *, window: int, power: float) -> Tensor:
    """Sum 1 / distance ** power over all pairs of events of a user at most `window` apart.

    M[a, b] counts a followed by b; dislikes follow nothing. Returns a coalesced sparse float32
    [n_items, n_items] with at most window * E entries; working memory is bounded. Collective over
    the shards of the log: each process returns the whole matrix.
    """
    n, shards = log.n_items, log.shards
    keys, counts = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.float32)]
    for chunk_keys, chunk_counts in pair_chunks(log, window=window, power=power):
        keys.append(shards.gather(chunk_keys))
        counts.append(shards.gather(chunk_counts))
    indices = np.stack(np.divmod(np.concatenate(keys), max(n, 1)))
    values = torch.from_numpy(np.concatenate(counts))
    return torch.sparse_coo_tensor(
        torch.from_numpy(indices), values, (n, n), is_coalesced=True, check_invariants=True
    )


def pair_chunks(log: Interactions, *, window: int, power: float) -> Iterator[PairSums]:
    """Iterate over the sums of `transition_matrix`, some whole rows at a time.

    Each process of a log in several shards adds up the sums of all for a part of the rows of a
    chunk: those of the first shard come first. Collective: a process goes through all chunks.
    """
    n, shards = log.n_items, log.shards
    # Events in order of their item: one chunk then holds whole rows of M.
    by_item = np.argsort(log.items, kind="stable")
    edges = np.concatenate(([0], np.cumsum(log.item_counts())))  # [n + 1] rows of by_item
    every = shards.sum(edges)  # of all shards, so that their chunks are of the same rows
    first = 0
    while first < n:  # items whose events are about a chunk, or a single one
        size = every[first] + max(1, shards.count * CHUNK // window)
        last = max(first + 1, int(np.searchsorted(every, size, side="right")) - 1)
        events = by_item[edges[first] : edges[last]]
        keys, sums = sum_pairs(log, log.items, events, window, power)
        if shards.count > 1:
            shares = np.linspace(every[first], every[last], shards.count + 1)[1:-1]
            rows = np.clip(np.searchsorted(every, shares), first, last)
            keys, sums = _merged(log, keys, sums, np.searchsorted(keys, rows * n))
        yield keys, sums.astype(np.float32)
        first = last


def _merged(
    log: Interactions,
    keys: NDArray[np.int64],
    sums: NDArray[np.float64],
    cuts: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    received = np.concatenate(log.shards.exchange(np.split(keys, cuts)))
    parts = np.concatenate(log.shards.exchange(np.split(sums, cuts)))
    order = np.argsort(received, kind="stable")
    return _add_up(received[order], parts[order])


def sum_pairs(
    log: Interactions,
    sources: NDArray[np.integer[Any]],
    events: NDArray[np.int64],
    window: int,
    power: float,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Sum 1 / distance ** power over the pairs that start at some events, by source and item.

    `sources` is a code for each event of the log, [E]; `events` are rows of the log, [n]; pairs are
    at most `window` events apart. Returns the keys source * n_items + item of the second event,
    ascending, and their sums.
    """
    following = np.repeat(log.offsets[1:], log.lengths)[events] - events - 1
    pairs = np.minimum(following, window)
    first = np.repeat(events, pairs)
    distance = np.arange(len(first)) - np.repeat(np.cumsum(pairs) - pairs, pairs) + 1
    liked = ~log.disliked[first + distance]
    first, distance = first[liked], distance[liked]
    keys = sources[first].astype(np.int64) * log.n_items + log.items[first + distance]
    order = np.argsort(keys, kind="stable")
    weights = np.concatenate(([0.0], np.arange(1.0, window + 1) ** -power))[distance[order]]
    return _add_up(keys[order], weights)


def _add_up(
    keys: NDArray[np.int64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Sum the weights of equal keys, which are ascending [n]; returns distinct keys and sums."""
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.add.reduceat(weights, starts) if len(starts) else weights


MAX_PAIR_DISTANCE = 20
_SMOOTHING = 5.0  # events added to each item's


class CooccurrenceWindow(NamedTuple):
    decay: float  # of an event's weight for each newer event
    depth: int  # number of newest events that count
    power: float  # exponent of the distance within a pair
    damping: float = 0.0  # exponent of an item's popularity by which its counts are divided

    def item_weights(self, log: Interactions) -> NDArray[np.float32]:
        """Weights [n_items] w_a = ((n_a + 5) / (n̄ + 5))^-damping of items with n_a events, n̄ on
        average.

        An item that followed a popular one says less about it than one that followed a rare one.
        Collective over the shards of the log.
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

    `recent` stands for a user's item rows, int64 [n], newest first. The first `window.depth` count;
    -1 is an item outside the table, which still takes its place.
    """

    items: Tensor  # int32 [N, K], N where fewer than K items followed
    counts: Tensor  # float32 [N, K], 0 there
    window: CooccurrenceWindow = SEQUENCE_WINDOW

    def sums(self, recent: Tensor) -> Tensor:
        """F(c) of every item c, [N]."""
        recent, decay = self._weighted(recent)
        return row_sums(self.items, self.counts, recent, decay)

    def top(self, recent: Tensor, count: int) -> Tensor:
        """The items [≤ count] with the largest F above 0, in descending order."""
        return top_items(self.items, self.sums(recent), recent[: self.window.depth], count)

    def shares(self, recent: Tensor, targets: Tensor, beyond: int = 0) -> Tensor:
        """What each recent item adds to F of targets, int64 [T]: [T, min(n, depth + beyond)].

        `beyond` further items count as if the depth were larger.
        """
        recent, decay = self._weighted(recent, beyond)
        return row_products(self.items, self.counts, recent, decay, targets)

    def _weighted(self, recent: Tensor, beyond: int = 0) -> tuple[Tensor, Tensor]:
        depth = self.window.depth + beyond
        recent = recent[:depth]
        weights = self.window.decay ** torch.arange(depth)
        return recent, weights.to(recent.device)[: len(recent)]


def count_transitions(
    log: Interactions, per_item: int, window: CooccurrenceWindow = SEQUENCE_WINDOW
) -> TransitionCounts:
    """Count a log's transitions and keep the `per_item` largest of each item; collective."""
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


MAX_EASE_ITEMS = 20_000
RIDGE = 200.0  # the penalty on squared weights
_ROUNDING = 0.01  # of the penalty that single precision may lose
SIMILARITY_DEPTH = 512  # newest events that count, no more than a long history attends one by one
WEIGHTS_PER_ITEM = 256  # largest that are kept of each item


class ItemSimilarity(NamedTuple):
    """The K largest similarity weights of each of N items, in units of the score.

    `recent` is as in `TransitionCounts`, with `SIMILARITY_DEPTH` for the depth; `liked` is bool
    [n].
    """

    items: Tensor  # int32 [N, K], N where fewer than K items have a weight
    weights: Tensor  # float32 [N, K], 0 there

    def scaled(self, factor: float) -> ItemSimilarity:
        return self._replace(weights=self.weights * factor)

    def to(self, device: torch.device) -> ItemSimilarity:
        return ItemSimilarity(self.items.to(device), self.weights.to(device))

    def sums(self, recent: Tensor, liked: Tensor) -> Tensor:
        """The part of every item, [N]."""
        recent = recent[:SIMILARITY_DEPTH]
        return row_sums(self.items, self.weights, recent, event_shares(recent, liked))

    def top(self, recent: Tensor, sums: Tensor, count: int) -> Tensor:
        """The items [≤ count] of the largest `sums` above 0, in descending order."""
        return top_items(self.items, sums, recent[:SIMILARITY_DEPTH], count)

    def shares(self, recent: Tensor, liked: Tensor, targets: Tensor) -> Tensor:
        """What each recent event adds to targets, int64 [T]: [T, min(n, depth)]."""
        recent = recent[:SIMILARITY_DEPTH]
        return row_products(self.items, self.weights, recent, event_shares(recent, liked), targets)


def event_shares(recent: Tensor, liked: Tensor) -> Tensor:
    """The share of each recent event in its item, [n]: an item counts once.

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

    With G = X'X of the binary user-item matrix X and P = (G + ridge I)^-1, B = I - P / diag(P). A
    user scores X_u B. Dislikes are left out. Time grows with n_items**3; memory is about 20 *
    n_items**2 bytes (8 GB at 20,000 items). Collective over the shards of the log: the first
    process inverts the sum of their matrices G. Raises ValueError for more than `MAX_EASE_ITEMS`.
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
