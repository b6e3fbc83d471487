"""Steering of a ranking: boosts, buried items, pins, quotas and exploration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.catalogue.fields.field_columns import ItemFields
from models.catalogue.fields.item_values import Special
from models.catalogue.fields.value_column import ValueColumn
from models.compute.checkpoint import checkpoint

# the unit of boosts ---------------------------------------------------------------------

UNIT_OF = 100  # scores, the largest, whatever the length of the answer


def boost_unit(scores: NDArray[np.floating[Any]]) -> float:
    """Return the standard deviation of the `UNIT_OF` largest scores [n]; 1 where none differ."""
    largest = -np.sort(-scores.astype(np.float64))[:UNIT_OF]
    deviation = float(largest.std()) if len(largest) else 0.0
    return deviation if deviation > 0 else 1.0


# instructions over item rows ------------------------------------------------------------

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


# quotas ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """Distinct values of one column among the items of a pool; their groups are consecutive."""

    column: ValueColumn[Any]
    values: NDArray[Any]  # [V]
    first: int  # the group of the first value


@dataclass(slots=True, eq=False)
class QuotaCounts:
    """The items of a pool that may still be taken, while quotas fill up.

    A group is one value of one quota's field. An item without a value is in no group; one with
    several is in the group of each.
    """

    open: NDArray[np.bool_]  # [P] may be taken
    _left: list[int]  # [G] how many more items each group takes
    _groups: NDArray[np.int64]  # of item p: _groups[_group_at[p]:_group_at[p + 1]]
    _group_at: NDArray[np.int64]  # [P + 1]
    _members: NDArray[np.int64]  # of group g: _members[_member_at[g]:_member_at[g + 1]]
    _member_at: NDArray[np.int64]  # [G + 1]
    _columns: tuple[_Column, ...]

    @classmethod
    def over(
        cls, fields: ItemFields, quotas: Sequence[Quota], rows: NDArray[np.int64]
    ) -> QuotaCounts:
        """Return the counts of a pool of distinct item rows [P], none of them taken yet.

        The pool has no items that a quota names as shown.
        """
        none = np.zeros(0, np.int64)
        if not quotas:
            begins_at = np.zeros(len(rows) + 1, np.int64)
            return cls(np.ones(len(rows), np.bool_), [], none, begins_at, none, begins_at[:1], ())
        owners, groups, begins = (list[NDArray[np.int64]]() for _ in range(3))
        left, columns, pairs = list[int](), list[_Column](), 0
        by_row = np.argsort(rows)
        for quota in quotas:
            for column, ignored in _columns_of(fields, quota.field):
                place, value = column.pairs_of(rows[by_row])
                owner = by_row[place]
                if ignored is not None:
                    owner, value = owner[value != ignored], value[value != ignored]
                order = np.argsort(value)
                owner, value = owner[order], value[order]
                is_first = np.ones(len(value), np.bool_)
                is_first[1:] = value[1:] != value[:-1]
                first = np.flatnonzero(is_first)
                owners.append(owner)
                groups.append(np.cumsum(is_first) + (len(left) - 1))
                begins.append(first + pairs)
                columns.append(_Column(column, value[first], len(left)))
                room = np.full(len(first), quota.most)
                if quota.shown:
                    counted = np.sort(column.pairs_of(np.unique(quota.shown))[1])
                    room += np.searchsorted(counted, value[first])
                    room -= np.searchsorted(counted, value[first], side="right")
                left += room.tolist()
                pairs += len(owner)
        owner = np.concatenate([*owners, none])
        by_owner = np.argsort(owner)
        group = np.concatenate([*groups, none])
        is_open = np.ones(len(rows), np.bool_)
        is_open[owner[np.array(left, np.int64)[group] <= 0]] = False
        return cls(
            is_open,
            left,
            group[by_owner],
            np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(rows)))]),
            owner,
            np.concatenate([*begins, [pairs]]),
            tuple(columns),
        )

    @property
    def constrains(self) -> bool:
        """Report whether taking an item may close others."""
        return len(self._left) > 0

    def take(self, place: int) -> None:
        """Take the item at a place, and close the items of the groups that it fills."""
        self.open[place] = False
        begin, end = self._group_at[place : place + 2].tolist()
        for group in self._groups[begin:end].tolist():
            self._left[group] -= 1
            if self._left[group] <= 0:
                begin, end = self._member_at[group : group + 2].tolist()
                self.open[self._members[begin:end]] = False

    def copy(self) -> QuotaCounts:
        """Return counts that go on from here by themselves."""
        return replace(self, open=self.open.copy(), _left=self._left.copy())

    def closed_rows(self, size: int) -> NDArray[np.bool_]:
        """Mark all items of the catalogue that have a value of a full group, bool [size]."""
        closed = np.zeros(size, np.bool_)
        for one in self._columns:
            left = np.array(self._left[one.first : one.first + len(one.values)], np.int64)
            full = one.values[left <= 0]
            if len(full):
                closed |= one.column.mask(partial(np.isin, test_elements=full), size)
        return closed


def _columns_of(fields: ItemFields, name: str) -> Iterator[tuple[ValueColumn[Any], int | None]]:
    """Yield the columns whose values count, keywords and numbers, each with a value that does not.

    An attribute that is an object has members, which are fields of their own.
    """
    columns = fields.columns_of(name)
    if columns.keywords is not None:
        yield columns.keywords.codes, Special.OBJECT.value
    if columns.numbers is not None:
        yield columns.numbers, None


# exploration ----------------------------------------------------------------------------

DRAWS = 500
EXPLORED = 200  # items at most that a draw is between


def explore(
    scores: NDArray[np.float32],
    events: NDArray[np.int64],
    order: NDArray[np.int64],
    counts: QuotaCounts,
    limit: int,
    generator: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw items and take them from the open ones.

    Args:
        scores: [P] of a pool.
        events: [P] number of events on each item.
        order: places of the items to draw from, best first.
        counts: of the pool.
        limit: the most items.
        generator: of the draws.

    Returns:
        Places [≤ limit] in the order of the draw, and their propensities.
    """
    order = order[counts.open[order]][: max(EXPLORED, 4 * limit)]
    if limit <= 0 or not len(order):
        return order[:0], np.zeros(0, np.float32)
    deviation = scores.std() / np.sqrt(1 + events[order])
    noise = generator.standard_normal((DRAWS, len(order)), np.float32)
    appeal = scores[order] + deviation * noise
    shown = np.zeros(len(order))
    first: list[int] = []
    most = min(limit, len(order))
    if counts.constrains:
        for draw in range(DRAWS):
            chosen = _draw(appeal[draw], order, counts.copy(), limit)
            shown[chosen] += 1
            first = first or chosen
    else:
        top = np.argpartition(-appeal, most - 1, axis=1)[:, :most]
        shown += np.bincount(top.ravel(), minlength=len(order))
        first = np.argsort(-appeal[0], kind="stable")[:most].tolist()
    for at in first:
        counts.take(int(order[at]))
    return order[first], (shown[first] / DRAWS).astype(np.float32)


def _draw(
    appeal: NDArray[np.float32], order: NDArray[np.int64], counts: QuotaCounts, limit: int
) -> list[int]:
    """Return the items of the largest appeal that quotas let in, as places of `order`."""
    chosen = list[int]()
    for at in np.argsort(-appeal, kind="stable").tolist():
        if counts.open[order[at]]:
            counts.take(int(order[at]))
            chosen.append(at)
            if len(chosen) == limit:
                break
    return chosen


# the order of an answer -----------------------------------------------------------------

Moved = Literal["pinned", "explored", "buried"]
Places = NDArray[np.int64]

SPREAD = 300  # items at least among which `diversity` chooses


class Pool(NamedTuple):
    """P scored items, from which an answer is chosen."""

    rows: Places  # [P]; those of the pins are the last
    worth: Tensor  # [P] what they are ranked by
    scores: Tensor  # [P]
    events: NDArray[np.int64]  # [P] number of events on each item
    vectors: Callable[[Tensor], Tensor]  # the vectors of places


@dataclass(frozen=True, slots=True, eq=False)
class Lineup:
    """Places of a pool in the order of the answer."""

    places: Places  # [L]
    moved: tuple[Moved | None, ...]  # [L] why an item does not stand where its score puts it
    propensities: NDArray[np.float32] | None  # [L] of being in the answer; None = nothing explored
    depth: float  # share of the ranked pool that was looked at


def line_up(
    pool: Pool, counts: QuotaCounts, steering: ItemSteering, *, limit: int, diversity: float
) -> Lineup:
    """Choose and order the items of an answer.

    Args:
        pool: the scored items, which are not empty.
        counts: of the pool; they are full to this answer afterwards.
        steering: of the same catalogue.
        limit: the most items, pinned ones among them.
        diversity: as in `recommend`.
    """
    if not (steering.reorders or steering.pins or diversity):
        (order,) = _tiers(pool, steering)
        best = order[:limit]
        return Lineup(best, (None,) * len(best), None, len(best) / max(1, len(order)))
    first_pin = len(pool.rows) - len(steering.pins)
    shown = [at for at, pin in enumerate(steering.pins) if pin.position <= limit]
    for at in range(len(steering.pins)):
        counts.open[first_pin + at] = False
    for at in shown:
        counts.take(first_pin + at)
    free = limit - len(shown)
    lottery = min(free, round(steering.explore * limit)) if steering.explore > 0 else 0
    if steering.explore > 0 and free:
        lottery = max(1, lottery)
    tiers = _tiers(pool, steering)
    ranked = _ranked(pool, tiers, counts, free - lottery, diversity)
    generator = np.random.default_rng(steering.seed)
    few = tiers[0][pool.events[tiers[0]] < FEW_EVENTS] if lottery else tiers[0][:0]
    drawn, chances = explore(pool.scores.numpy(), pool.events, few, counts, lottery, generator)
    # Where fewer items are new than there are places for them, the ranking goes on.
    ranked = np.concatenate(
        [ranked, _ranked(pool, tiers, counts, free - len(ranked) - len(drawn), diversity)]
    )
    places, moved = _around_pins(
        [Pin(first_pin + at, steering.pins[at].position) for at in shown], ranked, drawn, generator
    )
    if steering.buried is not None:
        is_buried = steering.buried[pool.rows[places]].tolist()
        moved = [why or ("buried" if b else None) for why, b in zip(moved, is_buried, strict=True)]
    propensities = None
    if steering.explore > 0:
        chance_of = dict(zip(drawn.tolist(), chances.tolist(), strict=True))
        propensities = np.array([chance_of.get(at, 1.0) for at in places.tolist()], np.float32)
    order = np.concatenate(tiers)
    deepest = np.flatnonzero(np.isin(order, ranked)).max(initial=-1) + 1
    return Lineup(places, tuple(moved), propensities, deepest / max(1, len(order)))


def _tiers(pool: Pool, steering: ItemSteering) -> list[Places]:
    """Return the places without pins by falling worth: first what is not buried, then the rest."""
    ranked = len(pool.rows) - len(steering.pins)
    order = torch.argsort(pool.worth[:ranked], descending=True, stable=True).numpy()
    if steering.buried is None:
        return [order]
    behind = steering.buried[pool.rows[order]]
    return [order[~behind], order[behind]]


def _ranked(
    pool: Pool, tiers: list[Places], counts: QuotaCounts, limit: int, diversity: float
) -> Places:
    """Take the best open places in order, from one tier after the other."""
    taken = np.zeros(0, np.int64)
    for tier in tiers:
        left = limit - len(taken)
        if left <= 0:
            break
        order = tier[counts.open[tier]]
        if diversity > 0:
            near = order[: max(SPREAD, 4 * left)]
            spread = _spread(pool, near, counts, left, diversity)
            order = order[len(near) :]
            taken, left = np.concatenate([taken, spread]), left - len(spread)
        taken = np.concatenate([taken, take_first(order, counts, left)])
    return taken


def take_first(order: Places, counts: QuotaCounts, limit: int) -> Places:
    """Take the first open places [<= limit] of an order; they count."""
    if not counts.constrains:
        taken = order[:limit]
        counts.open[taken] = False
        return taken
    chosen = list[int]()
    for place in order.tolist() if limit > 0 else ():
        if counts.open[place]:
            counts.take(place)
            chosen.append(place)
            if len(chosen) == limit:
                break
    return np.array(chosen, dtype=np.int64)


def _spread(pool: Pool, order: Places, counts: QuotaCounts, limit: int, diversity: float) -> Places:
    """Take open places by maximal marginal relevance (Carbonell & Goldstein 1998).

    Each step takes the largest (1 - λ)·relevance - λ·(largest cosine to a chosen item), relevance
    scaled to [0, 1] so that both terms are of one size.
    """
    places = torch.from_numpy(order)
    worth = pool.worth[places]
    if not len(worth):
        return order
    span = (worth.max() - worth.min()).clamp(min=1e-9)
    relevance = (worth - worth.min()) / span
    unit = torch.nn.functional.normalize(pool.vectors(places), dim=1)
    closest = torch.zeros_like(relevance)
    taken: list[int] = []
    while len(taken) < limit:
        checkpoint()
        open_ = torch.from_numpy(counts.open[order])
        if not bool(open_.any()):
            break
        value = (1 - diversity) * relevance - diversity * closest
        best = int(value.masked_fill(~open_, -torch.inf).argmax())
        counts.take(int(order[best]))
        closest = torch.maximum(closest, unit @ unit[best]) if taken else unit @ unit[best]
        taken.append(best)
    return order[taken]


def _around_pins(
    pins: list[Pin], ranked: Places, drawn: Places, generator: np.random.Generator
) -> tuple[Places, list[Moved | None]]:
    """Order an answer: pins at their positions, the explored at random ones, the rest in order.

    A pin whose position is behind the last item comes last. The `row` of a pin is its place.
    """
    size = len(pins) + len(ranked) + len(drawn)
    places = np.full(size, -1)
    moved: list[Moved | None] = [None] * size
    last = size
    for pin in sorted(pins, key=lambda pin: -pin.position):
        last = min(pin.position - 1, last - 1)
        places[last], moved[last] = pin.row, "pinned"
    free = np.flatnonzero(places < 0)
    if len(drawn):
        lots = np.sort(generator.choice(free, len(drawn), replace=False))
        places[lots] = drawn
        for at in lots.tolist():
            moved[at] = "explored"
        free = np.flatnonzero(places < 0)
    places[free] = ranked
    return places, moved


# items ranked by one number -------------------------------------------------------------


class SteeredRows(NamedTuple):
    """Rows of an answer, best first."""

    rows: NDArray[np.int64]  # [L]
    moved: tuple[Moved | None, ...]  # [L] why an item does not stand where its number puts it


def line_up_ranked(
    fields: ItemFields,
    ranked: NDArray[np.int64],
    steering: ItemSteering,
    *,
    limit: int,
) -> SteeredRows:
    """Put pins at their positions, buried items last, and keep quotas; nothing is explored.

    Args:
        fields: of the catalogue.
        ranked: distinct item rows [R], best first, boosts included, without pins.
        steering: of the same catalogue.
        limit: the most items, pinned ones among them.
    """
    every = np.concatenate([ranked, steering.pinned])
    worth = -torch.arange(len(every)).float()
    events = np.zeros(len(every), np.int64)
    pool = Pool(every, worth, worth, events, lambda places: torch.zeros(len(places), 1))
    counts = QuotaCounts.over(fields, steering.quotas, every)
    lineup = line_up(pool, counts, steering, limit=limit, diversity=0.0)
    return SteeredRows(every[lineup.places], lineup.moved)


def line_up_scored(
    fields: ItemFields,
    rows: NDArray[np.int64],
    scores: NDArray[np.floating[Any]],
    steering: ItemSteering,
    *,
    limit: int,
) -> SteeredRows:
    """Rank items by the sum of score and boost, ties in the order given, and line them up.

    Args:
        fields: of the catalogue.
        rows: distinct item rows [R]; pins among them are ranked nowhere else.
        scores: of these, without boosts, [R].
        steering: of the same catalogue.
        limit: the most items, pinned ones among them.
    """
    own = scores if steering.boost is None else scores + steering.boost[rows]
    order = rows[np.argsort(-own, kind="stable")]
    ranked = order[~np.isin(order, steering.pinned)]
    return line_up_ranked(fields, ranked, steering, limit=limit)


class QuotaChoice:
    """Choice of the first places of an order within quotas, for several answers from one pool."""

    def __init__(
        self, fields: ItemFields, quotas: Sequence[Quota], rows: NDArray[np.int64], limit: int
    ) -> None:
        self._counts = QuotaCounts.over(fields, quotas, rows)
        self._limit = limit

    def __call__(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first places [<= limit] of an order that all quotas have room for."""
        return take_first(order, self._counts.copy(), self._limit)
