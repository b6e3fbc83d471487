"""Users and their tastes: audiences of items, affinities to values of a field, rows by reason.

The audience of an item are users to whom it is more likely than other items are. Scores of one item
for several users are not comparable: each user's are up to a constant of the softmax over items
that the model was trained with. The level of a user is estimated on the same reference items for
everybody:

    score_u(item) - log mean_r exp score_u(r)

which is log P(item | u) up to a constant of the item, as far as the reference stands for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions, attend
from models.catalogue.catalogue import Catalogue
from models.catalogue.facets import FacetValue, values_of_rows
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint
from models.data.event_log import EventLog, LoggedEvents
from models.data.vocabulary import user_item_keys
from models.history.user_memory import UserMemory, retrieve_user, target_queries
from models.index.memory_attention import as_mask
from models.ranking.scoring import Scores, score
from models.ranking.similar_items import similar

TARGETS = 100  # best items, for which the memory is attended
SCORED = 2_000  # items, evenly among all, whose scores are compared at least
_EXACT_WORK = 2_000_000  # targets times rows up to which all items are
_WEIGHTS = 1 << 23  # floats of [H, T, m] held at once: 32 MiB


@dataclass(frozen=True, slots=True)
class ValueAffinity:
    """One value of a field."""

    value: FacetValue
    mass: float  # of the attention, in 0..1
    score: float | None  # mean of items with the value, above the mean of all; None = of none
    rows: int  # rows of the memory on items with the value


@torch.inference_mode()
def affinities(
    snapshot: Snapshot,
    user: UserMemory,
    field: str,
    limit: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[list[ValueAffinity], Scores]:
    """Return the values of a field that the user's events have, by falling attention.

    The mass of a value is the softmax weight of the events on servable items with it, the mean over
    heads and over the `TARGETS` servable items with the highest scores. An item with several values
    counts for each of them. Also returns the scores of all servable items, or of a sample of at
    least `SCORED`. In `user`, every event is a row; `field` is another than `item_id`.
    """
    candidates = np.flatnonzero(snapshot.catalogue.servable & snapshot.has_vector)
    if not len(user) or not len(candidates):
        return [], score(snapshot, user, candidates[:0], options)
    step = -(-len(candidates) // max(SCORED, _EXACT_WORK // len(user)))
    sample = candidates[::step]
    scores = score(snapshot, user, sample, options)
    totals = scores.total.numpy()
    best = sample[np.argsort(-totals, kind="stable")[:TARGETS]]
    masses = _attention_mass(snapshot, user, torch.from_numpy(best), options)
    rows, weights = user.rows.numpy(), masses.numpy().astype(np.float64)
    # Hidden and deleted items are left out: their values would tell of them.
    shown = np.append(snapshot.catalogue.servable, np.False_)  # the last is that of row -1
    on_items = np.flatnonzero(shown[rows] & (weights > 0))
    items, place = np.unique(rows[on_items], return_inverse=True)
    mass = np.bincount(place, weights[on_items], minlength=len(items))
    counts = np.bincount(place, minlength=len(items))
    attended: dict[FacetValue, tuple[float, int]] = {}
    for at, value in values_of_rows(snapshot.catalogue.fields, field, items):
        so_far, count = attended.get(value, (0.0, 0))
        attended[value] = so_far + float(mass[at]), count + int(counts[at])
    by_value: dict[FacetValue, list[float]] = {}
    for at, value in values_of_rows(snapshot.catalogue.fields, field, sample):
        by_value.setdefault(value, []).append(float(totals[at]))
    mean = float(totals.mean())
    every = [
        ValueAffinity(
            value,
            total,
            float(np.mean(by_value[value])) - mean if value in by_value else None,
            count,
        )
        for value, (total, count) in attended.items()
    ]
    return sorted(every, key=lambda one: (-one.mass, str(one.value)))[:limit], scores


def _attention_mass(
    snapshot: Snapshot, user: UserMemory, targets: Tensor, options: AttentionOptions
) -> Tensor:
    """Return the mean weight of each row of a memory [m] over heads and targets [T]."""
    keys, values, bias, _ = user.block
    size = max(1, _WEIGHTS // (keys.shape[0] * max(1, keys.shape[1])))
    total = torch.zeros(keys.shape[1])
    for block in torch.split(targets, size):
        checkpoint()
        rows = retrieve_user(snapshot, user, block, options)
        weights = attend(
            target_queries(snapshot, user, block),
            keys,
            values,
            bias=bias[:, None],
            visible=None if rows is None else as_mask(rows, len(user.keys)),
            temperature=options.temperature,
            hard=options.hard,
        ).weights
        total += weights.mean(0).sum(0)
    return total / len(targets)


REFERENCE = 128  # items, evenly among all that are servable
_NEIGHBOURS = 50  # items of each kind, by which candidates are found
_EVENTS = 5_000  # of one item that are read, the newest


class AudienceScore(NamedTuple):
    """The score of an item for one user, and the level of the user's scores."""

    scores: Scores  # of the item alone
    reference: float  # log mean exp of the scores of the reference items


def reference_rows(snapshot: Snapshot) -> NDArray[np.int64]:
    """Return the reference items, evenly among the servable ones."""
    rows = np.flatnonzero(snapshot.catalogue.servable & snapshot.has_vector)
    return rows[np.linspace(0, len(rows) - 1, min(len(rows), REFERENCE)).astype(np.int64)]


@torch.inference_mode()
def audience_score(
    snapshot: Snapshot,
    user: UserMemory,
    row: int,
    reference: NDArray[np.int64],
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> AudienceScore:
    """Score an item for a user, and the reference items [R]."""
    own = score(snapshot, user, np.array([row]), options)
    totals = score(snapshot, user, reference, options).total.double()
    level = torch.logsumexp(totals, 0) - np.log(max(1, len(reference)))
    return AudienceScore(own, float(level) if len(reference) else 0.0)


def candidate_users(
    snapshot: Snapshot, log: EventLog, row: int, *, at: int, excluded: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """Return the numbers of users that are likely to be in the audience of the item at `row`.

    These are the users with most events, each item once, on its neighbours: items that are taken
    by the same users, by the cosine of their sets of users, and items of similar content, by the
    cosine of their embeddings.
    """
    users = np.unique(_newest(log.of_item(row), at).users)
    together = log.of_users(users)
    together = together.take(together.timestamps <= at)
    size = int(together.items.max(initial=row)) + 1
    pairs = np.unique(user_item_keys(together.users, together.items, size))
    of_items = np.bincount(pairs % size, minlength=size)
    of_items[row] = 0
    near = np.argsort(-of_items, kind="stable")[:_NEIGHBOURS]
    near = near[of_items[near] > 0]
    alike: dict[int, float] = {}
    if snapshot.catalogue.has_content[row]:
        servable = snapshot.catalogue.servable
        by_text = similar(snapshot, row, limit=_NEIGHBOURS, allowed=servable, spaces=("content",))
        cosines = (spaces["content"].cosine for spaces in by_text.spaces)
        alike = dict(zip(by_text.rows.tolist(), cosines, strict=True))
    takers, worth = [np.zeros(0, np.int64)], [np.zeros(0)]
    for other in {*near.tolist(), *alike}:
        of_other = np.unique(_newest(log.of_item(other), at).users).astype(np.int64)
        if not len(of_other):
            continue
        cosine = max(0.0, alike.get(other, 0.0))
        if other < size:
            cosine += float(of_items[other]) / (max(1, len(users)) * len(of_other)) ** 0.5
        takers.append(of_other)
        worth.append(np.full(len(of_other), cosine))
    numbers, place = np.unique(np.concatenate(takers), return_inverse=True)
    total = np.bincount(place, np.concatenate(worth), minlength=len(numbers))
    total[np.isin(numbers, excluded)] = 0.0
    best = np.argsort(-total, kind="stable")[:count]
    return numbers[best[total[best] > 0]]


def _newest(events: LoggedEvents, at: int) -> LoggedEvents:
    events = events.take(events.timestamps <= at)
    if len(events.users) <= _EVENTS:
        return events
    return events.take(np.argpartition(-events.timestamps, _EVENTS)[:_EVENTS])


class BecauseRow(NamedTuple):
    """Items that one item of the history raises most."""

    cause: int  # place of that item
    targets: NDArray[np.int64]  # places of the recommended items, best first


def because_rows(
    gains: NDArray[np.float64],
    *,
    count: int,
    limit: int,
    least: int,
    choose: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
) -> list[BecauseRow]:
    """Choose rows and their causes greedily, so that no target is in two rows.

    Each step takes the cause whose `limit` largest gains, over the remaining targets, sum to most.

    Args:
        gains: [T, C] what each cause contributes to the score of each target, best target first; at
            most 0 = not a cause of it.
        count: the most rows.
        limit: the most targets of a row.
        least: the fewest targets of a row.
        choose: returns at most `limit` of ordered targets that may be in one row; None = the first.
    """
    left = np.clip(gains, 0.0, None)
    rows: list[BecauseRow] = []
    while len(rows) < count and left.size:
        largest = -np.sort(-left, axis=0)[:limit]  # (≤ limit, C)
        sums = largest.sum(0) * ((left > 0).sum(0) >= least)
        cause = int(sums.argmax())
        if sums[cause] <= 0:
            break
        order = np.argsort(-left[:, cause], kind="stable")
        order = order[left[order, cause] > 0]
        targets = np.sort(order[:limit] if choose is None else choose(order))
        left[:, cause] = 0.0
        if len(targets) >= least:
            rows.append(BecauseRow(cause, targets))
            left[targets] = 0.0
    return rows


def distinctive_categories(catalogue: Catalogue, rows: Iterable[int], limit: int) -> list[str]:
    """Return the categories that are more frequent among some items than in the catalogue.

    They are ordered by p log (p / q), their terms of the Kullback-Leibler divergence, p being the
    share of these items that have the category and q that of all items; ties by name. `rows` has
    each item as often as it counts.
    """
    counts = Counter(rows)
    items, total = np.array(sorted(counts), np.int64), sum(counts.values())
    column = catalogue.fields.columns_of("categories").keywords
    if column is None:
        return []
    weights: Counter[str] = Counter()
    for place, value in values_of_rows(catalogue.fields, "categories", items):
        if isinstance(value, str):
            weights[value] += counts[int(items[place])]
    every = max(1, int(np.count_nonzero(catalogue.present)))
    terms = {}
    for value, count in weights.items():
        share, of_all = count / total, column.counts.array[column.code(value)] / every
        if share > of_all:
            terms[value] = share * log(share / of_all)
    return sorted(terms, key=lambda value: (-terms[value], value))[:limit]
