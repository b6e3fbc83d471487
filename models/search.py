"""Search as attention: the text is the query, the fields of items are the keys, items the values.

    logit(query, key) = cos(query, key) / τ + b_field - log m
    weight(item) = Σ over its keys of softmax(logit)

so that an item which matches in two fields gathers both. A key that m items share (a category that
is all a field says) is one key with m values: its weight is split among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention import attend, logits
from models.points import unit
from models.scoring import Scores
from models.snapshot import Snapshot

Rows = NDArray[np.int64]

TEMPERATURE = 0.05  # of the cosines: two keys .1 apart differ sevenfold in weight
# What a match in a field is worth against one in the title, in logits: labels say little.
FIELD_BIAS = {"tags": -1.0, "categories": -3.0}
PERSONAL = 1.0  # logits that one standard deviation of the personal scores is worth
COARSE_KEYS = 2_000  # field keys that reach the exact softmax when they come from the index


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Items that match, best first."""

    rows: Rows  # [L] item rows
    weights: NDArray[np.float32]  # [L] share of the softmax gathered over the item's keys
    scores: NDArray[np.float32]  # [L] log of the weight before normalising, plus any personal part
    matched: tuple[dict[str, float], ...]  # [L] each field's share of the item's weight
    mode: Literal["exact", "coarse"]


@torch.inference_mode()
def search(
    snapshot: Snapshot,
    query: NDArray[np.float32],
    *,
    limit: int,
    allowed: NDArray[np.bool_],
    temperature: float = 1.0,
    hard: bool = False,
    bias: NDArray[np.float32] | None = None,
) -> Found:
    """The items whose keys match a query vector.

    Args:
        snapshot: the catalogue.
        query: [D], of the catalogue's text encoder; a zero vector matches nothing.
        limit: how many items.
        allowed: bool [N], what may be answered.
        temperature: multiplies the default one.
        hard: the item of the best key alone.
        bias: [N], what the asker's memory adds to the logits of each item's keys.
    """
    catalogue = snapshot.catalogue
    mode: Literal["exact", "coarse"] = "coarse" if snapshot.key_index is not None else "exact"
    places = _candidate_keys(snapshot, query, allowed)
    if not len(places) or not np.any(query):
        nothing = np.zeros(0, np.float32)
        return Found(np.zeros(0, np.int64), nothing, nothing, (), mode)
    owners = catalogue.owners[places].astype(np.int64)
    everything = len(places) == len(catalogue.keys)
    keys = torch.from_numpy(catalogue.keys if everything else catalogue.keys[places])
    scale = TEMPERATURE * temperature
    worth = np.array([FIELD_BIAS.get(name, 0.0) for name in catalogue.field_names], np.float32)
    bias_of_key = worth[catalogue.field_codes[places]] - catalogue.common[places]
    if bias is not None:
        bias_of_key = bias_of_key + bias[owners]
    # `attend` adds the bias before it divides by the temperature.
    added = torch.from_numpy(bias_of_key)[None] * scale
    asked = torch.from_numpy(unit(query[None]))
    # The items themselves are the values: what is asked for is who holds the weight.
    scored = logits(asked, keys, bias=added, score=_of_units)  # (1, K), before the temperature
    found = attend(
        asked,
        keys,
        keys.new_zeros(len(keys), 0),
        bias=added,
        score=_of_units,
        temperature=scale,
        hard=hard,
    )
    weights = found.weights[0].numpy()  # [K]
    items, item_of = np.unique(owners, return_inverse=True)
    gathered = np.zeros(len(items), dtype=np.float32)
    np.add.at(gathered, item_of, weights)
    order = np.argsort(-gathered, kind="stable")[:limit]
    order = order[gathered[order] > 0]
    matched: list[dict[str, float]] = []
    for item in order.tolist():
        share: dict[str, float] = {}
        for place in np.flatnonzero((item_of == item) & (weights > 0)).tolist():
            name = catalogue.field_names[catalogue.field_codes[places[place]]]
            share[name] = share.get(name, 0.0) + float(weights[place] / gathered[item])
        matched.append(dict(sorted(share.items(), key=lambda pair: -pair[1])))
    # Over the sum of exponentials, a weight is comparable between queries.
    total = np.float32(torch.logsumexp(scored[0] / scale, 0))
    scores: NDArray[np.float32] = np.log(gathered[order]) + total
    return Found(items[order], gathered[order], scores, tuple(matched), mode)


def _of_units(query: Tensor, keys: Tensor) -> Tensor:
    """The cosine of unit vectors: `cosine` would scale all keys anew for each query."""
    return query @ keys.mT


def personal_bias(snapshot: Snapshot, scores: Scores, rows: Rows) -> NDArray[np.float32]:
    """What a memory adds to the logits of items found by text, [N]: its standardised scores.

    Args:
        snapshot: the catalogue.
        scores: of `rows`, from `score`.
        rows: item rows [P]; other items get 0, the mean.
    """
    bias = np.zeros(len(snapshot.catalogue), dtype=np.float32)
    total = scores.total.numpy()
    if len(total) > 1 and float(total.std()) > 0:
        bias[rows] = PERSONAL * (total - total.mean()) / total.std()
    return bias


def _candidate_keys(
    snapshot: Snapshot, query: NDArray[np.float32], allowed: NDArray[np.bool_]
) -> Rows:
    """The field keys that may matter: all of the allowed items', or what the index names of them.

    Of each item that the index names, every key is kept, so that its fields share its weight.
    """
    catalogue = snapshot.catalogue
    open_keys = allowed[catalogue.owners]
    if snapshot.key_index is None:
        return np.flatnonzero(open_keys)
    indexed = snapshot.indexed_keys
    near = snapshot.key_index.search(query[None], COARSE_KEYS, allow=open_keys[:indexed]).rows[0]
    named = np.zeros(len(catalogue), dtype=np.bool_)
    named[catalogue.owners[near[near >= 0]]] = True
    named[catalogue.owners[indexed:][open_keys[indexed:]]] = True
    return np.flatnonzero(named[catalogue.owners] & open_keys)
