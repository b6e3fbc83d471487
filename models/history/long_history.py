"""The older events of a long history, attended by item instead of one by one.

Events on one item differ only in their bias, and collapse without loss into one row. If there are
very many items, FAISS's lists stand for most of them (`models.index.key_lists`); they are built
away from any request.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import AttentionOptions
from models.attention.kv_memory import KVTable, gather_rows
from models.attention.partial_softmax import (
    Attended,
    KVBlock,
    PartialSoftmax,
    attend_blocks,
    merge_partials,
    remove_partial,
)
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint
from models.history.item_weights import ItemWeights, TopEvents, log
from models.history.user_history import UserHistory, attendable_events
from models.index.ann_index import IndexKind
from models.index.key_lists import LEAST_ROWS, KeyLists
from models.index.memory_attention import Indexes, index_heads, keep_first, search_heads

RECENT_EVENTS = 640  # of the newest events, at least, are attended one by one
LISTS_FROM = 2 * LEAST_ROWS  # items from which lists are built: as fast for one target
_STEP = 128  # events that become older at a time
_STALE = 8  # 1 in 8 items may be newer than the lists before these are rebuilt
_BLOCK = 65_536  # rows gathered at once
_QUERIES = 65_536  # items at most whose queries give the metric of the lists
# Events on items that are attended one by one, at least: positions and transitions count 512.
_LEAST_ON_ITEMS = 560


def collapsible_events(events: int, window: int) -> int:
    """Number of a history's older events, which can be collapsed.

    The others are those whose position matters, all that the encoder reads, and some more, so that
    one of them may be left out. They must be on items that can be attended: `collapsible_prefix`.
    """
    recent = max(RECENT_EVENTS, 2 * window)
    return max(0, (events - recent) // _STEP * _STEP)


def collapsible_prefix(snapshot: Snapshot, history: UserHistory) -> int:
    """Choose how many of a history's oldest events to collapse.

    As many as `collapsible_events`, or fewer, down to none, where most of the newest events are on
    items that cannot be attended.
    """
    events, spare = len(history.rows), 0
    while count := collapsible_events(max(0, events - spare), snapshot.model.config.window):
        if leaves_enough(snapshot, history, count):
            break
        spare = 2 * spare + RECENT_EVENTS
    return count


def leaves_enough(snapshot: Snapshot, history: UserHistory, count: int) -> bool:
    """Return whether all events whose position matters are among those after the first `count`."""
    _, rows = attendable_events(snapshot, history.newest(count, 0))
    window = snapshot.model.config.window
    return int((rows >= 0).sum()) >= max(2 * window, _LEAST_ON_ITEMS)


class CollapsedHistory:
    """The first `count` events of a history as rows of distinct items: far rows of its memory.

    Requests share and extend it: the caller must hold `lock` from before the memory of the newer
    events is built until scoring finishes.
    """

    def __init__(self, snapshot: Snapshot, history: UserHistory, count: int, at: int) -> None:
        """Collapse events. The arguments are those of `ItemWeights`."""
        self.lock = threading.RLock()  # a request may take it again for a part of its work
        self.lists: KeyLists | None = None
        self._rows: KVTable | None = None  # gathered
        self._indexes: dict[IndexKind, Indexes] = {}
        self._beside = np.zeros(0, np.int64)  # places whose weights differ from those in an index
        self._model, self._catalogue = snapshot.model, snapshot.catalogue
        self._table = KVTable(snapshot.tables.keys, snapshot.tables.values)
        self.items = ItemWeights(snapshot, history, count, at)

    def __len__(self) -> int:
        """Number of distinct items."""
        return len(self.items)

    @property
    def nbytes(self) -> int:
        """Bytes held, without the history and without the tables."""
        indexes = [index for heads in list(self._indexes.values()) for index in heads]
        held = sum(index.nbytes for index in indexes) + sum(x.nbytes for x in self._rows or ())
        return self.items.nbytes + held + (0 if self.lists is None else self.lists.nbytes)

    @property
    def needs_lists(self) -> bool:
        """True if lists should be built: there are none, or many items are newer than they."""
        if self.lists is None:
            return len(self) >= LISTS_FROM
        return len(self) - len(self.lists) > max(RECENT_EVENTS, len(self) // _STALE)

    def rebind(self, snapshot: Snapshot) -> bool:
        """Take keys and values of another snapshot; False where these events differ there."""
        if snapshot.model is not self._model:
            return False
        changed = snapshot.catalogue.changed_since(self._catalogue)
        if changed is None or self.items.depends_on(changed):
            return False
        self._catalogue = snapshot.catalogue
        self._table = KVTable(snapshot.tables.keys, snapshot.tables.values)
        if self.lists is not None:
            self.lists.table = self._table
        return True

    def extend(self, snapshot: Snapshot, history: UserHistory, count: int, at: int) -> None:
        """Add the events up to `count`, if these are more, of a history that continues this one.

        The history takes the place of the earlier one. `snapshot` is that of `rebind`, and `at` the
        request's time.
        """
        if count > self.items.count:
            self.advance_to(at)
            self._update(self.items.extend(snapshot, history, count))
        else:
            self.items.history = history

    def advance_to(self, at: int) -> bool:
        """Take ages at a request's time; whether any weight has changed."""
        places = self.items.advance_to(at)
        self._update(places)
        return len(places) > 0

    @torch.inference_mode()
    def build_lists(self, snapshot: Snapshot) -> None:
        """Build lists of the items as they are now, and use them.

        This may take seconds, and holds the lock only at its beginning and its end.
        """
        with self.lock:
            weights, rows, table = self.items.weights.copy(), self.items.items, self._table
        queries = snapshot.tables.queries[:, :: max(1, len(snapshot.has_vector) // _QUERIES)]
        metric = queries.mT @ queries / max(1, queries.shape[1])
        if snapshot.model.state_attention is not None:
            metric += snapshot.model.state_attention.query_moment()
        lists = KeyLists(table, torch.from_numpy(rows), log(weights), metric=metric)
        with self.lock:
            changed = (self.items.weights[:, : len(lists)] != weights).any(0)
            lists.table, self.lists = self._table, lists
            self._update(np.flatnonzero(changed))

    def attend(
        self,
        query: Tensor,
        near: PartialSoftmax,
        options: AttentionOptions,
        own: Tensor | None = None,
    ) -> Attended:
        """Attend by queries [H, T, d] over these items and the near rows.

        Lists stand for items once they are built, unless the mode is `exact`. Targets do not see
        their `own` places int64 [T].
        """
        lists = None if options.mode == "exact" else self.lists
        listed = 0 if lists is None else len(lists)
        if listed < len(self):
            rows = self._blocks(listed) if listed else [self.block()]
            near = merge_partials(near, attend_blocks(query, rows))
        found = Attended.exact(near, len(self) - listed)
        if lists is not None:
            more = lists.attend(query, near, max_error=options.max_error)
            found = more._replace(scanned=more.scanned + found.scanned)
        if own is None or not bool((own >= 0).any()):
            return found
        found = self._without(found, query, own)
        if lists is not None and bool((found.error > options.max_error).any()):
            near = merge_partials(near, attend_blocks(query, lists.blocks()))
            found = self._without(Attended.exact(near, len(self)), query, own)
        return found

    def nearest(self, query: Tensor, count: int, probes: int | None) -> Tensor:
        """Return the places of largest score, and those among what changed since it was indexed."""
        kind: IndexKind = "flat" if probes is None else "ivf"
        if len(self._beside) > RECENT_EVENTS:
            self._indexes, self._beside = {}, np.zeros(0, np.int64)
        if kind not in self._indexes:
            self._indexes[kind] = index_heads(self.block(), kind)
        indexes, beside = self._indexes[kind], torch.from_numpy(self._beside)
        many = min(count + len(beside), len(indexes[0]))  # some of what is found may have changed
        found = search_heads(indexes, query, many, probes)
        if not len(beside):
            return found
        found = keep_first(found.masked_fill(torch.isin(found, beside), -1), count)
        changed = index_heads(self._block_of(self._beside), "flat")
        others = search_heads(changed, query, min(count, len(beside)), None)
        return torch.cat([found, torch.where(others < 0, -1, beside[others])], 2)

    def gather(self, places: Tensor) -> KVBlock:
        """Gather keys [H, T, K, d], values and bias [H, T, K] of places."""
        rows = torch.from_numpy(self.items.items)[places]
        head = torch.arange(len(places))[:, None, None]
        bias = torch.from_numpy(self.items.weights)[head, places].log().float()
        return KVBlock(self._table.keys[head, rows], self._table.values[head, rows], bias)

    def block(self) -> KVBlock:
        """Return all items, in the order of their places; keys and values of few are kept."""
        kept, rows = self._rows, torch.from_numpy(self.items.items)
        if kept is None or kept.keys.shape[1] != len(self):
            kept = KVTable(*(gather_rows(each, rows) for each in self._table))
            self._rows = kept if len(self) < LISTS_FROM else None
        return KVBlock(*kept, self.items.log_weights(slice(None)))

    def places(self, items: Tensor) -> Tensor:
        """Return the places int64 [n] of item rows, -1 for items without events here."""
        return torch.from_numpy(self.items.places(items.numpy()).astype(np.int64))

    def top_events(
        self, query: Tensor, outputs: Tensor, whole: PartialSoftmax, top: int, seen: Tensor | None
    ) -> TopEvents:
        """Choose the `top` events without which one target's score would change most.

        Its query is [H, d], its outputs [H, d_v], its attention over the whole history [H, 1], and
        its heads see places bool [H, m]; None = all.
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
        found = torch.cat(differences, 1).double()
        if seen is not None:
            found = found * seen
        return self.items.top_events(found.numpy(), top)

    def _without(self, found: Attended, query: Tensor, places: Tensor) -> Attended:
        """Remove each target's own item, at places int64 [T], from what it attended to.

        α' = α / (1 - α_own): the relative error grows as the mass that is left shrinks.
        """
        own = (places >= 0).nonzero().flatten()
        block = self.gather(places[own].expand(len(query), -1)[..., None])
        scores = (query[:, own] * block.keys[:, :, 0]).sum(-1) / math.sqrt(query.shape[-1])
        part = PartialSoftmax(block.values[:, :, 0], scores + block.bias[:, :, 0])
        whole = PartialSoftmax(*(part[:, own] for part in found.partial))
        left = remove_partial(whole, part)
        context, log_mass, error = (each.clone() for each in (*found.partial, found.error))
        context[:, own], log_mass[:, own] = left
        error[:, own] /= (left.logsumexp - whole.logsumexp).exp()
        return found._replace(partial=PartialSoftmax(context, log_mass), error=error)

    @torch.inference_mode()
    def _update(self, places: NDArray[np.int64]) -> None:
        if self._indexes:
            self._beside = np.union1d(self._beside, places)
        listed = places[places < len(self.lists or ())]
        if self.lists is not None and len(listed):
            self.lists.update(torch.from_numpy(listed).long(), self.items.log_weights(listed))

    def _blocks(self, start: int) -> Iterator[KVBlock]:
        """Iterate over the items from a place on, block by block."""
        return (self._block_of(slice(at, at + _BLOCK)) for at in range(start, len(self), _BLOCK))

    def _block_of(self, places: NDArray[np.int64] | slice) -> KVBlock:
        checkpoint()
        rows = torch.from_numpy(self.items.items[places])
        keys, values = (gather_rows(each, rows) for each in self._table)
        return KVBlock(keys, values, self.items.log_weights(places))
