"""How good search is on judged queries, by words, by meaning and by both; and its parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from models.catalogue.catalogue import Catalogue
from models.catalogue.snapshot import UNTRAINED, Snapshot
from models.evaluation.metrics import (
    PairedDifference,
    bootstrap,
    first_relevant_rank,
    graded_ndcg,
    hits,
    recall,
    standard_error,
)
from models.ranking.search import search
from models.ranking.search_parameters import DEFAULTS, SearchParameters
from models.recommender.artifact import TrainedModel
from models.text.bm25 import BM25Writer
from service.datasets import JudgedQuery, to_json_lines
from service.domain.errors import Invalid
from service.domain.records import Item
from service.engine.search import match_text
from service.snapshots.item_entries import to_entry
from service.snapshots.text_embeddings import EmbeddingCache
from service.training.training_corpus import StageProgressCallback, encoding

Way = Literal["BM25 alone", "meaning alone", "both"]
WAYS: tuple[Way, ...] = get_args(Way)

AT_ONCE, _FIRST, DEEP = 3, 10, 100  # ranks that count for success, for nDCG and for recall
_ENOUGH = 20  # judged queries, with fewer of which nothing is fitted
_ROUNDS = 2
_LEXICAL = (0.0, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
_TEMPERATURES = (0.03, 0.05, 0.07, 0.1, 0.14)
_BIASES = (-4.0, -3.0, -2.0, -1.0, 0.0, 1.0)
_SHARPNESS = (0.5, 1.0, 2.0)  # a field's temperature over that of all scores


@dataclass(frozen=True, slots=True, eq=False)
class Quality:
    """What each judged query got, [Q]."""

    ndcg: NDArray[np.float64]
    recall: NDArray[np.float64]
    ranks: NDArray[np.int64]  # of the first relevant item, from 0; as many as were looked at = none

    @property
    def success(self) -> NDArray[np.float64]:
        """1 where a relevant item was among the first 3."""
        return hits(self.ranks, AT_ONCE)


class Tuned(NamedTuple):
    """Parameters fitted on half of the judged queries, and what both say of the other half."""

    parameters: SearchParameters
    before: Quality
    after: Quality
    gained: PairedDifference  # in nDCG

    @property
    def better(self) -> bool:
        """Whether they are of use to queries that they were not fitted on."""
        return self.gained.difference > 0


def searchable(
    items: Iterable[Item],
    embeddings: EmbeddingCache,
    told: StageProgressCallback | None = None,
    *,
    trained: TrainedModel | None = None,
) -> Snapshot:
    """A snapshot of these items as the service would search them, by a model or by none.

    Their vectors are kept.
    """
    empty = Catalogue.empty(embeddings.dimension, bm25_writer=BM25Writer())
    entries = [to_entry(item, embeddings.dimension) for item in items]
    catalogue = empty.updated(entries, [], encoding(embeddings, told))
    embeddings.save()
    version = UNTRAINED if trained is None else "trained"
    return Snapshot.build(version, trained, catalogue, np.zeros(0, dtype=np.int64))


def digest(items: Iterable[Item]) -> str:
    """What tells a catalogue from any other: of all that is in it, in its order."""
    hashed = hashlib.sha256()
    for line in to_json_lines(items):
        hashed.update(line)
    return hashed.hexdigest()


def judge(
    snapshot: Snapshot,
    encode: Callable[[str], NDArray[np.float32]],
    judged: Sequence[JudgedQuery],
    way: Way = "both",
    parameters: SearchParameters = DEFAULTS,
    *,
    deep: int = DEEP,
) -> Quality:
    """Search for each query, and hold what is found against the judgments.

    Args:
        snapshot: what is searched.
        encode: a query to its vector [D].
        judged: the queries.
        way: which heads read them.
        parameters: what a match is worth.
        deep: ranks that are looked at.
    """
    if way == "meaning alone":
        parameters = replace(parameters, lexical=0.0)
    ndcg, found, ranks = [], [], []
    for query, gains in judged:
        ranking = _ranked(snapshot, encode, query, way, parameters, deep)
        ndcg.append(graded_ndcg(ranking, gains, _FIRST))
        found.append(recall(ranking, gains, deep))
        ranks.append(first_relevant_rank(ranking, gains, deep))
    return Quality(np.array(ndcg), np.array(found), np.array(ranks))


def _ranked(
    snapshot: Snapshot,
    encode: Callable[[str], NDArray[np.float32]],
    query: str,
    way: Way,
    parameters: SearchParameters,
    count: int,
) -> list[str]:
    """The ids of what is found, best first."""
    catalogue, allowed = snapshot.catalogue, snapshot.catalogue.servable
    if way != "BM25 alone":
        _, matches = match_text(query, snapshot, encode, allowed=allowed, parameters=parameters)
        rows = search(matches, limit=count).rows
    elif catalogue.bm25_index is None:
        raise RuntimeError("no words are kept of this catalogue")
    else:
        rows = catalogue.bm25_index.search(
            catalogue.bm25_index.parser.parse(query), count, allowed
        ).rows
    return catalogue.vocabulary.ids_of(rows.tolist())


def tune(
    snapshot: Snapshot,
    encode: Callable[[str], NDArray[np.float32]],
    judged: Sequence[JudgedQuery],
    *,
    start: SearchParameters = DEFAULTS,
    seed: int = 0,
    told: StageProgressCallback | None = None,
) -> Tuned:
    """Fit the parameters on half of the queries, one after the other, and judge by the rest.

    Args:
        snapshot: what is searched.
        encode: a query to its vector [D].
        judged: the queries.
        start: where to begin.
        seed: of the halves.
        told: called as work goes on.

    Raises:
        Invalid: there are too few queries.
    """
    if len(judged) < _ENOUGH:
        raise Invalid("", f"{len(judged)} judged queries say too little: {_ENOUGH} are needed")
    drawn = np.random.default_rng(seed).permutation(len(judged))
    fit, held = ([judged[at] for at in half] for half in np.array_split(drawn, 2))
    worth: dict[str, NDArray[np.float64]] = {}

    def ndcg(parameters: SearchParameters) -> NDArray[np.float64]:
        name = repr(parameters)
        if name not in worth:
            worth[name] = judge(snapshot, encode, fit, "both", parameters, deep=_FIRST).ndcg
        return worth[name]

    best, names = start, snapshot.catalogue.keys.names
    axes = len(list(_axes(best, names)))
    for step in range(_ROUNDS * axes):
        tried = max(list(_axes(best, names))[step % axes], key=lambda one: float(ndcg(one).mean()))
        gain = ndcg(tried) - ndcg(best)
        # What is gained by less than that is gained by chance, so often is something tried.
        if gain.mean() > standard_error(gain):
            best = tried
        if told is not None:
            told("fitting", step + 1, _ROUNDS * axes, None)
    before, after = (judge(snapshot, encode, held, "both", each) for each in (start, best))
    return Tuned(best, before, after, bootstrap(after.ndcg - before.ndcg, seed=0))


def _axes(now: SearchParameters, names: Sequence[str]) -> Iterator[list[SearchParameters]]:
    """The parameters with one of them varied, for each of them."""
    yield [replace(now, lexical=value) for value in _LEXICAL]
    yield [replace(now, temperature=value) for value in _TEMPERATURES]
    for name in names:
        if name != names[0]:  # only differences count
            yield [replace(now, fields={**now.fields, name: value}) for value in _BIASES]
    for name in names:
        yield [
            replace(now, temperatures={**now.temperatures, name: now.temperature * sharper})
            for sharper in _SHARPNESS
        ]


def differences(found: Mapping[Way, Quality]) -> dict[Way, PairedDifference]:
    """How much better both heads are than each alone, in nDCG, the same queries paired."""
    both = found["both"].ndcg
    return {
        way: bootstrap(both - quality.ndcg, seed=0)
        for way, quality in found.items()
        if way != "both"
    }
