"""Affinities: the attention and the scores of a user by the values of a field."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions, attend
from models.catalogue.facets import FacetValue, values_of_rows
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint
from models.history.user_memory import UserMemory, retrieve_user, target_queries
from models.index.memory_attention import as_mask
from models.ranking.scoring import Scores, score

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
    counts for each of them. Scores are of all servable items, or of some of many, at least
    `SCORED`, and are returned beside.

    Args:
        user: from `build_memory` with the same snapshot, every event a row.
        field: of the catalogue, other than `item_id`.
        limit: the most values.
        options: the softmax.
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
    # Hidden and deleted items are nowhere: their values would tell of them.
    shown = np.append(snapshot.catalogue.servable, np.False_)  # the last is that of row -1
    on_items = np.flatnonzero(shown[rows] & (weights > 0))
    own, place = np.unique(rows[on_items], return_inverse=True)
    mass = np.bincount(place, weights[on_items], minlength=len(own))
    counts = np.bincount(place, minlength=len(own))
    found: dict[FacetValue, tuple[float, int]] = {}
    for at, value in values_of_rows(snapshot.catalogue.fields, field, own):
        so_far, count = found.get(value, (0.0, 0))
        found[value] = so_far + float(mass[at]), count + int(counts[at])
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
        for value, (total, count) in found.items()
    ]
    return sorted(every, key=lambda each: (-each.mass, str(each.value)))[:limit], scores


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
            visible=None if rows is None else as_mask(rows, len(user.memory)),
            temperature=options.temperature,
            hard=options.hard,
        ).weights
        total += weights.mean(0).sum(0)
    return total / len(targets)
