"""Search as attention: the text is the query, the fields of items are the keys, items the values.

    logit(query, key) = (μ · cos(query, key) + l · BM25(query, item) / max) / τ + b_field - log m
    weight(item) = Σ over its keys of softmax(logit)

so that an item which matches in two fields gathers both. Two heads read a query: one compares its
embedding with each key, one ranks the items by BM25, and their scores add up. A key that m items
share (a category that is all a field says) is one key with m values: its weight is split among
them. At μ = 0, b_field - log m is -log of the number of the item's keys, so that words alone rank.
Keywords that match, such as stock codes, are keys of their own: see `keyword_matches`.

When a history is searched, its events are the values, and newer ones weigh a little more:

    score(event) = match(item) + recency(event)
    recency(event) = R / (1 + age / A) / temperature
    weight(event) = softmax of the scores over all events

The match is the score of the item, log Σ exp(logit) over its keys, among the items of the history.
An item's keys carry log Σ exp(recency) over its events, so that the softmax over keys is the one
over events. Recency falls from R towards 0 and is R / 2 at the age A; R is worth .03 in cosine. It
decides between events on one item, and between matches that are nearly equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import attend
from models.attention.partial_softmax import mass_from_sample
from models.catalogue.snapshot import Snapshot
from models.data.vocabulary import RowIndices
from models.ranking.lineup import SteeredRows, line_up_scored
from models.ranking.matches import FieldMatches, SearchResults, keyword_scores, with_keywords
from models.ranking.scoring import Scores
from models.ranking.steering import NO_STEERING, ItemSteering

RECENCY = 0.5  # R, in logits: a match of 1.65 times the weight is better whatever its age
MATCH_SHARE = 1e-3  # of the best item's weight, from which an item without these words matches
HALVED = 30 * 86_400 * 1_000_000  # A, in microseconds


@dataclass(frozen=True, slots=True, eq=False)
class EventResults:
    """Events on items that match, best first; of those that tie, the newest first."""

    events: RowIndices  # [L] places of the events
    items: SearchResults
    places: NDArray[np.int64]  # [L] of each event's item among those
    match: NDArray[np.float64]  # [L] score of its item
    recency: NDArray[np.float64]  # [L]
    weights: NDArray[np.float64]  # [L] shares of the softmax over all events


@torch.inference_mode()
def nearest(matches: FieldMatches, count: int) -> RowIndices:
    """Return the items [≤ count] that match best by text alone, at the parameters' temperature."""
    temperature = matches.parameters.temperature
    _, _, gathered = _weigh(matches, None, temperature, hard=False)
    return matches.items[_largest(gathered, count)]


@torch.inference_mode()
def strong_matches(matches: FieldMatches, min_score: float | None = None) -> RowIndices:
    """Return the items that match by the floor of `search`, ascending, and all with keywords."""
    temperature = matches.parameters.temperature * matches.options.temperature
    bias, _, gathered = _weigh(matches, None, temperature, hard=matches.options.hard)
    total = np.float32(torch.logsumexp((matches.cosines + bias)[0] / temperature, 0))
    heavy = np.flatnonzero(_relevant(matches, gathered, total, min_score) & (gathered > 0))
    return np.union1d(matches.items.take(heavy), matches.keywords.rows)


@torch.inference_mode()
def search(
    matches: FieldMatches,
    *,
    limit: int,
    personal: NDArray[np.float32] | None = None,
    steering: ItemSteering = NO_STEERING,
    fill: bool = True,
    min_score: float | None = None,
) -> SearchResults:
    """Rank the items by the weight that their keys gather.

    Args:
        matches: from `match_fields`.
        limit: the most items.
        personal: [N], logits that the requester's memory adds to each item's keys.
        steering: moves the items that were compared; its pins are always returned.
        fill: return also items that do not match: they share no word with the query, and weigh less
            than `MATCH_SHARE` of the best item's weight.
        min_score: without `fill`, the least score without the memory, in place of that.
    """
    temperature = matches.parameters.temperature * matches.options.temperature
    bias, weights, gathered = _weigh(matches, personal, temperature, hard=matches.options.hard)
    scores = matches.cosines + bias
    # Over the sum of exponentials, a weight is comparable between queries.
    total = np.float32(torch.logsumexp(scores[0] / temperature, 0))
    if not fill:
        plain = gathered if personal is None else gathered * np.exp(-personal[matches.items])
        gathered = np.where(_relevant(matches, plain, total, min_score), gathered, 0)
    mass = _mass(matches, personal, scores, temperature)
    if steering is NO_STEERING:
        order = _largest(gathered, limit)
        found = _results(matches, order, weights, gathered, personal, total, mass)
        return take(with_keywords(found, matches, float(total)), range(limit))
    heavy = np.flatnonzero(gathered > 0)
    rows, ranked = keyword_scores(matches, matches.items[heavy], np.log(gathered[heavy]) + total)
    fields, steering = matches.catalogue.fields, steering.scaled(ranked)
    lineup = line_up_scored(fields, rows, ranked, steering, limit=limit)
    order = heavy[np.isin(matches.items[heavy], lineup.rows)]
    found = _results(matches, order, weights, gathered, personal, total, mass)
    found = _lined_up(with_keywords(found, matches, float(total)), lineup)
    return replace(found, boosts=steering.boosts_of(found.rows))


def recency(ages: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return what events of these ages, in microseconds, add to their scores at temperature 1."""
    return RECENCY / (1 + np.maximum(ages, 0) / HALVED)


def search_events(
    matches: FieldMatches,
    rows: NDArray[np.integer],
    ages: NDArray[np.int64],
    *,
    limit: int,
    fill: bool = True,
    min_score: float | None = None,
) -> EventResults:
    """Rank events by how well their items match, and by their age.

    The items of the events are allowed in `matches`. `rows` are the item rows of the events [n],
    oldest first, `ages` their ages in microseconds. Hard attention leaves one event.
    """
    fresh = recency(ages) / matches.options.temperature
    size = len(matches.catalogue)
    newest = np.zeros(size)
    np.maximum.at(newest, rows, fresh)
    prior, boost = newest.astype(np.float32), np.zeros(size, np.float32)
    if matches.options.hard:
        limit = 1
    else:
        prior[rows] = np.log(np.bincount(rows, np.exp(fresh), size)[rows])
        boost[rows] = newest[rows] - prior[rows]
    # The items of the best events are those that are best by their newest event.
    items = search(
        replace(matches, prior=prior),
        limit=limit,
        steering=ItemSteering(boost),
        fill=fill,
        min_score=min_score,
    )
    is_found = np.zeros(size, np.bool_)
    is_found[items.rows] = True
    events = np.flatnonzero(is_found[rows])
    order = np.argsort(items.rows)
    places = order[np.searchsorted(items.rows, rows[events], sorter=order)]
    match = (items.scores.astype(np.float64) - prior[items.rows])[places]
    best = np.lexsort((-events, -(match + fresh[events])))[:limit]
    events, places, match = events[best], places[best], match[best]
    weights = items.weights[places] * np.exp(fresh[events] - prior[rows[events]])
    return EventResults(events, items, places, match, fresh[events], weights)


def _results(
    matches: FieldMatches,
    order: NDArray[np.int64],
    weights: NDArray[np.float32],
    gathered: NDArray[np.float32],
    personal: NDArray[np.float32] | None,
    total: np.float32,
    mass: float,
) -> SearchResults:
    """Make the results of places [L] in `matches.items` only by their field keys.

    `weights` are of all keys [K], `gathered` of all items [I], above 0 at these places.
    """
    catalogue, rows = matches.catalogue, matches.items[order]
    matched = [defaultdict[str, float](float) for _ in order]
    keys, number = catalogue.keys.positions_of(rows)  # all keys of an item
    shares = weights[np.searchsorted(matches.places, keys)] / gathered[order][number]
    names, codes = catalogue.keys.names, catalogue.keys.codes[keys]
    for item, code, part in zip(number.tolist(), codes.tolist(), shares.tolist(), strict=True):
        if part > 0:
            matched[item][names[code]] += part
    return SearchResults(
        rows=rows,
        weights=gathered[order],
        scores=np.log(gathered[order]) + total,
        matched=tuple(dict(sorted(each.items(), key=lambda pair: -pair[1])) for each in matched),
        mode=matches.mode,
        keys=matches.attended,
        mass=mass,
        personal=None if personal is None else personal[rows],
    )


def take(found: SearchResults, places: Iterable[int]) -> SearchResults:
    """Return the results at some places, as far as they exist."""
    at = [place for place in places if place < len(found.rows)]
    if len(at) == len(found.rows):
        return found
    return replace(
        found,
        rows=found.rows[at],
        weights=found.weights[at],
        scores=found.scores[at],
        matched=tuple(found.matched[place] for place in at),
        personal=None if found.personal is None else found.personal[at],
        moved=tuple(found.moved[place] for place in at) if found.moved else (),
        boosts=None if found.boosts is None else found.boosts[at],
    )


def _lined_up(found: SearchResults, lineup: SteeredRows) -> SearchResults:
    """Return results in the order of a line-up; other rows were not compared."""
    place_of = {row: place for place, row in enumerate(found.rows.tolist())}
    at = np.array([place_of.get(row, -1) for row in lineup.rows.tolist()], np.int64)
    was_compared = at >= 0

    def numbers(values: NDArray[np.float32], missing: float) -> NDArray[np.float32]:
        chosen = np.full(len(at), missing, np.float32)
        chosen[was_compared] = values[at[was_compared]]
        return chosen

    return replace(
        found,
        rows=lineup.rows,
        weights=numbers(found.weights, 0.0),
        scores=numbers(found.scores, -np.inf),
        matched=tuple(found.matched[place] if place >= 0 else {} for place in at.tolist()),
        personal=None if found.personal is None else numbers(found.personal, 0.0),
        moved=lineup.moved,
    )


def personal_bias(
    snapshot: Snapshot, scores: Scores, rows: RowIndices, weight: float
) -> NDArray[np.float32]:
    """Return the logits [N] that a memory adds to items: its standardised scores of rows [P].

    `weight` is in logits of one standard deviation. Other items get 0, the mean.
    """
    bias = np.zeros(len(snapshot.catalogue), dtype=np.float32)
    total = scores.total.numpy()
    if len(total) > 1 and float(total.std()) > 0:
        bias[rows] = weight * (total - total.mean()) / total.std()
    return bias


def _weigh(
    matches: FieldMatches, personal: NDArray[np.float32] | None, temperature: float, *, hard: bool
) -> tuple[Tensor, NDArray[np.float32], NDArray[np.float32]]:
    """Return the biases of the keys [1, K], the softmax over them [K], each item's weight [I]."""
    bias = matches.offset + matches.bias(matches.places, personal, temperature)
    attended = attend(
        matches.query,
        matches.keys,
        # The items themselves are the values: only the weights are needed.
        matches.keys.new_zeros(len(matches.keys), 0),
        bias=bias,
        score=lambda _query, _keys: matches.cosines.clone(),  # `attend` writes over it
        temperature=temperature,
        hard=hard,
    )
    weights = attended.weights[0].numpy()
    gathered = np.zeros(len(matches.items), dtype=np.float32)
    np.add.at(gathered, matches.item_of, weights)
    return bias, weights, gathered


def _relevant(
    matches: FieldMatches,
    gathered: NDArray[np.float32],
    total: np.float32,
    min_score: float | None,
) -> NDArray[np.bool_]:
    """Return which items [I] match, by the weight of each without a memory [I]."""
    if min_score is not None:
        least = np.exp(min(min_score - float(total), 1.0))  # no weight is over 1
        return np.asarray(gathered >= least)
    share = MATCH_SHARE ** (1 / matches.options.temperature)  # the same matches at any temperature
    relevant: NDArray[np.bool_] = np.greater_equal(gathered, share * gathered.max(initial=0))
    relevant[matches.item_of[matches.bm25[0].numpy() > 0]] = True
    return relevant


def _largest(gathered: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the places [≤ count] of the items of most weight, of each item's weight [I]."""
    rank = -gathered
    if count < len(rank):  # all that tie with the last one, of which the first rows are taken
        best = np.flatnonzero(rank <= np.partition(rank, count - 1)[count - 1])
    else:
        best = np.arange(len(rank))
    order = best[np.argsort(rank[best], kind="stable")][:count]
    return order[gathered[order] > 0]


def _mass(
    matches: FieldMatches,
    personal: NDArray[np.float32] | None,
    attended: Tensor,
    temperature: float,
) -> float:
    """Return the share of the softmax over all allowed keys that attended scores [1, K] have."""
    count = matches.attended
    rest = matches.allowed_count - count
    if not count or rest <= 0:
        return 1.0
    sample, others = matches.sample_others()
    others = others + matches.bias(sample, personal, temperature)
    share = mass_from_sample(
        attended[None],
        others[None],
        torch.tensor([[rest]]),
        temperature=temperature,
        hard=matches.options.hard,
    )
    return float(share)
