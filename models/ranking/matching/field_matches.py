"""Compare a query with the fields of items: the logits of search, before their softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.attention.partial_softmax import SAMPLE
from models.catalogue.catalogue import Catalogue
from models.catalogue.snapshot import Snapshot
from models.data.vocabulary import RowIndices, sorted_union
from models.index.ann_index import normalize_rows
from models.ranking.search_parameters import DEFAULTS, SearchParameters
from models.text.bm25 import Hits
from models.text.terms import NO_KEYWORDS, KeywordHits

COARSE_KEYS = 1_000  # field keys that the coarse step retrieves without a `k`
_WIDE = 0.25  # share of allowed keys from which comparing all is faster than copying those out


@dataclass(frozen=True, slots=True, eq=False)
class FieldMatches:
    """A query and its cosines to field keys, computed once for any number of softmaxes."""

    catalogue: Catalogue
    query: Tensor  # [1, D] of unit length
    allowed_keys: NDArray[np.bool_]  # [F] keys of items that may be returned
    allowed_count: int
    places: RowIndices  # [K] the compared keys, ascending; only allowed ones are attended
    keys: Tensor  # [K, D]
    cosines: Tensor  # [1, K]
    bm25: Tensor  # [1, K] BM25 score of each key's item, as a share of the best item's
    items: RowIndices  # [I] rows of the items of the keys, ascending
    item_of: RowIndices  # [K] the place of each key's item among them
    options: AttentionOptions
    mode: Literal["exact", "coarse"]
    parameters: SearchParameters
    keywords: KeywordHits  # of items that may be returned
    # [N] logits of what each item stands for, which all its keys carry; None = all 0
    prior: NDArray[np.float32] | None = None

    @property
    def best_cosine(self) -> float:
        """The largest cosine of a key that is attended; -1 without one."""
        return float(self.cosines[0].numpy().max(where=self.allowed_keys[self.places], initial=-1))

    @property
    def attended(self) -> int:
        """The number of keys that are attended."""
        return int(np.count_nonzero(self.allowed_keys[self.places]))

    @property
    def offset(self) -> Tensor:
        """Score less cosine [1, K]: BM25, and the factor of the cosines of the key's field.

        Where words alone count, it is -inf for the keys of items that have none of them.
        """
        factors = _cosine_factors(self.catalogue, self.parameters)
        factors = factors[self.catalogue.keys.codes[self.places]]
        by_words = self.parameters.lexical * self.bm25
        if not self.parameters.meaning:
            by_words = by_words.masked_fill(self.bm25 == 0, -torch.inf)
        return self.cosines * torch.from_numpy(factors - 1) + by_words

    def bias(
        self, places: RowIndices, personal: NDArray[np.float32] | None, temperature: float
    ) -> Tensor:
        """Return the biases of some keys [K], in units of the cosine; -inf hides a key.

        `personal` [N] are logits that are added to the keys of each item. `attend` divides scores
        and biases by the temperature, on which biases must not depend. Where words alone count,
        the keys of an item share its weight equally, so that items rank by BM25.
        """
        fields = self.catalogue.keys
        if self.parameters.meaning:
            biases = self.parameters.fields
            of_field = np.array([biases.get(name, 0.0) for name in fields.names], np.float32)
            bias = of_field[fields.codes[places]] - fields.log_frequency[places]
        else:
            counts = fields.counts_of(fields.owners[places])
            bias = -np.log(np.maximum(counts, 1), dtype=np.float32)  # 0: of a key without an owner
        if personal is not None:
            bias = bias + personal[fields.owners[places]]
        if self.prior is not None:
            bias = bias + self.prior[fields.owners[places]]
        bias[~self.allowed_keys[places]] = -np.inf
        return torch.from_numpy(bias) * temperature

    def sample_others(self) -> tuple[RowIndices, Tensor]:
        """Return a sample [S] of the allowed keys that are not attended, and their scores [1, S].

        The scores are cosines by the factor of each field; such keys share no word. If at
        most `SAMPLE` keys are allowed, all others are returned.
        """
        if self.allowed_count <= SAMPLE:
            sample = np.flatnonzero(self.allowed_keys)
            vectors = self.catalogue.keys.vectors[sample]
        else:
            sample, vectors = self.catalogue.keys.sample()
        place = np.minimum(np.searchsorted(self.places, sample), len(self.places) - 1)
        others = self.allowed_keys[sample] & (self.places[place] != sample)
        cosines = unit_cosines(self.query, torch.from_numpy(vectors))
        sample, cosines = sample[others], cosines[:, torch.from_numpy(others)]
        factors = _cosine_factors(self.catalogue, self.parameters)
        return sample, cosines * torch.from_numpy(factors[self.catalogue.keys.codes[sample]])


@torch.inference_mode()
def match_fields(
    snapshot: Snapshot,
    query: NDArray[np.float32],
    *,
    allowed: NDArray[np.bool_],
    options: AttentionOptions = DEFAULT_OPTIONS,
    hits: Callable[[], Hits] | None = None,
    parameters: SearchParameters = DEFAULTS,
    keywords: KeywordHits = NO_KEYWORDS,
) -> FieldMatches:
    """Compare a query vector with the field keys that may matter.

    `exact` takes every key of the allowed items. `coarse` takes the `k` nearest ones (the index
    retrieves them; without an index all are compared), keys newer than the index, the BM25 hits,
    and the other keys of the same items, so that an item's fields share its weight. `auto`
    decides by how many keys the allowed items have.

    Args:
        query: [D], of the catalogue's text encoder; a zero vector matches nothing, nor does any
            where the parameters let words alone count.
        allowed: bool [N], the items that may be returned.
        options: the softmax, its temperature in units of the parameters', and the retrieval.
        hits: returns allowed items by BM25; called once the nearest keys are known, so that a
            function that waits for them lets both be searched for at the same time.
        parameters: the weights of a match.
        keywords: of allowed items, which match whatever their fields say.
    """
    catalogue, fields = snapshot.catalogue, snapshot.catalogue.keys
    unit = torch.from_numpy(normalize_rows(query[None]))
    allowed_keys = fields.mask(allowed)
    count = int(np.count_nonzero(allowed_keys))
    mode = options.resolve_mode(count)
    compared = bool(np.any(query)) and parameters.meaning > 0
    near = np.zeros(0, np.int64)
    if mode == "coarse" and compared:
        places = _nearest_keys(snapshot, unit, allowed_keys, count, options)
        near = fields.owners[places].astype(np.int64)
    shared, bm25 = _bm25_shares(None if hits is None else hits(), parameters)
    everything = mode == "exact" and compared and count > _WIDE * len(allowed_keys)
    if everything:
        # Keys without an owner are not allowed: the item they are counted for is of no matter.
        items, places = np.arange(len(catalogue)), np.arange(len(allowed_keys))
        item_of = np.maximum(fields.owners, 0).astype(np.int64)
    else:
        exact = mode == "exact" and compared
        items = np.flatnonzero(allowed) if exact else sorted_union(shared, near)
        places, item_of = fields.positions_of(items)
        if np.any(np.diff(places) < 0):  # of items that changed
            order = np.argsort(places)
            places, item_of = places[order], item_of[order]
    keys = torch.from_numpy(fields.vectors if everything else fields.vectors[places])
    by_item = np.zeros(len(items), np.float32)
    by_item[np.searchsorted(items, shared)] = bm25  # hits are allowed, so they are among the items
    return FieldMatches(
        catalogue,
        unit,
        allowed_keys,
        count,
        places,
        keys,
        unit_cosines(unit, keys),
        torch.from_numpy(by_item[item_of])[None],
        items,
        item_of,
        options,
        mode,
        parameters,
        keywords,
    )


def unit_cosines(query: Tensor, keys: Tensor) -> Tensor:
    """Return the cosines [1, K] of one unit vector [1, D] and many [K, D].

    `cosine` would scale all keys anew for each query; and for one query NumPy, which takes one
    product after the other, reads the keys in less than half the time of a matrix product.
    """
    return torch.from_numpy(np.vecdot(keys.numpy(), query[0].numpy()))[None]


def _nearest_keys(
    snapshot: Snapshot,
    query: Tensor,
    allowed_keys: NDArray[np.bool_],
    count: int,
    options: AttentionOptions,
) -> RowIndices:
    """Return the `k` allowed keys nearest to a query [1, D], and those newer than the index.

    Fewer where fewer are allowed, or where the probed part of the index holds fewer.
    """
    k = min(options.k or COARSE_KEYS, count)
    if k == 0:
        return np.zeros(0, np.int64)
    fields, probes = snapshot.catalogue.keys, options.probes
    vectors = fields.vectors
    if snapshot.key_index is None:
        every = np.flatnonzero(fields.mask(snapshot.catalogue.servable))
        index = snapshot.kept_index("fields", probes, lambda: vectors[every])
        allow = None if count == len(every) else allowed_keys[every]
        near = index.search(query.numpy(), k, allow=allow, probes=probes)[0]
        found: RowIndices = every[near[near >= 0]]
        return found
    indexed = snapshot.indexed_keys
    # Where all are allowed, FAISS need not look at each.
    allow = None if count == len(allowed_keys) else allowed_keys[:indexed]
    near = snapshot.key_index.search(query.numpy(), k, allow=allow, probes=probes)[0]
    fresh = np.flatnonzero(allowed_keys[indexed:])
    if len(fresh) > k:
        fresh = _top_keys(query, vectors[indexed:], allowed_keys[indexed:], k)
    return np.concatenate([near[near >= 0], fresh + indexed])


def _top_keys(
    query: Tensor, vectors: NDArray[np.float32], allowed: NDArray[np.bool_], k: int
) -> RowIndices:
    """Return the places of the k largest cosines among the allowed keys."""
    cosines = unit_cosines(query, torch.from_numpy(vectors))[0]
    cosines.masked_fill_(~torch.from_numpy(allowed), -torch.inf)
    return torch.topk(cosines, k).indices.numpy()


def _bm25_shares(
    hits: Hits | None, parameters: SearchParameters
) -> tuple[RowIndices, NDArray[np.float32]]:
    """Return the rows of BM25 hits, ascending, and their scores as shares of the best one's."""
    if hits is None or not len(hits.rows) or not parameters.lexical:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    order = np.argsort(hits.rows)
    return hits.rows[order], (hits.scores / hits.scores.max())[order]


def _cosine_factors(catalogue: Catalogue, parameters: SearchParameters) -> NDArray[np.float32]:
    """Return the factor of the cosines of each field, which stands for its own temperature too."""
    base, own = parameters.temperature, parameters.temperatures
    factors = [base / own.get(name, base) for name in catalogue.keys.names]
    return np.array(factors, np.float32) * np.float32(parameters.meaning)
