"""Search as attention: the text is the query, the fields of items are the keys, items the values.

    logit(query, key) = (μ · cos(query, key) + l · BM25(query, item) / max) / τ + b_field - log m
    weight(item) = Σ over its keys of softmax(logit)

so that an item which matches in two fields gathers both. Two heads read a query: one compares its
embedding with each key, one ranks the items by BM25, and their scores add up. A key that m items
share (a category that is all a field says) is one key with m values: its weight is split among
them. At μ = 0, b_field - log m is -log of the number of the item's keys, so that words alone rank.
Keywords that match, such as stock codes, are keys of their own: see `keyword_matches`.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import attend
from models.attention.softmax_mass import mass_from_sample
from models.catalogue.snapshot import Snapshot
from models.data.row_sets import RowIndices
from models.ranking.matching.field_matches import FieldMatches
from models.ranking.matching.keyword_matches import with_keywords
from models.ranking.matching.search_results import SearchResults
from models.ranking.scoring import Scores


@torch.inference_mode()
def nearest(matches: FieldMatches, count: int) -> RowIndices:
    """Return the items [≤ count] that match best by text alone, at the parameters' temperature."""
    temperature = matches.parameters.temperature
    bias = matches.offset + matches.bias(matches.places, None, temperature)
    weights = _softmax(matches, bias, temperature, hard=False)
    return matches.items[_top_items(matches, weights, count)[0]]


@torch.inference_mode()
def strong_matches(matches: FieldMatches, share: float) -> RowIndices:
    """Return the items that weigh at least a share of the heaviest by their texts, ascending.

    Items whose keywords match are always among them.
    """
    temperature = matches.parameters.temperature
    bias = matches.offset + matches.bias(matches.places, None, temperature)
    weights = _softmax(matches, bias, temperature, hard=False)
    gathered = _gathered(matches, weights)
    heavy = np.flatnonzero((gathered > 0) & (gathered >= share * gathered.max(initial=0)))
    return np.union1d(matches.items.take(heavy), matches.keywords.rows)


@torch.inference_mode()
def search(
    matches: FieldMatches, *, limit: int, personal: NDArray[np.float32] | None = None
) -> SearchResults:
    """Rank the items by the weight that their keys gather.

    Args:
        matches: from `match_fields`.
        limit: the most items.
        personal: [N], logits that the requester's memory adds to each item's keys.
    """
    catalogue, places = matches.catalogue, matches.places
    temperature = matches.parameters.temperature * matches.options.temperature
    bias = matches.offset + matches.bias(places, personal, temperature)
    weights = _softmax(matches, bias, temperature, hard=matches.options.hard)
    order, gathered = _top_items(matches, weights, limit)
    matched = [defaultdict[str, float](float) for _ in order]
    own, number = catalogue.keys.positions_of(matches.items[order])  # all keys of an item
    at = np.searchsorted(places, own)
    shares = weights[at] / gathered[order][number]
    names, codes = catalogue.keys.names, catalogue.keys.codes[own]
    for item, code, part in zip(number.tolist(), codes.tolist(), shares.tolist(), strict=True):
        if part > 0:
            matched[item][names[code]] += part
    # Over the sum of exponentials, a weight is comparable between queries.
    scores = matches.cosines + bias
    total = np.float32(torch.logsumexp(scores[0] / temperature, 0))
    found = SearchResults(
        matches.items[order],
        gathered[order],
        np.log(gathered[order]) + total,
        tuple(dict(sorted(each.items(), key=lambda pair: -pair[1])) for each in matched),
        matches.mode,
        matches.attended,
        _mass(matches, personal, scores, temperature),
    )
    return with_keywords(found, matches, limit)


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


def _softmax(
    matches: FieldMatches, bias: Tensor, temperature: float, *, hard: bool
) -> NDArray[np.float32]:
    """Return the softmax [K] over the attended keys."""
    found = attend(
        matches.query,
        matches.keys,
        # The items themselves are the values: only the weights are needed.
        matches.keys.new_zeros(len(matches.keys), 0),
        bias=bias,
        score=lambda _query, _keys: matches.cosines.clone(),  # `attend` writes over it
        temperature=temperature,
        hard=hard,
    )
    return found.weights[0].numpy()


def _top_items(
    matches: FieldMatches, weights: NDArray[np.float32], count: int
) -> tuple[RowIndices, NDArray[np.float32]]:
    """Return the places [≤ count] of the items of most weight, and every item's weight [I]."""
    gathered = _gathered(matches, weights)
    rank = -gathered
    if count < len(rank):  # all that tie with the last one, of which the first rows are taken
        best = np.flatnonzero(rank <= np.partition(rank, count - 1)[count - 1])
    else:
        best = np.arange(len(rank))
    order = best[np.argsort(rank[best], kind="stable")][:count]
    return order[gathered[order] > 0], gathered


def _gathered(matches: FieldMatches, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weight of each item [I]."""
    gathered = np.zeros(len(matches.items), dtype=np.float32)
    np.add.at(gathered, matches.item_of, weights)
    return gathered


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
