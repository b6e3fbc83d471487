"""Quality of search on judged queries, by BM25, by embeddings and by both; and its tuning."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.evaluation.full_ranking import (
    PairedDifference,
    bootstrap,
    first_relevant_rank,
    graded_ndcg,
    hits,
    recall,
    standard_error,
)
from models.ranking.matches import DEFAULTS, SearchParameters
from models.ranking.search import search
from service.datasets.base import JudgedQuery
from service.datasets.rows import to_json_lines
from service.domain.errors import Invalid
from service.domain.records import Item
from service.engine.search import match_text
from service.training.training_corpus import StageProgressCallback

SearchMode = Literal["BM25 alone", "meaning alone", "both"]
SEARCH_MODES: tuple[SearchMode, ...] = get_args(SearchMode)

# Ranks that count for success, for nDCG and for recall.
SUCCESS_AT, _NDCG_AT, RECALL_AT = 3, 10, 100
_MIN_QUERIES = 20  # judged queries, with fewer of which nothing is fitted
_ROUNDS = 2
_LEXICAL = (0.0, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
_TEMPERATURES = (0.03, 0.045, 0.06, 0.085, 0.12)
_BIASES = (-4.0, -3.0, -2.0, -1.0, 0.0, 1.0)
_SHARPNESS = (0.5, 1.0, 2.0)  # of a field's temperature over the general one


@dataclass(frozen=True, slots=True, eq=False)
class SearchQuality:
    """Metrics of each judged query, [Q]."""

    ndcg: NDArray[np.float64]
    recall: NDArray[np.float64]
    ranks: NDArray[np.int64]  # of the first relevant item, from 0; the depth of the search if none

    @property
    def success(self) -> NDArray[np.float64]:
        """1 where a relevant item is among the first 3, else 0."""
        return hits(self.ranks, SUCCESS_AT)


class TuningResult(NamedTuple):
    """Parameters fitted on half of the judged queries, and their metrics on the other half."""

    parameters: SearchParameters
    before: SearchQuality
    after: SearchQuality
    improvement: PairedDifference  # in nDCG

    @property
    def is_better(self) -> bool:
        """True when the parameters improve nDCG on queries that they were not fitted on."""
        return self.improvement.difference > 0


def catalogue_digest(items: Iterable[Item]) -> str:
    """Return the SHA-256 of a catalogue: of all fields of its items, in their order."""
    hashed = hashlib.sha256()
    for line in to_json_lines(items):
        hashed.update(line)
    return hashed.hexdigest()


def evaluate_search(
    snapshot: Snapshot,
    encode: Callable[[str], NDArray[np.float32]],
    judged: Sequence[JudgedQuery],
    mode: SearchMode = "both",
    parameters: SearchParameters = DEFAULTS,
    *,
    depth: int = RECALL_AT,
) -> SearchQuality:
    """Search for each query and compare the ranking with the judgments.

    `encode` maps a query to its embedding [D]; `depth` ranks are retrieved, the cut-off of recall.
    """
    if mode == "meaning alone":
        parameters = replace(parameters, lexical=0.0, meaning=parameters.meaning or 1.0)
    ndcg, found, ranks = [], [], []
    for query, gains in judged:
        ranking = _ranked(snapshot, encode, query, mode, parameters, depth)
        ndcg.append(graded_ndcg(ranking, gains, _NDCG_AT))
        found.append(recall(ranking, gains, depth))
        ranks.append(first_relevant_rank(ranking, gains, depth))
    return SearchQuality(np.array(ndcg), np.array(found), np.array(ranks))


def _ranked(
    snapshot: Snapshot,
    encode: Callable[[str], NDArray[np.float32]],
    query: str,
    mode: SearchMode,
    parameters: SearchParameters,
    count: int,
) -> list[str]:
    catalogue, allowed = snapshot.catalogue, snapshot.catalogue.servable
    if mode != "BM25 alone":
        _, matches = match_text(query, snapshot, encode, allowed=allowed, parameters=parameters)
        rows = search(matches, limit=count).rows
    elif catalogue.bm25_index is None:
        raise RuntimeError("the catalogue has no BM25 index")
    else:
        rows = catalogue.bm25_index.search(
            catalogue.bm25_index.parser.parse(query), count, allowed
        ).rows
    return catalogue.vocabulary.ids_of(rows.tolist())


def tune_parameters(
    snapshot: Snapshot,
    encode: Callable[[str], NDArray[np.float32]],
    judged: Sequence[JudgedQuery],
    *,
    start: SearchParameters = DEFAULTS,
    seed: int = 0,
    progress: StageProgressCallback | None = None,
) -> TuningResult:
    """Fit the parameters by coordinate ascent on half of the queries; evaluate on the rest.

    `encode` maps a query to its embedding [D]; `seed` is of the split into halves.

    Raises:
        Invalid: there are too few queries.
    """
    if len(judged) < _MIN_QUERIES:
        raise Invalid("", f"{len(judged)} judged queries are too few: {_MIN_QUERIES} are needed")
    drawn = np.random.default_rng(seed).permutation(len(judged))
    fit, held = ([judged[at] for at in half] for half in np.array_split(drawn, 2))
    known: dict[str, NDArray[np.float64]] = {}

    def ndcg(parameters: SearchParameters) -> NDArray[np.float64]:
        name = repr(parameters)
        if name not in known:
            known[name] = evaluate_search(
                snapshot, encode, fit, "both", parameters, depth=_NDCG_AT
            ).ndcg
        return known[name]

    best, names = start, snapshot.catalogue.keys.names
    axes = len(list(_axes(best, names)))
    for step in range(_ROUNDS * axes):
        tried = max(list(_axes(best, names))[step % axes], key=lambda one: float(ndcg(one).mean()))
        gain = ndcg(tried) - ndcg(best)
        # After that many trials, a gain within one standard error is likely to be chance.
        if gain.mean() > standard_error(gain):
            best = tried
        if progress is not None:
            progress("fitting", step + 1, _ROUNDS * axes, None)
    before, after = (
        evaluate_search(snapshot, encode, held, "both", each) for each in (start, best)
    )
    return TuningResult(best, before, after, bootstrap(after.ndcg - before.ndcg))


def _axes(now: SearchParameters, names: Sequence[str]) -> Iterator[list[SearchParameters]]:
    """Iterate over the axes: candidates that differ from `now` in one parameter."""
    yield [replace(now, lexical=value) for value in _LEXICAL]
    yield [replace(now, temperature=value) for value in _TEMPERATURES]
    for name in names:
        if name != names[0]:  # biases matter only relative to the first field's
            yield [replace(now, fields={**now.fields, name: value}) for value in _BIASES]
    for name in names:
        yield [
            replace(now, temperatures={**now.temperatures, name: now.temperature * sharper})
            for sharper in _SHARPNESS
        ]
