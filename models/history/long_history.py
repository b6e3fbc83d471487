"""The older events of a long history, attended by item instead of one by one.

Keys and values are the items', so that events on one item differ in their bias only, and collapse
without loss into one row of weight W_h = Σ w e^(b_h). Beyond the newest few hundred events a bias
depends on age and type only, and changes when an event's age passes into another bucket: few do
between two requests.

If there are very many items, FAISS's lists stand for most of them (`models.index.key_lists`); they
are built away from any request.
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

from models.attention.attend import AttentionOptions, KVTable, gather_rows
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
from models.encoder.event_bias import AGE_BUCKETS, AGE_EDGES, MASKED, UNKNOWN, age_bucket
from models.history.user_history import UserHistory, attendable_events
from models.index.ann_index import IndexKind
from models.index.key_lists import LEAST_ROWS, KeyLists
from models.index.memory_attention import Indexes, index_heads, keep_first, search_heads

_DISTANT = 1 << 30  # events: a position in the last bucket
_EDGES = AGE_EDGES.numpy()
WHOLE_SHARE = 1e-8  # what an event adds at least to a score, to have a whole share in the rest


def rank_contributions(contributions: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Order contributions [..., n] to scores: the largest positive first, then the most negative.

    Rows that lower a score come after those that raise it: a reason is given as "because of".
    """
    return np.lexsort((-np.abs(contributions), contributions <= 0))


def foremost(contributions: NDArray[np.float64], top: int) -> NDArray[np.int64]:
    """Choose the first `top` in the order of `rank_contributions`, and the largest `top // 2`.

    The latter may lower a score. Without a large weight the loss is not proportional to it, so that
    these cannot be counted together with others.
    """
    order = rank_contributions(contributions)[:top]
    largest = np.argsort(-np.abs(contributions), kind="stable")[: top // 2]
    return np.concatenate([order, np.setdiff1d(largest, order)])


def shares_of(own: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share, 0 to 1, of events [n] that add `own` to a score in what all share.

    It has no step at 0, so that rounding does not decide who shares.
    """
    return np.clip(own / WHOLE_SHARE, 0.0, 1.0)


class _EventGroups(NamedTuple):
    """Events of one item, age bucket and type, which differ only in their weight: P groups."""

    group: NDArray[np.int32]  # [count] of each event; P where it cannot be attended
    places: NDArray[np.int64]  # [P] of the item
    columns: NDArray[np.int64]  # [P] of the biases
    max_weights: NDArray[np.float32]  # [P]
    counts: NDArray[np.int64]  # [P] of events


class TopEvents(NamedTuple):
    events: NDArray[np.int64]  # [E]
    biases: NDArray[np.float32]  # [H, E]
    others: tuple[float, float]  # shares of events not chosen that raise the score, that lower it


def log(weights: NDArray[np.float64]) -> Tensor:
    """Log of weights, -inf for 0, as float32."""
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(weights)).float()


@torch.inference_mode()
def _bias_table(snapshot: Snapshot) -> NDArray[np.float64]:
    """The bias of each age bucket and type, [H, (types + 1) · AGE_BUCKETS], type-major."""
    ages = torch.cat([torch.zeros(1, dtype=torch.int64), torch.from_numpy(_EDGES)])
    types = torch.tensor([*range(snapshot.model.config.n_event_types), UNKNOWN])
    biases = snapshot.model.memory_bias(
        torch.full((1, 1), _DISTANT),
        ages.expand(len(types), -1),
        torch.zeros(1, 1),
        types[:, None].expand(-1, len(ages)),
    )
    return biases.flatten(1).double().numpy()


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
    one may be left out. They must be on items that can be attended: `collapsible_prefix`.
    """
    recent = max(RECENT_EVENTS, 2 * window)
    return max(0, (events - recent) // _STEP * _STEP)


def collapsible_prefix(snapshot: Snapshot, history: UserHistory) -> int:
    """Choose how many of a history's oldest events to collapse.

    `collapsible_events`, or fewer where most of the newest events are on items that cannot be
    attended.
    """
    events, spare = len(history.rows), 0
    while count := collapsible_events(max(0, events - spare), snapshot.model.config.window):
        if leaves_enough(snapshot, history, count):
            break
        spare = 2 * spare + RECENT_EVENTS
    return count


def leaves_enough(snapshot: Snapshot, history: UserHistory, count: int) -> bool:
    """True if all events whose position matters are among those after the first `count`."""
    _, rows = attendable_events(snapshot, history.newest(count, 0))
    window = snapshot.model.config.window
    return int((rows >= 0).sum()) >= max(2 * window, _LEAST_ON_ITEMS)


class CollapsedHistory:
    """The first `count` events of a history as rows of distinct items: far rows of its memory.

    `item_rows` [m] are the rows of the distinct items, and their indexes are called places; their
    weights are [H, m]. The history has no vectors of its own and no mask, and its events are in the
    order of time; ages are taken at `at`, microseconds UTC. Requests share and extend it: the
    caller must hold `lock` from before the memory of the newer events is built until scoring
    finishes.
    """

    def __init__(self, snapshot: Snapshot, history: UserHistory, count: int, at: int) -> None:
        self.lock = threading.RLock()  # a request may take it again for a part of its work
        self.lists: KeyLists | None = None
        self._rows: KVTable | None = None  # gathered
        self._indexes: dict[IndexKind, Indexes] = {}
        self._beside = np.zeros(0, np.int64)  # places whose weights differ from those in an index
        self._model, self._catalogue = snapshot.model, snapshot.catalogue
        self._table = KVTable(snapshot.tables.keys, snapshot.tables.values)
        self.history = history  # any history that begins with the same events serves as well
        self.count = 0
        self.attendable = 0  # of those events, on items that can be attended
        self.item_rows = np.zeros(0, np.int64)
        self._biases = _bias_table(snapshot)
        self.weights = np.zeros((len(self._biases), 0))
        self._place_of = np.full(len(snapshot.has_vector), -1, np.int32)  # of all items, -1 = none
        self._missing = np.zeros(0, np.int64)  # items of events that cannot be attended
        self._at = at
        self._groups: _EventGroups | None = None
        self._collapse(snapshot, history, count)

    def __len__(self) -> int:
        return len(self.item_rows)

    @property
    def nbytes(self) -> int:
        indexes = [index for heads in list(self._indexes.values()) for index in heads]
        arrays = self._place_of, self.item_rows, self.weights, self._missing, *(self._groups or ())
        held = sum(index.nbytes for index in indexes) + sum(int(part.nbytes) for part in arrays)
        held += sum(part.nbytes for part in self._rows or ())
        return held + (0 if self.lists is None else self.lists.nbytes)

    @property
    def needs_lists(self) -> bool:
        """True if lists should be built: they are missing, or many items are newer."""
        if self.lists is None:
            return len(self) >= LISTS_FROM
        return len(self) - len(self.lists) > max(RECENT_EVENTS, len(self) // _STALE)

    def rebind(self, snapshot: Snapshot) -> bool:
        """Take keys and values of another snapshot; False where these events differ there."""
        if snapshot.model is not self._model:
            return False
        changed = snapshot.catalogue.changed_since(self._catalogue)
        if changed is None or self._depends_on(changed):
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
        if count > self.count:
            self.advance_to(at)
            self._update(self._collapse(snapshot, history, count))
        else:
            self.history = history

    @torch.inference_mode()
    def advance_to(self, at: int) -> bool:
        """Take ages at a request's time; whether any weight has changed."""
        if at == self._at:
            return False
        times = self.history.timestamps[: self.count]
        # The events of at least each bucket are a beginning, which grows as time goes on.
        before = np.searchsorted(times, self._at - _EDGES, side="right")
        after = np.searchsorted(times, at - _EDGES, side="right")
        low, high = np.minimum(before, after), np.maximum(before, after)
        moved = np.unique(
            np.concatenate([np.arange(a, b) for a, b in zip(low, high, strict=True)])
        ).astype(np.int64)
        old, self._at = self._at, at
        if not len(moved):
            return False
        moved = moved[self._event_places(moved) >= 0]
        self._add(moved, self._columns(moved, old), -1.0)
        places = self._add(moved, self._columns(moved, at), 1.0)
        self._update(places)
        return len(places) > 0

    @torch.inference_mode()
    def build_lists(self, snapshot: Snapshot) -> None:
        """Build lists of the items as they are now, and use them.

        This may take seconds, and holds the lock only at its beginning and its end.
        """
        with self.lock:
            weights, rows, table = self.weights.copy(), self.item_rows, self._table
        queries = snapshot.tables.queries[:, :: max(1, len(snapshot.has_vector) // _QUERIES)]
        metric = queries.mT @ queries / max(1, queries.shape[1])
        if snapshot.model.state_attention is not None:
            metric += snapshot.model.state_attention.query_moment()
        lists = KeyLists(table, torch.from_numpy(rows), log(weights), metric=metric)
        with self.lock:
            changed = (self.weights[:, : len(lists)] != weights).any(0)
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
        """The places of largest score, and those among what changed since it was indexed."""
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
        """Keys [H, T, K, d], values and bias [H, T, K] of places."""
        rows = torch.from_numpy(self.item_rows)[places]
        head = torch.arange(len(places))[:, None, None]
        bias = torch.from_numpy(self.weights)[head, places].log().float()
        return KVBlock(self._table.keys[head, rows], self._table.values[head, rows], bias)

    def block(self) -> KVBlock:
        """All items, in the order of their places; keys and values of few are kept."""
        kept, rows = self._rows, torch.from_numpy(self.item_rows)
        if kept is None or kept.keys.shape[1] != len(self):
            kept = KVTable(*(gather_rows(each, rows) for each in self._table))
            self._rows = kept if len(self) < LISTS_FROM else None
        return KVBlock(*kept, log(self.weights))

    def places(self, items: Tensor) -> Tensor:
        """The places int64 [n] of item rows, -1 for items without events here."""
        return torch.from_numpy(self._places_of(items.numpy()).astype(np.int64))

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
        parts = []
        for block in self._blocks(0):
            similarity = (block.keys @ query[:, :, None])[..., 0] / math.sqrt(query.shape[1])
            share = (similarity + block.bias - whole.logsumexp).exp()
            parts.append(share * ((block.values @ outputs[:, :, None])[..., 0] - mean))
        gains = torch.cat(parts, 1).double()  # beyond the mean row, all events of an item together
        differences = (gains if seen is None else gains * seen).numpy()
        groups = self._event_groups()
        checkpoint()
        unit = np.exp(self._biases[:, groups.columns])  # (H, P) of an event of weight 1
        with np.errstate(invalid="ignore"):
            shares = np.nan_to_num(unit / self.weights[:, groups.places])
        each = (shares * differences[:, groups.places]).sum(0)
        # The foremost events are in the groups whose heaviest event is foremost.
        chosen = foremost(each * groups.max_weights, top)
        marked = np.zeros(len(each) + 1, np.bool_)
        marked[chosen] = True
        events = np.flatnonzero(marked[groups.group])
        added = each[groups.group[events]] * self.history.weights[events]
        events = events[foremost(added, top)]
        log_weights = np.log(self.history.weights[events].astype(np.float64))
        bias = self._biases[:, self._columns(events, self._at)] + log_weights
        own = each * groups.max_weights
        chosen_own = each[groups.group[events]] * self.history.weights[events]
        raising, lowering = (
            float(groups.counts @ shares_of(sign * own) - shares_of(sign * chosen_own).sum())
            for sign in (1, -1)
        )
        return TopEvents(events, bias.astype(np.float32), (raising, lowering))

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
            self.lists.update(torch.from_numpy(listed).long(), log(self.weights[:, listed]))

    def _blocks(self, start: int) -> Iterator[KVBlock]:
        return (self._block_of(slice(at, at + _BLOCK)) for at in range(start, len(self), _BLOCK))

    def _block_of(self, places: NDArray[np.int64] | slice) -> KVBlock:
        checkpoint()
        rows = torch.from_numpy(self.item_rows[places])
        keys, values = (gather_rows(each, rows) for each in self._table)
        return KVBlock(keys, values, log(self.weights[:, places]))

    def _depends_on(self, rows: NDArray[np.int64]) -> bool:
        """True if a change of some items changes any key, value or weight here."""
        inside = rows[rows < len(self._place_of)]
        return bool((self._place_of[inside] >= 0).any() or np.isin(rows, self._missing).any())

    def _places_of(self, rows: NDArray[np.integer]) -> NDArray[np.int32]:
        """The places of item rows [n], -1 for rows of no item and items without events."""
        inside = (rows >= 0) & (rows < len(self._place_of))
        return np.where(inside, self._place_of.take(rows, mode="clip"), -1)

    @torch.inference_mode()
    def _collapse(self, snapshot: Snapshot, history: UserHistory, count: int) -> NDArray[np.int64]:
        """Add the events up to `count`; the places of the items whose weights have changed."""
        rows = history.rows[self.count : count].astype(np.int64)
        part = slice(self.count, count)
        size = len(snapshot.has_vector)
        if size > len(self._place_of):
            more = np.full(size - len(self._place_of), -1, np.int32)
            self._place_of = np.concatenate([self._place_of, more])
        inside = (rows >= 0) & (rows < size)
        usable = snapshot.has_vector.take(rows, mode="clip") & inside if size else inside & False
        usable &= history.types[part] != MASKED
        self._missing = np.union1d(self._missing, rows[~usable])
        items = rows[usable]
        present = np.zeros(size, np.bool_)
        present[items] = True
        new = np.flatnonzero(present & (self._place_of[:size] < 0))
        self._place_of[new] = len(self.item_rows) + np.arange(len(new))
        self.item_rows = np.concatenate([self.item_rows, new])
        self.weights = np.pad(self.weights, ((0, 0), (0, len(new))))
        self.history, self.count = history, count
        self.attendable += len(items)
        events = np.flatnonzero(usable) + part.start
        return self._add(events, self._columns(events, self._at), 1.0)

    def _event_groups(self) -> _EventGroups:
        if self._groups is None:
            item = self._event_places(slice(0, self.count))
            columns = self._biases.shape[1]
            ids = item.astype(np.int64) * columns
            ids += self._columns(np.arange(self.count), self._at)
            placed = item >= 0
            groups, of, counts = np.unique(ids[placed], return_inverse=True, return_counts=True)
            max_weights = np.zeros(len(groups), np.float32)
            np.maximum.at(max_weights, of, self.history.weights[: self.count][placed])
            group = np.full(self.count, len(groups), np.int32)
            group[placed] = of
            places, within = np.divmod(groups, columns)
            self._groups = _EventGroups(group, places, within, max_weights, counts)
        return self._groups

    def _event_places(self, events: NDArray[np.int64] | slice) -> NDArray[np.int32]:
        """The place of each event's item; -1 for events that cannot be attended."""
        places = self._places_of(self.history.rows[events])
        places[self.history.types[events] == MASKED] = -1
        return places

    def _columns(self, events: NDArray[np.int64], at: int) -> NDArray[np.int64]:
        buckets = age_bucket(torch.from_numpy(at - self.history.timestamps[events])).numpy()
        types = self.history.types[events].astype(np.int64)
        count = self._biases.shape[1] // AGE_BUCKETS - 1
        types = np.where((types >= 0) & (types < count), types, count)
        columns: NDArray[np.int64] = types * AGE_BUCKETS + buckets
        return columns

    def _add(
        self, events: NDArray[np.int64], columns: NDArray[np.int64], sign: float
    ) -> NDArray[np.int64]:
        """Add the weights of events to their items, or subtract them; the items' places."""
        places = self._place_of[self.history.rows[events]]
        signed = self.history.weights[events].astype(np.float64) * sign
        self._groups = None
        touched = np.zeros(len(self), np.bool_)
        touched[places] = True
        for head, factors in enumerate(np.exp(self._biases)):
            own, more = self.weights[head], factors[columns] * signed
            if len(events) > len(own) // 4:
                np.add(own, np.bincount(places, more, minlength=len(own)), out=own)
            else:
                np.add.at(own, places, more)
            own[touched] = own[touched].clip(0)  # rounding may leave less than nothing
        return np.flatnonzero(touched)
