"""Compare a query with the fields and the keywords of items: the logits of search.

A keyword that matches is a key that no meaning comes near:

    logit = (l + μ + level) / τ        of a keyword that was typed as a whole (level 2), or begun

No sum of cosine and BM25 is more than l + μ. A beginning that may also be a word, as `lan*`, weighs
no more than the best match in words: l · share / τ.

The floor of meaning is the cosine that a query without a known word must reach to find anything.
Any text has a nearest key, nonsense too, and how near depends on the encoder, the number of keys
and their lengths. So nonsense is compared with a sample of the catalogue's own keys:

    floor = the largest of its best cosines + `MARGIN` standard deviations of them

The margin is for nonsense that comes nearer by chance than that which was drawn.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.attention.partial_softmax import SAMPLE
from models.catalogue.catalogue import Catalogue
from models.catalogue.field_keys import FieldKeys
from models.catalogue.item_values import is_number
from models.catalogue.snapshot import Snapshot
from models.data.vocabulary import RowIndices, sorted_union
from models.index.ann_index import normalize_rows
from models.ranking.lineup import Moved
from models.text.bm25 import Hits
from models.text.terms import NO_KEYWORDS, KeywordHits


@dataclass(frozen=True, slots=True)
class SearchParameters:
    """Weights of a match, and the temperature of the softmax over matches.

    Temperature and lexical were chosen on judgments of Cranfield and of SciFact's training queries,
    by which everything near them is as good: from .05 to .12, with .7 to 1.2. Lower temperatures
    serve short queries that only name categories better. `meaning` is fitted to a catalogue without
    judgments; at 0, items rank only by BM25.

    Raises ValueError, naming the field, for a value out of range.
    """

    temperature: float = 0.06  # of the scores: two keys .1 apart differ fivefold in weight
    lexical: float = 1.0  # BM25 score of the best item, in cosines
    # Logits of a match in a field relative to one in the title: labels say little.
    fields: Mapping[str, float] = field(default_factory=lambda: {"tags": -1.0, "categories": -3.0})
    # Temperatures of single fields in place of the common one.
    temperatures: Mapping[str, float] = field(default_factory=dict)
    meaning: float = 1.0  # factor of all cosines; 0 = words alone

    def __post_init__(self) -> None:
        for name, value in {"temperature": self.temperature, **self.temperatures}.items():
            if not (is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{name} must be a temperature greater than 0, not {value!r}")
        for name, value in {"lexical": self.lexical, "meaning": self.meaning}.items():
            if not (is_number(value) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
        for name, value in self.fields.items():
            if not (is_number(value) and math.isfinite(value)):
                raise ValueError(f"fields: {name} must be a number, not {value!r}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


DEFAULTS = SearchParameters()


@dataclass(frozen=True, slots=True, eq=False)
class SearchResults:
    """Items that match, best first.

    Boosts are in neither weights nor scores. A pinned item that was not compared has no weight, and
    a score of -inf.
    """

    rows: RowIndices  # [L] item rows
    weights: NDArray[np.float32]  # [L] share of the softmax gathered over the item's keys
    scores: NDArray[np.float32]  # [L] log of the weight before normalising, plus any personal part
    matched: tuple[dict[str, float], ...]  # [L] each field's share of the item's weight
    mode: Literal["exact", "coarse"]
    keys: int  # that were attended
    mass: float  # share of the softmax over all allowed keys that these hold; may be estimated
    # [L] of the scores, what the requester's memory added; None = nothing was added
    personal: NDArray[np.float32] | None = None
    moved: tuple[Moved | None, ...] = ()  # [L] of steered results; empty = by score alone
    boosts: NDArray[np.float32] | None = None  # [L] that are ranked with the scores


SAMPLES = 256  # strings of nonsense
MARGIN = 4.0
MAX_FLOOR = 0.95  # that a text which nearly repeats a key passes anywhere
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"

EncodeQuery = Callable[[str], NDArray[np.float32]]


def meaning_floor(keys: FieldKeys, encode: EncodeQuery) -> float:
    """Return the floor of the best cosine of a query; a sample of many keys is compared."""
    vectors = keys.sample()[1]
    if not len(vectors):
        return MAX_FLOOR
    best = (nonsense_vectors(encode) @ vectors.T).max(axis=1)
    return min(MAX_FLOOR, float(best.max() + MARGIN * best.std()))


@lru_cache(4)  # setups of search of a process; tests have their own
def nonsense_vectors(encode: EncodeQuery) -> NDArray[np.float32]:
    """Return the vectors [SAMPLES, D] of nonsense, the same at every call."""
    return np.stack([encode(text) for text in nonsense(SAMPLES)])


def nonsense(count: int, seed: int = 0) -> list[str]:
    """Return strings of one or two words, half of which can be pronounced."""
    rng = random.Random(seed)

    def word() -> str:
        letters = range(rng.randint(4, 12))
        if rng.random() < 0.5:
            return "".join(rng.choice(string.ascii_lowercase) for _ in letters)
        return "".join(rng.choice(_VOWELS if at % 2 else _CONSONANTS) for at in letters)

    return [" ".join(word() for _ in range(rng.randint(1, 2))) for _ in range(count)]


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
        return int(np.count_nonzero(self.allowed_keys[self.places]))

    @property
    def offset(self) -> Tensor:
        """Score less cosine [1, K]: BM25, and the factor of the cosines of the key's field.

        If only words count, it is -inf for the keys of items without any of them.
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
        and biases by the temperature, on which biases must not depend. If only words count, the
        keys of an item share its weight equally, so that items rank by BM25.
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
            vector if the parameters let only words count.
        allowed: bool [N], the items that may be returned.
        options: the softmax, its temperature in units of the parameters', and the retrieval.
        hits: returns allowed items by BM25; called once the nearest keys are known, so that both
            can be searched for at the same time.
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
        # Keys without an owner are not allowed: it does not matter which item they count for.
        items, places = np.arange(len(catalogue)), np.arange(len(allowed_keys))
        item_of = np.maximum(fields.owners, 0).astype(np.int64)
    else:
        exact = mode == "exact" and compared
        items = np.flatnonzero(allowed) if exact else sorted_union(shared, near)
        places, item_of = fields.positions_of(items)
        if np.any(np.diff(places) < 0):  # items that changed
            order = np.argsort(places)
            places, item_of = places[order], item_of[order]
    keys = torch.from_numpy(fields.vectors if everything else fields.vectors[places])
    by_item = np.zeros(len(items), np.float32)
    by_item[np.searchsorted(items, shared)] = bm25  # hits are allowed, so they are among the items
    return FieldMatches(
        catalogue=catalogue,
        query=unit,
        allowed_keys=allowed_keys,
        allowed_count=count,
        places=places,
        keys=keys,
        cosines=unit_cosines(unit, keys),
        bm25=torch.from_numpy(by_item[item_of])[None],
        items=items,
        item_of=item_of,
        options=options,
        mode=mode,
        parameters=parameters,
        keywords=keywords,
    )


def unit_cosines(query: Tensor, keys: Tensor) -> Tensor:
    """Return the cosines [1, K] of one unit vector [1, D] and many [K, D].

    For one query NumPy reads the keys in less than half the time of a matrix product.
    """
    return torch.from_numpy(np.vecdot(keys.numpy(), query[0].numpy()))[None]


def _nearest_keys(
    snapshot: Snapshot,
    query: Tensor,
    allowed_keys: NDArray[np.bool_],
    count: int,
    options: AttentionOptions,
) -> RowIndices:
    """Return the `k` allowed keys nearest to a query [1, D], and those newer than the index."""
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
        rows: RowIndices = every[near[near >= 0]]
        return rows
    indexed = snapshot.indexed_keys
    # If all are allowed, FAISS need not look at each.
    allow = None if count == len(allowed_keys) else allowed_keys[:indexed]
    near = snapshot.key_index.search(query.numpy(), k, allow=allow, probes=probes)[0]
    fresh = np.flatnonzero(allowed_keys[indexed:])
    if len(fresh) > k:
        cosines = unit_cosines(query, torch.from_numpy(vectors[indexed:]))[0]
        cosines.masked_fill_(~torch.from_numpy(allowed_keys[indexed:]), -torch.inf)
        fresh = torch.topk(cosines, k).indices.numpy()
    return np.concatenate([near[near >= 0], fresh + indexed])


def _bm25_shares(
    hits: Hits | None, parameters: SearchParameters
) -> tuple[RowIndices, NDArray[np.float32]]:
    """Return the rows of BM25 hits, ascending, and their scores as shares of the best one's."""
    if hits is None or not len(hits.rows) or not parameters.lexical:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    order = np.argsort(hits.rows)
    return hits.rows[order], (hits.scores / hits.scores.max())[order]


def _cosine_factors(catalogue: Catalogue, parameters: SearchParameters) -> NDArray[np.float32]:
    """Return the factor of the cosines of each field, by `meaning` and by its own temperature."""
    base, of_field = parameters.temperature, parameters.temperatures
    factors = [base / of_field.get(name, base) for name in catalogue.keys.names]
    return np.array(factors, np.float32) * np.float32(parameters.meaning)


def allowed_keywords(keywords: KeywordHits, allowed: NDArray[np.bool_]) -> KeywordHits:
    at = np.flatnonzero(allowed[keywords.rows])
    fields = tuple(keywords.fields[place] for place in at.tolist())
    return KeywordHits(keywords.rows[at], keywords.levels[at], fields, keywords.is_cut)


def keyword_scores(
    matches: FieldMatches, rows: RowIndices, scores: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Add the keys of keywords to the scores [R] of items with field keys, ascending [R].

    Returns the rows of all items with a score, ascending, and their scores.
    """
    keywords = matches.keywords
    if not len(keywords.rows):
        return rows.astype(np.int64), scores.astype(np.float64)
    every = np.union1d(rows, keywords.rows).astype(np.int64)
    merged = np.full(len(every), -np.inf)
    if not matches.options.hard:
        merged[np.searchsorted(every, rows)] = scores
    np.logaddexp.at(merged, np.searchsorted(every, keywords.rows), _logits(matches))
    return every[merged > -np.inf], merged[merged > -np.inf]


def with_keywords(found: SearchResults, matches: FieldMatches, total: float) -> SearchResults:
    """Merge the keys of keywords into the softmax over field keys; items by falling scores.

    `total` is the log of the sum of exponentials over all field keys.
    """
    keywords = matches.keywords
    if not len(keywords.rows):
        return found
    logits = _logits(matches)
    if matches.options.hard:
        total = -np.inf
    whole = np.logaddexp(total, np.logaddexp.reduce(logits))
    scores, personal = dict[int, float](), dict[int, float]()
    if total > -np.inf:
        scores = dict(zip(found.rows.tolist(), found.scores.tolist(), strict=True))
    if found.personal is not None:
        personal = dict(zip(found.rows.tolist(), found.personal.tolist(), strict=True))
    # Scores of the items without a memory, which adds to field keys only.
    plain = {row: score - personal.get(row, 0.0) for row, score in scores.items()}
    matched = dict(zip(found.rows.tolist(), found.matched, strict=True))
    for row, logit, name in zip(
        keywords.rows.tolist(), logits.tolist(), keywords.fields, strict=True
    ):
        scores[row] = float(np.logaddexp(scores.get(row, -np.inf), logit))
        plain[row] = float(np.logaddexp(plain.get(row, -np.inf), logit))
        share = float(np.exp(logit - scores[row])) if scores[row] > -np.inf else 0.0
        rest = {other: part * (1 - share) for other, part in matched.get(row, {}).items()}
        matched[row] = {name: share, **rest}
    order = sorted((row for row in scores if scores[row] > -np.inf), key=lambda row: -scores[row])
    ranked = np.array([scores[row] for row in order])
    share = float(np.exp(total - whole))  # of the field keys
    return replace(
        found,
        rows=np.array(order, np.int64),
        weights=np.exp(ranked - whole).astype(np.float32),
        scores=ranked.astype(np.float32),
        matched=tuple(
            dict(sorted(matched[row].items(), key=lambda pair: -pair[1])) for row in order
        ),
        mass=1 - share * (1 - found.mass),
        personal=None
        if found.personal is None
        else np.array([scores[row] - plain[row] for row in order], np.float32),
    )


def _logits(matches: FieldMatches) -> NDArray[np.float64]:
    """Return the logits of the keywords [M]; hard attention leaves the largest."""
    levels, parameters = matches.keywords.levels.astype(np.float64), matches.parameters
    words = parameters.lexical * (1 + levels)
    typed = parameters.lexical + parameters.meaning + levels
    scores = np.where(levels > 0, typed, words)  # in units of the cosine
    logits = scores / (parameters.temperature * matches.options.temperature)
    if matches.prior is not None:
        logits += matches.prior[matches.keywords.rows]
    if matches.options.hard and len(logits):
        logits[logits < logits.max()] = -np.inf
    return logits
