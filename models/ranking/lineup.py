"""The order of an answer's items: by score, spread, within quotas, explored, around pins.

Items with few events are explored by Thompson sampling (Thompson 1933). An item's appeal is taken
for normal around its score, with the standard deviation

    σ / √(1 + n),        σ of the scores that are compared, n the events on the item

A draw of all appeals shows the items of the largest. The propensity of an item is the share of
`DRAWS` draws that show it. One of these, the first, is the one that is carried out, so that no
item is shown with a propensity of zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.catalogue.columns import ItemFields
from models.compute.checkpoint import checkpoint
from models.ranking.steering import FEW_EVENTS, ItemSteering, Pin, QuotaCounts

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
    """Draw among the open items of `order`, the best first; they count.

    Scores and events are [P] of a pool. Returns places [≤ limit] in the order of the draw, and
    their propensities.
    """
    order = order[counts.open[order]][: max(EXPLORED, 4 * limit)]
    if limit <= 0 or not len(order):
        return order[:0], np.zeros(0, np.float32)
    deviation = scores.std() / np.sqrt(1 + events[order])
    noise = generator.standard_normal((DRAWS, len(order)), np.float32)
    appeal = scores[order] + deviation * noise
    shown = np.zeros(len(scores))
    if counts.constrains:
        for draw in appeal:
            by_appeal = order[np.argsort(-draw, kind="stable")]
            shown[take_first(by_appeal, counts.copy(), limit)] += 1
    else:
        most = min(limit, len(order))
        top = np.argpartition(-appeal, most - 1, axis=1)[:, :most]
        shown += np.bincount(order[top].ravel(), minlength=len(shown))
    first = take_first(order[np.argsort(-appeal[0], kind="stable")], counts, limit)
    return first, (shown[first] / DRAWS).astype(np.float32)


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
    """Choose and order at most `limit` items of a pool, pinned ones among them; they count."""
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
    # If fewer items are new than there are places for them, the ranking goes on.
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
    """Return the places without pins by falling worth: items that are not buried, then the rest."""
    ranked = len(pool.rows) - len(steering.pins)
    order = torch.argsort(pool.worth[:ranked], descending=True, stable=True).numpy()
    if steering.buried is None:
        return [order]
    behind = steering.buried[pool.rows[order]]
    return [order[~behind], order[behind]]


def _ranked(
    pool: Pool, tiers: list[Places], counts: QuotaCounts, limit: int, diversity: float
) -> Places:
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
    """Take the first open places [≤ limit] of an order; they count."""
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


class SteeredRows(NamedTuple):
    """Rows of an answer, best first."""

    rows: NDArray[np.int64]  # [L]
    moved: tuple[Moved | None, ...]  # [L] why an item does not stand where its number puts it


def line_up_ranked(
    fields: ItemFields, ranked: NDArray[np.int64], steering: ItemSteering, *, limit: int
) -> SteeredRows:
    """Put pins at their positions, buried items last, and keep quotas; nothing is explored.

    `ranked` are distinct item rows [R] without pins, best first, boosts included.
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
    """Rank distinct item rows [R] by score [R] and boost, ties as given, and line them up."""
    worth = scores if steering.boost is None else scores + steering.boost[rows]
    order = rows[np.argsort(-worth, kind="stable")]
    ranked = order[~np.isin(order, steering.pinned)]
    return line_up_ranked(fields, ranked, steering, limit=limit)
