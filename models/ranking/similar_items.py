"""Similar items by attention: the item is the query, every other item has a key in each space.

    logit(item, key) = e (cos(item, key) - mean) / std      of its space, over the servable items
    weight(other) = Σ over its keys of softmax(logit)        score(other) = log Σ exp(logit)

so that an item that is near in both spaces gathers both. Cosines of different spaces have different
scales; in standard deviations above the mean of its space, a key of one competes with the keys of
the other on equal terms.

A trained vector says no more than the events that it was learned from. Where content is compared
too, the trained space counts by the evidence of both items, e = √(r_a r_b) with r = n / (n + 20)
for an item of n training events: the reliability of a mean of n observations whose noise has 20
times the variance of what they tell.

The content space then counts by what it tells of the items that users take: over pairs of an item
and those that most often follow it in the log, each pair a logit z of e = 1,

    e = (20 + Σ z of the content space) / (20 + Σ z of the trained space),  at most 1.

Titles drawn at random tell nothing, and do not outweigh what is learned from events.

With `coarse`, FAISS names the k keys of each space with the largest cosines, and the softmax is
over these. Means and deviations are still those of all keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import normalize

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.index.ann_index import normalize_rows
from models.ranking.lineup import Moved, line_up_scored
from models.ranking.steering import NO_STEERING, ItemSteering

Space = Literal["content", "trained"]
SPACES: tuple[Space, ...] = ("content", "trained")
_PRIOR_EVENTS = 20  # training events at which a trained vector counts half
_PRIOR_PAIRS = 20.0  # pairs that are added, at one deviation in both spaces
_SAMPLE = 500  # items whose followers weigh the content space, and others that they compare with
_FOLLOWERS = 10  # of each item
_TINY = 1e-12  # least length of a vector that is divided by it
_ALIKE = 1e-6  # standard deviation of cosines below which a space tells no item from another


@dataclass(frozen=True, slots=True, eq=False)
class SpaceMatch:
    cosine: float
    share: float  # of the weight that the item gathers over its keys


@dataclass(frozen=True, slots=True, eq=False)
class SimilarItems:
    rows: NDArray[np.int64]  # [L]
    scores: NDArray[np.float32]  # [L] without boosts
    weights: NDArray[np.float32]  # [L] share of the softmax over the attended keys
    spaces: tuple[Mapping[Space, SpaceMatch], ...]  # [L] those in which the item has a key
    moved: tuple[Moved | None, ...]  # [L] why an item does not stand where its score puts it
    keys: int  # that were attended
    mass: float  # share of the softmax over the keys of all allowed items that these hold
    boosts: NDArray[np.float32] | None = None  # [L] added to the scores; None without any


@dataclass(frozen=True, slots=True, eq=False)
class ComparedItems:
    """Similarities of one item to M others, in no order."""

    rows: NDArray[np.int64]  # [M] ascending
    scores: NDArray[np.float32]  # [M]
    spaces: tuple[Space, ...]  # [S]
    _logits: Tensor  # [S, M] -inf where an item's key is not attended
    _cosines: Tensor  # [S, M]
    mass: float = 1.0  # as in `SimilarItems`

    def among(self, rows: Sequence[NDArray[np.int64]]) -> ComparedItems:
        """Return the items whose keys are among some rows of each space [S], which are attended."""
        missing = np.stack([~np.isin(self.rows, of_space) for of_space in rows])
        logits = self._logits.masked_fill(torch.from_numpy(missing), -torch.inf)
        held = (logits > -torch.inf).any(0)
        mass = torch.logsumexp(logits.flatten(), 0) - torch.logsumexp(self._logits.flatten(), 0)
        return ComparedItems(
            self.rows[held.numpy()],
            torch.logsumexp(logits[:, held], 0).numpy(),
            self.spaces,
            logits[:, held],
            self._cosines[:, held],
            float(mass.exp()),
        )

    def cosines_in(self, space: Space) -> NDArray[np.float32]:
        cosines: NDArray[np.float32] = self._cosines[self.spaces.index(space)].numpy()
        return cosines

    def take(
        self, places: NDArray[np.int64], moved: tuple[Moved | None, ...] | None = None
    ) -> SimilarItems:
        """Return some of the items, by places [L], with their weights among all."""
        top = torch.from_numpy(places)
        logits = self._logits[:, top]
        weights = torch.softmax(self._logits.flatten(), 0).reshape(self._logits.shape).sum(0)
        # By the softmax over the item's own keys, which does not underflow where its weight does.
        columns = zip(
            self._cosines[:, top].T.tolist(),
            torch.softmax(logits, 0).T.tolist(),
            logits.T.tolist(),
            strict=True,
        )
        return SimilarItems(
            self.rows[places],
            self.scores[places],
            weights[top].numpy(),
            tuple(
                {
                    space: SpaceMatch(cosine, share)
                    for space, cosine, share, logit in zip(self.spaces, *of_item, strict=True)
                    if logit > -np.inf
                }
                for of_item in columns
            ),
            (None,) * len(places) if moved is None else moved,
            int((self._logits > -torch.inf).sum()),
            self.mass,
        )


def spaces_of(snapshot: Snapshot, row: int) -> tuple[Space, ...]:
    """Return the spaces in which an item has a key.

    The key in `content` is the embedding of its texts, or the one that was stored with it. The key
    in `trained` is the item's vector in the model, made of text and events. An item that was not in
    training has none, since its vector would be made only of its text.
    """
    return tuple(space for space in SPACES if _there(snapshot, space)[row])


def similar(
    snapshot: Snapshot,
    row: int,
    *,
    limit: int,
    allowed: NDArray[np.bool_],
    spaces: Sequence[Space] = SPACES,
    steering: ItemSteering = NO_STEERING,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> SimilarItems:
    """Rank the allowed items [N] by their similarity to the one at `row`, which is not ranked.

    Spaces in which the item has no key are skipped. Pins of `steering` must be comparable; their
    keys are always attended. Every key is, unless the mode of `options` is `coarse`.
    """
    compared = compare_items(snapshot, row, allowed=allowed, spaces=spaces)
    steering = steering.scaled(compared.scores)
    if options.mode == "coarse" and len(compared.rows):
        near = [_nearest(snapshot, space, row, allowed, options) for space in compared.spaces]
        compared = compared.among([np.union1d(rows, steering.pinned) for rows in near])
    if steering is NO_STEERING:
        order = np.argsort(-compared.scores, kind="stable")
        return compared.take(order[:limit])
    lineup = line_up_scored(
        snapshot.catalogue.fields, compared.rows, compared.scores, steering, limit=limit
    )
    found = compared.take(np.searchsorted(compared.rows, lineup.rows), lineup.moved)
    return replace(found, boosts=steering.boosts_of(found.rows))


@torch.inference_mode()
def compare_items(
    snapshot: Snapshot,
    row: int,
    *,
    allowed: NDArray[np.bool_],
    spaces: Sequence[Space] = SPACES,
) -> ComparedItems:
    """Compare the item at `row` with the others among the allowed [N]."""
    used = tuple(space for space in spaces_of(snapshot, row) if space in spaces)
    mixed = len(used) > 1
    others = snapshot.catalogue.servable.copy()
    others[row] = False
    cosines, levels = [], []
    for space in used:
        there = _there(snapshot, space)
        cosines.append(_cosines(snapshot, space, row))
        level = _standard(cosines[-1], torch.from_numpy(there & others))
        if mixed:
            level = level * _evidence(snapshot, space, row)
        levels.append(level.masked_fill(torch.from_numpy(~there), -torch.inf))
    rows = np.flatnonzero(comparable(snapshot, row, allowed, used))
    if not len(rows):
        none = torch.zeros(len(used), 0)
        return ComparedItems(rows, np.zeros(0, np.float32), used, none, none)
    at = torch.from_numpy(rows)
    logits = torch.stack(levels)[:, at]
    scores = torch.logsumexp(logits, 0).numpy()
    return ComparedItems(rows, scores, used, logits, torch.stack(cosines)[:, at])


def _nearest(
    snapshot: Snapshot,
    space: Space,
    row: int,
    allowed: NDArray[np.bool_],
    options: AttentionOptions,
) -> NDArray[np.int64]:
    """Return the rows [≤ k] of the allowed items whose keys FAISS finds nearest in a space."""
    k = options.rows_kept
    every = np.flatnonzero(_offered(snapshot, (space,)))
    index = snapshot.kept_index(space, options.probes, partial(_unit, snapshot, space, every))
    # The item itself is found too, and left out: if all others are allowed, FAISS looks at none.
    offered = allowed[every] | (every == row)
    query = _unit(snapshot, space, np.array([row]))
    allow = None if offered.all() else offered
    near = index.search(query, k + 1, allow=allow, probes=options.probes)[0]
    rows: NDArray[np.int64] = every[near[near >= 0]]
    others: NDArray[np.int64] = rows[rows != row][:k]
    return others


def comparable(
    snapshot: Snapshot, row: int, allowed: NDArray[np.bool_], spaces: Sequence[Space]
) -> NDArray[np.bool_]:
    """Mark the allowed items [N] that have a key in one of the spaces, except the one at `row`.

    Items without a title and any text but tags and categories are left out, unless no item has one.
    """
    found = allowed & _offered(snapshot, spaces)
    found[row] = False
    return found


def _offered(snapshot: Snapshot, spaces: Sequence[Space]) -> NDArray[np.bool_]:
    """Mark the items [N] that are comparable to any item."""
    has_key = np.zeros(len(snapshot.catalogue), np.bool_)
    for space in spaces:
        has_key |= _there(snapshot, space)
    servable = snapshot.catalogue.servable
    named = snapshot.catalogue.is_named & servable
    return has_key & (named if named.any() else servable)


def _there(snapshot: Snapshot, space: Space) -> NDArray[np.bool_]:
    if space == "content":
        return snapshot.catalogue.has_content
    return (snapshot.trained_rows >= 0).numpy()


def _evidence(snapshot: Snapshot, space: Space, row: int) -> Tensor | float:
    """Return how much the keys of an item and of each other one say, in [0, 1], [N]."""
    if space == "content":
        return snapshot.kept_number("content evidence", partial(_content_evidence, snapshot))
    events = torch.zeros(len(snapshot.trained_rows), dtype=torch.float64)
    if snapshot.trained is not None:
        known = snapshot.trained_rows >= 0
        counts = torch.from_numpy(snapshot.trained.item_counts).double()
        events[known] = counts[snapshot.trained_rows[known]]
    reliability = events / (events + _PRIOR_EVENTS)
    return (reliability * reliability[row]).sqrt().float()


def _content_evidence(snapshot: Snapshot) -> float:
    """Return how much content tells of what is taken together, by the model's transition counts.

    The pairs are of the items with the most training events. All samples are in the model's order
    of its items, so that every process finds the same.
    """
    model, rows = snapshot.model, snapshot.item_rows
    both = snapshot.catalogue.has_content[rows] & snapshot.catalogue.servable[rows]
    known = np.flatnonzero(both)
    if snapshot.trained is None or not model.has_transitions or len(known) < 2:
        return 1.0
    events = -snapshot.trained.item_counts[known]
    sources = known[np.argpartition(events, min(_SAMPLE, len(known) - 1))[:_SAMPLE]]
    others = known[np.linspace(0, len(known) - 1, min(_SAMPLE, len(known))).round().astype(int)]
    counted = model.statistics.transition_counts
    followers = counted.items[sources, :_FOLLOWERS].numpy()
    place = np.minimum(followers, len(both) - 1)  # an empty place has no item
    follows = (counted.counts[sources, :_FOLLOWERS] > 0).numpy() & both[place]
    apart = torch.from_numpy(sources[:, None] != others)
    sums = []
    for space in SPACES:
        source, other, follower = (
            torch.from_numpy(_unit(snapshot, space, rows[of].ravel()))
            for of in (sources, others, place)
        )
        cosines = (source @ other.T).double()
        mean = (cosines * apart).sum(1) / apart.sum(1)
        variance = ((cosines - mean[:, None]).square() * apart).sum(1) / apart.sum(1)
        near = (follower.reshape(*place.shape, -1) @ source[:, :, None])[..., 0].double()
        z = (near - mean[:, None]) / variance.sqrt()[:, None]
        told = torch.from_numpy(follows) & (variance.sqrt() >= _ALIKE)[:, None]
        sums.append(max(0.0, float(z[told].sum())))
    content, trained = sums
    return min(1.0, (_PRIOR_PAIRS + content) / (_PRIOR_PAIRS + trained))


def _cosines(snapshot: Snapshot, space: Space, row: int) -> Tensor:
    """Return the cosines of all items [N] with one, in a space."""
    if space == "content":
        keys = torch.from_numpy(snapshot.catalogue.content)
        return keys @ keys[row]
    vectors = snapshot.tables.vectors
    # The products are scaled instead of the vectors, which are gigabytes for many items.
    lengths: Tensor = vector_norm(vectors, dim=1)
    return (vectors @ normalize(vectors[row], dim=0)) / lengths.clamp(min=_TINY)


def _unit(snapshot: Snapshot, space: Space, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    if space == "content":
        content = snapshot.catalogue.content
        every = len(rows) == len(content) and np.array_equal(rows, np.arange(len(rows)))
        return content if every else content[rows]  # an index shares its keys
    return normalize_rows(snapshot.tables.vectors[torch.from_numpy(rows)].numpy())


def _standard(cosines: Tensor, of: Tensor) -> Tensor:
    """Standardise cosines [N] by mean and deviation of some of them [N]; 0 without deviation."""
    some = cosines[of].double()
    if not len(some) or float(some.std(correction=0)) < _ALIKE:
        return torch.zeros_like(cosines)
    return ((cosines - some.mean()) / some.std(correction=0)).float()
