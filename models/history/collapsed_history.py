"""The older events of a long history, attended as what they share: item, age, type.

Keys and values are the items', so that events on one item differ in their bias alone, and collapse
without loss into one row of weight W_h = Σ w e^(b_h). Beyond the newest few hundred events a bias
depends on age and type only, and changes when an event's age passes into another bucket: few do
between two requests. Where so many items remain that attending each costs more than cells do
(`models.attention.clustered.cluster_tree`), they are put in cells, away from any request.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.clustered.cluster_tree import ClusterTree, KVTable
from models.attention.clustered.clustered_attention import MAX_ERROR, attend_clusters
from models.attention.clustered.moment_expansion import ClusteredAttention
from models.attention.partial_softmax import KVBlock, PartialSoftmax, attend_blocks, merge_partials
from models.catalogue.snapshot import Snapshot
from models.encoder.event_types import MASKED, UNKNOWN
from models.encoder.recency_bias import AGE_BUCKETS, age_bucket, age_bucket_edges
from models.history.user_history import UserHistory
from models.recommender.target_attention import gather_rows

RECENT_EVENTS = 1_024  # of the newest events, at least, are attended one by one: see `split`
_STEP = 512  # events that become older at a time
CLUSTERS_FROM = 8_192  # items: fewer are attended one by one in less time than cells take
_FRESH = 8  # one in so many items may be newer than the cells before they are made anew
_BLOCK = 65_536  # rows gathered at once
_QUERIES = 65_536  # items whose queries say what the queries to come look at
_DISTANT = 1 << 30  # events: a position in the last bucket
_EDGES = age_bucket_edges().numpy()


def collapsible_events(events: int, window: int) -> int:
    """How many events of a history are older: the others are attended one by one.

    The newest are those whose position matters, all that the encoder reads, and some more: so that
    one of them may be left out and none of the older moves to where position matters.
    """
    kept = max(RECENT_EVENTS, 2 * window)
    return max(0, (events - kept) // _STEP * _STEP)


def rank_contributions(contributions: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Order contributions [n] to a score: the largest positive first, then the most negative.

    What lowers a score is never preferred to what raises it: a reason is given as "because of".
    """
    return np.lexsort((-np.abs(contributions), contributions <= 0))


class _Alike(NamedTuple):
    """Events of one item, age and type, which differ in their weight alone: P groups."""

    of: NDArray[np.int32]  # [count] the group of each event; P where it cannot be attended
    places: NDArray[np.int64]  # [P] of the item
    codes: NDArray[np.int64]  # [P] the column of the biases
    loudest: NDArray[np.float32]  # [P] the largest weight


class CollapsedHistory:
    """The first `count` events of a past. Not for several threads at once: `lock` is for that."""

    def __init__(self, snapshot: Snapshot, history: UserHistory, count: int, at: int) -> None:
        """Collapse them.

        Args:
            snapshot: whose tables hold the keys and values.
            history: without vectors of its own and without a mask; events in the order of time.
            count: how many of its events, from the first.
            at: the time at which ages are taken, microseconds UTC.
        """
        self.lock = threading.RLock()  # one question may take it for several of its parts
        self.count = 0
        self.attendable = 0  # of those, on items that can be attended
        self.clusters: ClusterTree | None = None
        self._model, self._catalogue = snapshot.model, snapshot.catalogue
        self._tables = KVTable(snapshot.tables.keys, snapshot.tables.values)
        self._place = np.full(
            len(snapshot.has_vector), -1, np.int32
        )  # of each item among the distinct
        self._items = np.zeros(0, np.int64)
        self._missing = np.zeros(0, np.int64)  # items of events that cannot be attended
        self._factors = self._biases(snapshot)
        self._weights = np.zeros((self._factors.shape[0], 0))
        self._at = at
        self.history = history  # any history that begins with the same events serves as well
        self._groups: _Alike | None = None
        self.extend(snapshot, history, count)

    def __len__(self) -> int:
        """How many distinct items there are."""
        return len(self._items)

    @property
    def nbytes(self) -> int:
        """Bytes held, without the history and without the tables."""
        own = self._place.nbytes + self._items.nbytes + self._weights.nbytes + self._missing.nbytes
        own += 0 if self._groups is None else sum(part.nbytes for part in self._groups)
        return own + (0 if self.clusters is None else self.clusters.nbytes)

    @property
    def needs_clusters(self) -> bool:
        """Whether cells should be made: there are none, or many items are newer than they are."""
        if self.clusters is None:
            return len(self) >= CLUSTERS_FROM
        return len(self) - len(self.clusters) > max(RECENT_EVENTS, len(self) // _FRESH)

    def rebind(self, snapshot: Snapshot) -> bool:
        """Whether this is what these events are in a snapshot; if so, it is of it from now on."""
        if snapshot.model is not self._model:
            return False
        changed = snapshot.catalogue.changed_since(self._catalogue)
        if changed is None:
            return False
        inside = changed[changed < len(self._place)]
        if (self._place[inside] >= 0).any() or np.isin(changed, self._missing).any():
            return False
        self._catalogue = snapshot.catalogue
        self._tables = KVTable(snapshot.tables.keys, snapshot.tables.values)
        if self.clusters is not None:
            self.clusters.table = self._tables
        return True

    @torch.inference_mode()
    def extend(self, snapshot: Snapshot, history: UserHistory, count: int) -> None:
        """Take in the events up to `count`, of a history that goes on from the one before."""
        rows = history.rows[self.count : count].astype(np.int64)
        part = slice(self.count, count)
        size = len(snapshot.has_vector)
        if size > len(self._place):
            more = np.full(size - len(self._place), -1, np.int32)
            self._place = np.concatenate([self._place, more])
        inside = (rows >= 0) & (rows < size)
        usable = snapshot.has_vector.take(rows, mode="clip") & inside if size else inside & False
        if history.types is not None:
            usable &= history.types[part] != MASKED
        self._missing = np.union1d(self._missing, rows[~usable])
        items = rows[usable]
        named = np.zeros(size, np.bool_)
        named[items] = True
        new = np.flatnonzero(named & (self._place[:size] < 0))
        self._place[new] = len(self._items) + np.arange(len(new))
        self._items = np.concatenate([self._items, new])
        self._weights = np.pad(self._weights, ((0, 0), (0, len(new))))
        self.history, self.count = history, count
        self.attendable += len(items)
        events = np.flatnonzero(usable) + part.start
        touched = self._add(events, self._codes(events, self._at), 1.0)
        self._told(touched)

    @torch.inference_mode()
    def advance_to(self, at: int) -> None:
        """Let ages be those of a request's time."""
        times = self.history.timestamps[: self.count]
        # The events of at least each bucket are the first so many: as time goes on, more.
        before = np.searchsorted(times, self._at - _EDGES, side="right")
        after = np.searchsorted(times, at - _EDGES, side="right")
        low, high = np.minimum(before, after), np.maximum(before, after)
        moved = np.unique(
            np.concatenate([np.arange(a, b) for a, b in zip(low, high, strict=True)])
        ).astype(np.int64)
        old, self._at = self._at, at
        if not len(moved):
            return
        moved = moved[self._placed(moved) >= 0]
        self._add(moved, self._codes(moved, old), -1.0)
        self._told(self._add(moved, self._codes(moved, at), 1.0))

    @torch.inference_mode()
    def build_clusters(self, snapshot: Snapshot) -> tuple[ClusterTree, NDArray[np.float64]]:
        """Cells of the items as they are now, and the weights these are made with.

        This may take seconds, and needs the lock for its beginning alone.
        """
        with self.lock:
            weights, items, table = self._weights.copy(), self._items, self._tables
        queries = snapshot.tables.queries[:, :: max(1, len(snapshot.has_vector) // _QUERIES)]
        metric = queries.mT @ queries / max(1, queries.shape[1])
        log_weights = torch.from_numpy(_log(weights)).float()
        return ClusterTree(
            table, log_weights, table_rows=torch.from_numpy(items), metric=metric
        ), weights

    @torch.inference_mode()
    def adopt_clusters(self, cells: ClusterTree, weights: NDArray[np.float64]) -> None:
        """Serve from cells that `clustered` made of these weights; they are told what changed."""
        with self.lock:
            held = weights.shape[1]
            changed = np.flatnonzero((self._weights[:, :held] != weights).any(0))
            cells.table = self._tables
            self.clusters = cells
            self._told(changed)

    def attend(
        self,
        query: Tensor,
        beside: PartialSoftmax,
        *,
        max_error: float = MAX_ERROR,
        order: int = 2,
        cells: bool = True,
    ) -> ClusteredAttention:
        """Attend over these events.

        Args:
            query: [H, T, d].
            beside: attention over the newer ones.
            max_error: see `attend_clusters`.
            order: likewise.
            cells: whether cells may be used, where there are any.
        """
        if not len(self):
            zero = torch.zeros_like(beside.logsumexp)
            return ClusteredAttention(beside, zero, zero, beside.logsumexp.clone(), zero)
        held = len(self.clusters) if cells and self.clusters is not None else 0
        if held < len(self):
            beside = merge_partials(beside, attend_blocks(query, self._rows(held)))
        one_by_one = float(len(self) - held)
        if self.clusters is None or not held:
            zero = torch.zeros_like(beside.logsumexp)
            return ClusteredAttention(
                beside, zero, zero + one_by_one, beside.logsumexp.clone(), zero
            )
        tail = attend_clusters(
            self.clusters, query, recent_partial=beside, max_error=max_error, order=order
        )
        return tail._replace(scanned=tail.scanned + one_by_one)

    def without_own_item(
        self, found: ClusteredAttention, query: Tensor, targets: Tensor
    ) -> ClusteredAttention:
        """What was found [H, T], less what each target's own item had part in it.

        By α' = α / (1 - α_own): an error is larger by as much as what is left is smaller.
        """
        inside = targets < len(self._place)
        places = torch.from_numpy(self._place)[torch.where(inside, targets, 0)].long()
        own = ((places >= 0) & inside).nonzero().flatten()
        if not len(own):
            return found
        rows = torch.from_numpy(self._items)[places[own]]
        keys, values = gather_rows(self._tables.keys, rows), gather_rows(self._tables.values, rows)
        scores = (query[:, own] * keys).sum(-1) / math.sqrt(query.shape[-1])
        scores += torch.from_numpy(_log(self._weights[:, places[own].numpy()])).float()
        share = (scores - found.partial.logsumexp[:, own]).exp().clamp(max=1 - 1e-6)
        left = (1 - share)[..., None]
        context, log_mass = (part.clone() for part in found.partial)
        context[:, own] = (context[:, own] - share[..., None] * values) / left
        log_mass[:, own] += torch.log1p(-share)
        error = found.error.clone()
        error[:, own] /= left[..., 0]
        return found._replace(partial=PartialSoftmax(context, log_mass), error=error)

    def mean_context(self) -> PartialSoftmax:
        """What a query that is alike to all keys finds: [H, 1, d_v]."""
        heads, _, width = self._tables.values.shape
        if not len(self):
            return PartialSoftmax.empty(heads, 1, width)
        nothing = torch.zeros(heads, 1, self._tables.keys.shape[2])
        beside = PartialSoftmax.empty(heads, 1, width)
        # The mean is what the moments of cells are exact in.
        return self.attend(nothing, beside, max_error=math.inf).partial

    def top_events(
        self, query: Tensor, outputs: Tensor, total: Tensor, top: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The events that contribute most to one target, and their biases [H, E].

        Args:
            query: of the target, [H, d].
            outputs: of the target, [H, d_v].
            total: log of the sum of exponentials over the whole history, [H, 1].
            top: how many events to return, in the order of `rank_contributions`.
        """
        weight, gain = [], []
        for rows in self._rows(0):
            scores = (rows.keys @ query[:, :, None])[..., 0] / math.sqrt(query.shape[1]) + rows.bias
            weight.append(scores)
            gain.append((rows.values @ outputs[:, :, None])[..., 0])
        if not weight:
            return np.zeros(0, np.int64), np.zeros((len(query), 0), np.float32)
        log_share = torch.cat(weight, 1)
        share = (log_share - total).exp()
        worth = (share * torch.cat(gain, 1)).double().numpy()  # (H, m) of all events on an item
        alike = self._alike()
        unit = np.exp(self._factors[:, alike.codes])  # (H, P)
        with np.errstate(invalid="ignore"):
            part = np.nan_to_num(unit / self._weights[:, alike.places])
        each = (part * worth[:, alike.places]).sum(0)  # of an event of weight 1
        # The foremost events are among those that are alike to the foremost.
        chosen = rank_contributions(each * alike.loudest)[:top]
        marked = np.zeros(len(each) + 1, np.bool_)
        marked[chosen] = True
        events = np.flatnonzero(marked[alike.of])
        added = each[alike.of[events]] * self.history.weights[events]
        events = events[rank_contributions(added)[:top]]
        bias = self._factors[:, self._codes(events, self._at)] + self._loudness(events)
        return events, bias.astype(np.float32)

    def _alike(self) -> _Alike:
        """The events in groups of one item, age and type; as long as no age has changed."""
        if self._groups is None:
            events = np.arange(self.count)
            places = self._placed(slice(0, self.count))
            columns = self._factors.shape[1]
            ids = places.astype(np.int64) * columns + self._codes(events, self._at)
            held = places >= 0
            groups, of = np.unique(ids[held], return_inverse=True)
            loudest = np.zeros(len(groups), np.float32)
            np.maximum.at(loudest, of, self.history.weights[: self.count][held])
            every = np.full(self.count, len(groups), np.int32)  # the last group: of no item
            every[held] = of
            self._groups = _Alike(every, groups // columns, groups % columns, loudest)
        return self._groups

    # ------------------------------------------------------------------ the parts

    @torch.inference_mode()
    def _biases(self, snapshot: Snapshot) -> NDArray[np.float64]:
        """The bias of each age bucket and type, [H, (types + 1) · AGE_BUCKETS], type-major."""
        ages = torch.cat([torch.zeros(1, dtype=torch.int64), torch.from_numpy(_EDGES)])
        types = torch.tensor([*range(snapshot.model.config.n_event_types), UNKNOWN])
        found = snapshot.model.memory_bias(
            torch.full((1, 1), _DISTANT),
            ages.expand(len(types), -1),
            torch.zeros(1, 1),
            types[:, None].expand(-1, len(ages)),
        )
        return found.flatten(1).double().numpy()

    def _placed(self, events: NDArray[np.int64] | slice) -> NDArray[np.int32]:
        """The place of each event's item; -1 for what cannot be attended."""
        rows = self.history.rows[events]
        places = self._place.take(rows, mode="clip")
        hidden = (rows < 0) | (rows >= len(self._place))
        if self.history.types is not None:
            hidden |= self.history.types[events] == MASKED
        places[hidden] = -1
        return places

    def _codes(self, events: NDArray[np.int64], at: int) -> NDArray[np.int64]:
        """The column of the biases for each of some events."""
        buckets = age_bucket(torch.from_numpy(at - self.history.timestamps[events])).numpy()
        if self.history.types is None:
            types = np.full(len(events), UNKNOWN)
        else:
            types = self.history.types[events].astype(np.int64)
        count = self._factors.shape[1] // AGE_BUCKETS - 1
        types = np.where((types >= 0) & (types < count), types, count)
        codes: NDArray[np.int64] = types * AGE_BUCKETS + buckets
        return codes

    def _loudness(self, events: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.log(self.history.weights[events].astype(np.float64))

    def _add(
        self, events: NDArray[np.int64], codes: NDArray[np.int64], sign: float
    ) -> NDArray[np.int64]:
        """Add what events weigh to their items, or take it off; the places of those."""
        places = self._place[self.history.rows[events]]
        loudness = self.history.weights[events].astype(np.float64) * sign
        self._groups = None
        touched = np.zeros(len(self), np.bool_)
        touched[places] = True
        for head, factors in enumerate(np.exp(self._factors)):
            own, more = self._weights[head], factors[codes] * loudness
            if len(events) > len(own) // 4:
                np.add(own, np.bincount(places, more, minlength=len(own)), out=own)
            else:
                np.add.at(own, places, more)
            own[touched] = own[touched].clip(0)  # what rounding leaves of nothing
        return np.flatnonzero(touched)

    def _told(self, places: NDArray[np.int64]) -> None:
        """Let the cells have the weights of some items as they are now."""
        if self.clusters is None:
            return
        places = places[places < len(self.clusters)]
        if len(places):
            log_weights = torch.from_numpy(_log(self._weights[:, places])).float()
            self.clusters.update_log_weights(torch.from_numpy(places).long(), log_weights)

    def _rows(self, start: int) -> Iterator[KVBlock]:
        """The items from a place on, block by block."""
        for at in range(start, len(self), _BLOCK):
            items = torch.from_numpy(self._items[at : at + _BLOCK])
            log_weights = torch.from_numpy(_log(self._weights[:, at : at + _BLOCK])).float()
            keys, values = (
                gather_rows(self._tables.keys, items),
                gather_rows(self._tables.values, items),
            )
            yield KVBlock(keys, values, log_weights)


def _log(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.log(weights)
