"""The older events of a long history, attended by item instead of one by one.

Where so many items remain that attending each costs more than clusters of them do
(`models.attention.clustered.cluster_tree`), clusters are built, away from any request.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.clustered.cluster_tree import ClusterTree, KVTable
from models.attention.clustered.clustered_attention import MAX_ERROR, attend_clusters
from models.attention.clustered.moment_expansion import ClusteredAttention
from models.attention.partial_softmax import (
    KVBlock,
    PartialSoftmax,
    attend_blocks,
    merge_partials,
    remove_partial,
)
from models.catalogue.snapshot import Snapshot
from models.history.item_weights import ItemWeights, TopEvents, log
from models.history.user_history import UserHistory
from models.recommender.target_attention import gather_rows

RECENT_EVENTS = 1_024  # of the newest events, at least, are attended one by one
_STEP = 512  # events that become older at a time
CLUSTERS_FROM = 8_192  # items: fewer are attended one by one in less time than clusters take
_STALE = 8  # one in so many items may be newer than the clusters before they are built anew
_BLOCK = 65_536  # rows gathered at once
_QUERIES = 65_536  # items at most whose queries give the metric of the clusters


def collapsible_events(events: int, window: int) -> int:
    """Number of a history's older events, which can be collapsed.

    The others are those whose position matters, all that the encoder reads, and some more: so that
    one of them may be left out and none of the older moves to where position matters. That is so
    where most of them are on items that can be attended: see `collapsible_prefix`.
    """
    recent = max(RECENT_EVENTS, 2 * window)
    return max(0, (events - recent) // _STEP * _STEP)


class CollapsedHistory:
    """The first `count` events of a history, collapsed to items and clusters of items.

    Requests share and extend it: the caller must hold `lock` from before the memory of the newer
    events is built until scoring finishes.
    """

    def __init__(self, snapshot: Snapshot, history: UserHistory, count: int, at: int) -> None:
        """Collapse events. The arguments are those of `ItemWeights`."""
        self.lock = threading.RLock()  # a request may take it again for a part of its work
        self.clusters: ClusterTree | None = None
        self._model, self._catalogue = snapshot.model, snapshot.catalogue
        self._tables = KVTable(snapshot.tables.keys, snapshot.tables.values)
        self._items = ItemWeights(snapshot, history, count, at)

    def __len__(self) -> int:
        """Number of distinct items."""
        return len(self._items)

    @property
    def count(self) -> int:
        """Number of events."""
        return self._items.count

    @property
    def attendable(self) -> int:
        """Number of those events that are on items that can be attended."""
        return self._items.attendable

    @property
    def history(self) -> UserHistory:
        """The history whose first events these are."""
        return self._items.history

    @property
    def nbytes(self) -> int:
        """Bytes held, without the history and without the tables."""
        return self._items.nbytes + (0 if self.clusters is None else self.clusters.nbytes)

    @property
    def needs_clusters(self) -> bool:
        """Whether clusters should be built: there are none, or many items are newer than they."""
        if self.clusters is None:
            return len(self) >= CLUSTERS_FROM
        return len(self) - len(self.clusters) > max(RECENT_EVENTS, len(self) // _STALE)

    def rebind(self, snapshot: Snapshot) -> bool:
        """Take keys and values of another snapshot; False where these events differ there."""
        if snapshot.model is not self._model:
            return False
        changed = snapshot.catalogue.changed_since(self._catalogue)
        if changed is None or self._items.depends_on(changed):
            return False
        self._catalogue = snapshot.catalogue
        self._tables = KVTable(snapshot.tables.keys, snapshot.tables.values)
        if self.clusters is not None:
            self.clusters.table = self._tables
        return True

    def extend(self, snapshot: Snapshot, history: UserHistory, count: int, at: int) -> None:
        """Add the events up to `count` of a history that continues the one before.

        Args:
            snapshot: that of `rebind`.
            history: takes the place of the earlier one, whose columns may then be freed.
            count: where that is no more than before, nothing is added.
            at: the request's time, at which ages are taken if events are added.
        """
        if count > self.count:
            self.advance_to(at)
            self._update_clusters(self._items.extend(snapshot, history, count))
        else:
            self._items.history = history

    def advance_to(self, at: int) -> None:
        """Take ages at a request's time."""
        self._update_clusters(self._items.advance_to(at))

    @torch.inference_mode()
    def build_clusters(self, snapshot: Snapshot) -> tuple[ClusterTree, NDArray[np.float64]]:
        """Build clusters of the items as they are now; also the weights they are built with.

        This may take seconds, and takes the lock for its beginning alone.
        """
        with self.lock:
            weights, items, table = self._items.weights.copy(), self._items.items, self._tables
        queries = snapshot.tables.queries[:, :: max(1, len(snapshot.has_vector) // _QUERIES)]
        metric = queries.mT @ queries / max(1, queries.shape[1])
        if snapshot.model.state_attention is not None:
            metric += snapshot.model.state_attention.query_moment()
        rows = torch.from_numpy(items)
        return ClusterTree(table, log(weights), table_rows=rows, metric=metric), weights

    def adopt_clusters(self, clusters: ClusterTree, weights: NDArray[np.float64]) -> None:
        """Use clusters that `build_clusters` built with these weights, and update what changed."""
        with self.lock:
            built = weights.shape[1]
            changed = (self._items.weights[:, :built] != weights).any(0)
            clusters.table = self._tables
            self.clusters = clusters
            self._update_clusters(np.flatnonzero(changed))

    def attend(
        self,
        query: Tensor,
        recent: PartialSoftmax,
        *,
        max_error: float = MAX_ERROR,
        order: int = 2,
        use_clusters: bool = True,
    ) -> ClusteredAttention:
        """Attend by queries [H, T, d] over these events and the `recent` ones.

        For `max_error` and `order` see `attend_clusters`.
        """
        held = len(self.clusters) if use_clusters and self.clusters is not None else 0
        if held < len(self):
            recent = merge_partials(recent, attend_blocks(query, self._blocks(held)))
        one_by_one = len(self) - held
        if self.clusters is None or not held:
            return ClusteredAttention.exact(recent, one_by_one)
        tail = attend_clusters(
            self.clusters, query, recent_partial=recent, max_error=max_error, order=order
        )
        return tail._replace(scanned=tail.scanned + one_by_one)

    def without_own_item(
        self, found: ClusteredAttention, query: Tensor, targets: Tensor
    ) -> ClusteredAttention:
        """Remove each target's own item from what it attended to.

        α' = α / (1 - α_own): the relative error grows as the mass that is left shrinks.
        """
        places = torch.from_numpy(self._items.places(targets.numpy()))
        own = (places >= 0).nonzero().flatten()
        if not len(own):
            return found
        rows = torch.from_numpy(self._items.items)[places[own]]
        keys, values = gather_rows(self._tables.keys, rows), gather_rows(self._tables.values, rows)
        scores = (query[:, own] * keys).sum(-1) / math.sqrt(query.shape[-1])
        scores += self._items.log_weights(places[own].numpy())
        whole = PartialSoftmax(*(part[:, own] for part in found.partial))
        left = remove_partial(whole, PartialSoftmax(values, scores))
        context, log_mass = (part.clone() for part in found.partial)
        context[:, own], log_mass[:, own] = left
        error = found.error.clone()
        error[:, own] /= (left.logsumexp - whole.logsumexp).exp()
        return found._replace(partial=PartialSoftmax(context, log_mass), error=error)

    def top_events(
        self,
        query: Tensor,
        outputs: Tensor,
        whole: PartialSoftmax,
        top: int,
        *,
        hidden: int | None = None,
    ) -> TopEvents:
        """Choose the events without which one target's score would change most.

        Args:
            query: of the target, [H, d].
            outputs: of the target, [H, d_v].
            whole: attention of the target over the whole history, [H, 1].
            top: how many events to choose, as `foremost` does.
            hidden: item row whose events the target does not see.
        """
        heads = len(query)
        if not len(self):
            return TopEvents(np.zeros(0, np.int64), np.zeros((heads, 0), np.float32), (0, 0))
        mean = (whole.context[:, 0] * outputs).sum(1, keepdim=True)  # (H, 1) of the gains
        differences = []
        for block in self._blocks(0):
            similarity = (block.keys @ query[:, :, None])[..., 0] / math.sqrt(query.shape[1])
            share = (similarity + block.bias - whole.logsumexp).exp()
            differences.append(share * ((block.values @ outputs[:, :, None])[..., 0] - mean))
        found = torch.cat(differences, 1).double().numpy()
        if hidden is not None:
            places = self._items.places(np.array([hidden]))
            found[:, places[places >= 0]] = 0.0
        return self._items.top_events(found, top)

    @torch.inference_mode()
    def _update_clusters(self, places: NDArray[np.int64]) -> None:
        """Give the clusters the weights of some items as they are now."""
        if self.clusters is None:
            return
        places = places[places < len(self.clusters)]
        if len(places):
            log_weights = self._items.log_weights(places)
            self.clusters.update_log_weights(torch.from_numpy(places).long(), log_weights)

    def _blocks(self, start: int) -> Iterator[KVBlock]:
        """The items from a place on, block by block."""
        for at in range(start, len(self), _BLOCK):
            part = slice(at, at + _BLOCK)
            rows = torch.from_numpy(self._items.items[part])
            keys, values = (gather_rows(each, rows) for each in self._tables)
            yield KVBlock(keys, values, self._items.log_weights(part))
