"""Events collapsed into one weight for each distinct item and head.

Keys and values are the items', so that events on one item differ in their bias alone, and collapse
without loss into one row of weight W_h = Σ w e^(b_h). Beyond the newest few hundred events a bias
depends on age and type only, and changes when an event's age passes into another bucket: few do
between two requests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint
from models.encoder.event_bias import AGE_BUCKETS, AGE_EDGES, MASKED, UNKNOWN, age_bucket
from models.history.user_history import UserHistory

_DISTANT = 1 << 30  # events: a position in the last bucket
_EDGES = AGE_EDGES.numpy()
WHOLE_SHARE = 1e-8  # what an event adds at least to a score, to have a whole share in the rest


def rank_contributions(contributions: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Order contributions [..., n] to scores: the largest positive first, then the most negative.

    What lowers a score is never preferred to what raises it: a reason is given as "because of".
    """
    return np.lexsort((-np.abs(contributions), contributions <= 0))


def foremost(contributions: NDArray[np.float64], top: int) -> NDArray[np.int64]:
    """Choose the first `top` in the order of `rank_contributions`, and the largest half as many.

    The latter may lower a score. Where their weight is large, what is lost without them is not
    proportional to it, so that they cannot be counted together with others.
    """
    order = rank_contributions(contributions)[:top]
    largest = np.argsort(-np.abs(contributions), kind="stable")[: top // 2]
    return np.concatenate([order, np.setdiff1d(largest, order)])


def shares_of(own: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of events [n] that add `own` to a score in what all share, 0 to 1.

    It has no step at 0, so that rounding does not decide who shares.
    """
    return np.clip(own / WHOLE_SHARE, 0.0, 1.0)


class _EventGroups(NamedTuple):
    """Events of one item, age bucket and type, which differ in their weight alone: P groups."""

    group: NDArray[np.int32]  # [count] of each event; P where it cannot be attended
    places: NDArray[np.int64]  # [P] of the item
    columns: NDArray[np.int64]  # [P] of the biases
    max_weights: NDArray[np.float32]  # [P]
    counts: NDArray[np.int64]  # [P] of events


class TopEvents(NamedTuple):
    """Events that are chosen for one target, and how many there are besides."""

    events: NDArray[np.int64]  # [E]
    biases: NDArray[np.float32]  # [H, E]
    others: tuple[float, float]  # shares of events not chosen that raise the score, that lower it


class ItemWeights:
    """The weights of the items of a history's first `count` events.

    `items` [m] are the rows of the distinct items, and their indexes are called places. `weights`
    is [H, m]. Not for several threads at once.
    """

    def __init__(self, snapshot: Snapshot, history: UserHistory, count: int, at: int) -> None:
        """Collapse events.

        Args:
            snapshot: the model's biases, and which items have a vector.
            history: without vectors of its own and without a mask; events in the order of time.
            count: how many of its events, from the first.
            at: the time at which ages are taken, microseconds UTC.
        """
        self.history = history  # any history that begins with the same events serves as well
        self.count = 0
        self.attendable = 0  # of those events, on items that can be attended
        self.items = np.zeros(0, np.int64)
        self._biases = _bias_table(snapshot)
        self.weights = np.zeros((len(self._biases), 0))
        self._places = np.full(len(snapshot.has_vector), -1, np.int32)  # of all items, -1 = none
        self._missing = np.zeros(0, np.int64)  # items of events that cannot be attended
        self._at = at
        self._groups: _EventGroups | None = None
        self.extend(snapshot, history, count)

    def __len__(self) -> int:
        """Number of distinct items."""
        return len(self.items)

    @property
    def nbytes(self) -> int:
        """Bytes held, without the history."""
        own = (self._places, self.items, self.weights, self._missing)
        groups = () if self._groups is None else self._groups
        return sum(part.nbytes for part in (*own, *groups))

    def depends_on(self, rows: NDArray[np.int64]) -> bool:
        """Report whether a change of some items changes any key, value or weight here."""
        inside = rows[rows < len(self._places)]
        return bool((self._places[inside] >= 0).any() or np.isin(rows, self._missing).any())

    def places(self, rows: NDArray[np.integer]) -> NDArray[np.int32]:
        """The places of item rows [n], -1 for rows of no item and items without events."""
        inside = (rows >= 0) & (rows < len(self._places))
        return np.where(inside, self._places.take(rows, mode="clip"), -1)

    def log_weights(self, places: NDArray[np.int64] | slice) -> Tensor:
        """Log of the weights at some places, [H, n]."""
        return log(self.weights[:, places])

    @torch.inference_mode()
    def extend(self, snapshot: Snapshot, history: UserHistory, count: int) -> NDArray[np.int64]:
        """Add the events up to `count` of a history that continues the one before.

        Returns:
            The places of the items whose weights have changed.
        """
        rows = history.rows[self.count : count].astype(np.int64)
        part = slice(self.count, count)
        size = len(snapshot.has_vector)
        if size > len(self._places):
            more = np.full(size - len(self._places), -1, np.int32)
            self._places = np.concatenate([self._places, more])
        inside = (rows >= 0) & (rows < size)
        usable = snapshot.has_vector.take(rows, mode="clip") & inside if size else inside & False
        usable &= history.types[part] != MASKED
        self._missing = np.union1d(self._missing, rows[~usable])
        items = rows[usable]
        present = np.zeros(size, np.bool_)
        present[items] = True
        new = np.flatnonzero(present & (self._places[:size] < 0))
        self._places[new] = len(self.items) + np.arange(len(new))
        self.items = np.concatenate([self.items, new])
        self.weights = np.pad(self.weights, ((0, 0), (0, len(new))))
        self.history, self.count = history, count
        self.attendable += len(items)
        events = np.flatnonzero(usable) + part.start
        return self._add(events, self._columns(events, self._at), 1.0)

    @torch.inference_mode()
    def advance_to(self, at: int) -> NDArray[np.int64]:
        """Take ages at a request's time; the places of the items whose weights have changed."""
        if at == self._at:
            return np.zeros(0, np.int64)
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
            return moved
        moved = moved[self._event_places(moved) >= 0]
        self._add(moved, self._columns(moved, old), -1.0)
        return self._add(moved, self._columns(moved, at), 1.0)

    def top_events(self, differences: NDArray[np.float64], top: int) -> TopEvents:
        """Choose the events without which a target's score would change most.

        Args:
            differences: what the items add to the score beyond the mean row, all their events
                together, [H, m].
            top: how many events to choose, as `foremost` does.
        """
        groups = self._event_groups()
        checkpoint()
        unit = np.exp(self._biases[:, groups.columns])  # (H, P) of an event of weight 1
        with np.errstate(invalid="ignore"):
            share = np.nan_to_num(unit / self.weights[:, groups.places])
        each = (share * differences[:, groups.places]).sum(0)
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

    def _event_groups(self) -> _EventGroups:
        """The events in groups, kept as long as no age has changed."""
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
        places = self.places(self.history.rows[events])
        places[self.history.types[events] == MASKED] = -1
        return places

    def _columns(self, events: NDArray[np.int64], at: int) -> NDArray[np.int64]:
        """The column of the biases for each of some events, by age and type."""
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
        places = self._places[self.history.rows[events]]
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
