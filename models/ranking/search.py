"""Search as attention: the text is the query, the fields of items are the keys, items the values.

    logit(query, key) = (cos(query, key) + l · BM25(query, item) / max) / τ + b_field - log m
    weight(item) = Σ over its keys of softmax(logit)

so that an item which matches in two fields gathers both. Two heads read a query: one compares what
it means with each key, one counts the words that it shares with an item, and their scores add up. A
key that m items share (a category that is all a field says) is one key with m values: its weight is
split among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import attend
from models.attention.softmax_mass import mass_from_sample
from models.catalogue.catalogue import Catalogue
from models.catalogue.snapshot import Snapshot
from models.data.row_sets import RowIndices, sorted_union
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.index.mips import normalize_rows
from models.ranking.scoring import Scores
from models.ranking.search_parameters import DEFAULTS, SearchParameters
from models.text.bm25 import Hits

COARSE_KEYS = 1_000  # field keys that the coarse step names where no `k` is asked for
_WIDE = 0.25  # share of open keys from which comparing all is faster than copying those out


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """A query beside the field keys it attends: compared once, however often they are weighed."""

    catalogue: Catalogue
    query: Tensor  # [1, D] of unit length
    open_keys: NDArray[np.bool_]  # [F] of what may be answered
    open_count: int  # how many of those are
    places: RowIndices  # [K] the keys that are compared, ascending; only open ones are attended
    keys: Tensor  # [K, D]
    lexical: NDArray[np.float32]  # [K] of the items behind the keys
    cosines: Tensor  # [1, K]
    beside: Tensor  # [1, K] what each score is more than the cosine: lexical, and by temperature
    items: RowIndices  # [I] rows of the items behind the keys, ascending
    item_of: RowIndices  # [K] the place of each key's item among them
    options: AttentionOptions
    mode: Literal["exact", "coarse"]
    parameters: SearchParameters


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Items that match, best first."""

    rows: RowIndices  # [L] item rows
    weights: NDArray[np.float32]  # [L] share of the softmax gathered over the item's keys
    scores: NDArray[np.float32]  # [L] log of the weight before normalising, plus any personal part
    matched: tuple[dict[str, float], ...]  # [L] each field's share of the item's weight
    mode: Literal["exact", "coarse"]
    keys: int  # that were attended
    mass: float  # share of the softmax over all open keys that these hold; estimated where many


@torch.inference_mode()
def match(
    snapshot: Snapshot,
    query: NDArray[np.float32],
    *,
    allowed: NDArray[np.bool_],
    options: AttentionOptions = DEFAULT_OPTIONS,
    hits: Hits | Callable[[], Hits] | None = None,
    parameters: SearchParameters = DEFAULTS,
) -> Matches:
    """Compare a query vector with the field keys that may matter.

    `exact` takes every key of the allowed items. `coarse` takes the `k` nearest ones (the index
    names them; without an index all are compared), keys newer than the index, what the words
    found, and the other keys of the same items, so that an item's fields share its weight. `auto`
    decides by how many keys the allowed items have.

    Args:
        snapshot: the catalogue.
        query: [D], of the catalogue's text encoder; a zero vector matches nothing.
        allowed: bool [N], what may be answered.
        options: the softmax, its temperature in units of the parameters', and how keys are found.
        hits: allowed items that have words of the query; or what waits for them, called once the
            nearest keys are known, so that both may be sought at the same time.
        parameters: what a match is worth.
    """
    catalogue, fields = snapshot.catalogue, snapshot.catalogue.keys
    asked = torch.from_numpy(normalize_rows(query[None]))
    open_keys = fields.mask(allowed)
    count = int(np.count_nonzero(open_keys))
    mode = options.resolve_mode(count)
    near = np.zeros(0, np.int64)
    if mode == "coarse" and np.any(query):
        near = fields.owners[_near(snapshot, asked, open_keys, count, options)].astype(np.int64)
    shared, worth = _shared(hits() if callable(hits) else hits, parameters)
    everything = mode == "exact" and bool(np.any(query)) and count > _WIDE * len(open_keys)
    if everything:
        # Keys that are nobody's are not open: whose they are said to be makes no difference.
        items, places = np.arange(len(catalogue)), np.arange(len(open_keys))
        item_of = np.maximum(fields.owners, 0).astype(np.int64)
    else:
        if mode == "exact" and np.any(query):
            items = np.flatnonzero(allowed)
        else:
            items = sorted_union(shared, near) if len(near) else shared
        places, item_of = fields.positions_of(items)
        if np.any(np.diff(places) < 0):  # of items that changed
            order = np.argsort(places)
            places, item_of = places[order], item_of[order]
    keys = torch.from_numpy(fields.vectors if everything else fields.vectors[places])
    sharpness = _sharpness(catalogue, parameters)[fields.codes[places]]
    by_item = np.zeros(len(items), np.float32)
    if len(shared):
        at = np.minimum(np.searchsorted(items, shared), len(items) - 1)
        there = items[at] == shared
        by_item[at[there]] = worth[there]
    lexical = by_item[item_of]
    cosines = _of_units(asked, keys)
    return Matches(
        catalogue,
        asked,
        open_keys,
        count,
        places,
        keys,
        lexical,
        cosines,
        cosines * torch.from_numpy(sharpness - 1) + torch.from_numpy(lexical),
        items,
        item_of,
        options,
        mode,
        parameters,
    )


@torch.inference_mode()
def nearest(matches: Matches, count: int) -> RowIndices:
    """The items [≤ count] that match best by text alone, whatever is asked of the softmax."""
    scale = matches.parameters.temperature
    bias = matches.beside + _bias(matches, matches.places, None, scale)
    weights = _weigh(matches, bias, scale, hard=False)
    return matches.items[_best(matches, weights, count)[0]]


@torch.inference_mode()
def search(matches: Matches, *, limit: int, personal: NDArray[np.float32] | None = None) -> Found:
    """The items whose keys match, by the weight they gather.

    Args:
        matches: from `match`.
        limit: how many items.
        personal: [N], what the requester's memory adds to the logits of each item's keys.
    """
    catalogue, places = matches.catalogue, matches.places
    scale, bias, weights = _weights(matches, personal)
    order, gathered = _best(matches, weights, limit)
    matched: list[dict[str, float]] = [{} for _ in order]
    own, number = catalogue.keys.positions_of(
        matches.items[order]
    )  # all keys of an item are compared
    at = np.searchsorted(places, own)
    shares = weights[at] / gathered[order][number]
    names, codes = catalogue.keys.names, catalogue.keys.codes[own]
    for item, code, part in zip(number.tolist(), codes.tolist(), shares.tolist(), strict=True):
        if part > 0:
            share = matched[item]
            share[names[code]] = share.get(names[code], 0.0) + part
    matched = [dict(sorted(each.items(), key=lambda pair: -pair[1])) for each in matched]
    # Over the sum of exponentials, a weight is comparable between queries.
    total = np.float32(torch.logsumexp((matches.cosines + bias)[0] / scale, 0))
    return Found(
        matches.items[order],
        gathered[order],
        np.log(gathered[order]) + total,
        tuple(matched),
        matches.mode,
        int(np.count_nonzero(matches.open_keys[places])),
        _mass(matches, personal, matches.cosines + bias, scale),
    )


@torch.inference_mode()
def ranking(
    matches: Matches, *, limit: int, personal: NDArray[np.float32] | None = None
) -> RowIndices:
    """The rows [≤ limit] that `search` finds, without a word about them: in a fraction of its time.

    The arguments are those of `search`.
    """
    _, _, weights = _weights(matches, personal)
    return matches.items[_best(matches, weights, limit)[0]]


def personal_bias(
    snapshot: Snapshot, scores: Scores, rows: RowIndices, worth: float = 1.0
) -> NDArray[np.float32]:
    """What a memory adds to the logits of items found by text, [N]: its standardised scores.

    Args:
        snapshot: the catalogue.
        scores: of `rows`, from `score`.
        rows: item rows [P]; other items get 0, the mean.
        worth: logits of one standard deviation.
    """
    bias = np.zeros(len(snapshot.catalogue), dtype=np.float32)
    total = scores.total.numpy()
    if len(total) > 1 and float(total.std()) > 0:
        bias[rows] = worth * (total - total.mean()) / total.std()
    return bias


def _shared(
    hits: Hits | None, parameters: SearchParameters
) -> tuple[RowIndices, NDArray[np.float32]]:
    """Rows of items that share words with the query, rising, and what that is worth."""
    if hits is None or not len(hits.rows) or not parameters.lexical:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    order = np.argsort(hits.rows)
    worth = parameters.lexical * hits.scores / hits.scores.max()
    return hits.rows[order], worth[order].astype(np.float32)


def _near(
    snapshot: Snapshot,
    asked: Tensor,
    open_keys: NDArray[np.bool_],
    count: int,
    options: AttentionOptions,
) -> RowIndices:
    """The places of the `k` open keys nearest to a query [1, D], and of those newer than the index.

    Fewer where there are fewer, or where the probed part of the index holds fewer.
    """
    k = min(options.k or COARSE_KEYS, count)
    if k == 0:
        return np.zeros(0, np.int64)
    if snapshot.key_index is None:
        cosines = _of_units(asked, torch.from_numpy(snapshot.catalogue.keys.vectors))[0]
        cosines.masked_fill_(~torch.from_numpy(open_keys), -torch.inf)
        return torch.topk(cosines, k).indices.numpy()
    indexed = snapshot.indexed_keys
    # Where all are open, FAISS need not ask for each.
    allow = None if count == len(open_keys) else open_keys[:indexed]
    near = snapshot.key_index.search(asked.numpy(), k, allow=allow, probes=options.probes).rows[0]
    fresh = np.flatnonzero(open_keys[indexed:]) + indexed
    if len(fresh) > k:
        vectors = torch.from_numpy(snapshot.catalogue.keys.vectors[indexed:])
        cosines = _of_units(asked, vectors)[0]
        cosines.masked_fill_(~torch.from_numpy(open_keys[indexed:]), -torch.inf)
        fresh = torch.topk(cosines, k).indices.numpy() + indexed
    return np.concatenate([near[near >= 0], fresh])


def _bias(
    matches: Matches,
    places: RowIndices | slice,
    personal: NDArray[np.float32] | None,
    scale: float,
) -> Tensor:
    """What is added to the scores of some keys [K], in units of the cosine; -inf hides a key.

    `attend` adds it before it divides by the temperature, which it must not depend on.
    """
    fields = matches.catalogue.keys
    biases = matches.parameters.fields
    worth = np.array([biases.get(name, 0.0) for name in fields.names], np.float32)
    bias = worth[fields.codes[places]] - fields.log_frequency[places]
    if personal is not None:
        bias = bias + personal[fields.owners[places]]
    bias[~matches.open_keys[places]] = -np.inf
    return torch.from_numpy(bias) * scale


def _weights(
    matches: Matches, personal: NDArray[np.float32] | None
) -> tuple[float, Tensor, NDArray[np.float32]]:
    """The temperature that was asked for, the bias [1, K] and the softmax [K] at it."""
    scale = matches.parameters.temperature * matches.options.temperature
    bias = matches.beside + _bias(matches, matches.places, personal, scale)
    return scale, bias, _weigh(matches, bias, scale, hard=matches.options.hard)


def _weigh(matches: Matches, bias: Tensor, scale: float, *, hard: bool) -> NDArray[np.float32]:
    """The softmax over the attended keys [K]."""
    found = attend(
        matches.query,
        matches.keys,
        # The items themselves are the values: what is asked for is who holds the weight.
        matches.keys.new_zeros(len(matches.keys), 0),
        bias=bias,
        score=lambda _query, _keys: matches.cosines.clone(),  # `attend` writes over it
        temperature=scale,
        hard=hard,
    )
    return found.weights[0].numpy()


def _best(
    matches: Matches, weights: NDArray[np.float32], count: int
) -> tuple[RowIndices, NDArray[np.float32]]:
    """Places [≤ count] of the items of most weight, best first; and what every item gathers [I]."""
    gathered = np.zeros(len(matches.items), dtype=np.float32)
    np.add.at(gathered, matches.item_of, weights)
    rank = -gathered
    if count < len(rank):  # those as good as the last one wanted, of which the first rows stand
        best = np.flatnonzero(rank <= np.partition(rank, count - 1)[count - 1])
    else:
        best = np.arange(len(rank))
    order = best[np.argsort(rank[best], kind="stable")][:count]
    return order[gathered[order] > 0], gathered


def _mass(
    matches: Matches, personal: NDArray[np.float32] | None, inside: Tensor, scale: float
) -> float:
    """The share of the softmax over all open keys that the attended ones hold, by their scores."""
    places, open_keys = matches.places, matches.open_keys
    attended = int(np.count_nonzero(open_keys[places]))
    rest = matches.open_count - attended
    if not attended or rest <= 0:
        return 1.0
    fields = matches.catalogue.keys
    sample, vectors = fields.sample()
    place = np.minimum(np.searchsorted(places, sample), len(places) - 1)
    others = open_keys[sample] & (places[place] != sample)
    sample, cosines = sample[others], _of_units(matches.query, torch.from_numpy(vectors))
    cosines = cosines[:, torch.from_numpy(others)]
    sharpness = _sharpness(matches.catalogue, matches.parameters)[fields.codes[sample]]
    outside = cosines * torch.from_numpy(sharpness) + _bias(matches, sample, personal, scale)
    share = mass_from_sample(
        inside[None],
        outside[None],
        torch.tensor([[rest]]),
        temperature=scale,
        hard=matches.options.hard,
    ).share
    return float(share)


def _sharpness(catalogue: Catalogue, parameters: SearchParameters) -> NDArray[np.float32]:
    """What the cosines of each field are multiplied by, for its temperature."""
    base, own = parameters.temperature, parameters.temperatures
    return np.array([base / own.get(name, base) for name in catalogue.keys.names], np.float32)


def _of_units(query: Tensor, keys: Tensor) -> Tensor:
    """The cosines [1, K] of one unit vector [1, D] and many [K, D].

    `cosine` would scale all keys anew for each query; and for one query NumPy, which takes one
    product after the other, reads the keys in less than half the time of a matrix product.
    """
    return torch.from_numpy(np.vecdot(keys.numpy(), query[0].numpy()))[None]
