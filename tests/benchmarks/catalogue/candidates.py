"""Candidates for recommendation by index and by product: time, recall, and the crossover."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.catalogue.catalogue import Catalogue
from models.catalogue.snapshot import ENCODER_TIMES, INDEX_FROM, Snapshot, item_index
from models.encoder.event_bias import UNKNOWN
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, build_memory
from models.index import ann_index
from models.ranking.recommend import EXACT_WORK, INDEXED_CANDIDATES, candidates, coarse_query
from models.ranking.scoring import score
from models.recommender.artifact import TrainedModel
from tests.benchmarks.catalogue.enlarged import enlarged, moved
from tests.benchmarks.harness.timing import (
    ProgressCallback,
    Spread,
    alternate,
    no_progress,
)
from tests.benchmarks.workload.data import random_model

INDEXED = ENCODER_TIMES * INDEX_FROM  # items that are indexed for a model with an encoder
TOP = 20
_CONTENT = 8  # of the text vectors, which play no part here
_DAY = 86_400_000_000


@dataclass(frozen=True, slots=True)
class Catalogues:
    """One catalogue: finding candidates with the index and without, and what they miss."""

    own: bool  # the data set's; otherwise random, by a model without training
    copies: int  # of each of the data set's items; 1 = as it is
    items: int
    width: int  # dimensions of a key: an item's vector and its prior
    product: Spread  # seconds of the bare product of all keys with a query, and its top
    searched: Spread  # the bare index, times the product
    without: Spread  # `candidates` of a snapshot without an index, times the product
    indexed: Spread  # `candidates` of one with, times the product
    build: float  # seconds to index
    recall: float  # of the top 20 of full target attention, among the index's candidates
    recall_without: float  # the same of the exact product's
    users: int


@dataclass(frozen=True, slots=True)
class Work:
    """Scoring everything, beside scoring candidates."""

    own: bool
    items: int
    rows: int  # of the user's memory
    everything: Spread  # seconds
    ratio: Spread  # of candidates and their scores, times everything

    @property
    def pair(self) -> float:
        """Seconds for each pair of a target and a row."""
        return self.everything.median / (self.items * self.rows)


@dataclass(frozen=True, slots=True)
class CandidateResults:
    """All that was measured, and the constants it speaks of."""

    catalogues: Sequence[Catalogues]
    works: Sequence[Work]

    def crossover(self) -> int | None:
        """The least measured catalogue from which `candidates` is always faster with an index."""
        found = None
        for each in reversed([each for each in self.catalogues if not each.own]):
            if each.indexed.median >= each.without.median:
                break
            found = each.items
        return found

    def exact_work_seconds(self) -> float:
        """Seconds of `EXACT_WORK` pairs, at the median of the measured sizes."""
        return EXACT_WORK * float(np.median([each.pair for each in self.works]))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "index_from": INDEXED,
            "index_faster_from": self.crossover(),
            "exact_work": EXACT_WORK,
            "exact_work_seconds": self.exact_work_seconds(),
            "candidates": INDEXED_CANDIDATES,
            "catalogues": [
                {
                    "own": each.own,
                    "copies": each.copies,
                    "items": each.items,
                    "width": each.width,
                    "product_seconds": each.product.as_dict(),
                    "index_ratio": each.searched.as_dict(),
                    "candidates_without_index_ratio": each.without.as_dict(),
                    "candidates_with_index_ratio": each.indexed.as_dict(),
                    "build_seconds": each.build,
                    f"recall_of_top_{TOP}": each.recall,
                    f"recall_of_top_{TOP}_without_index": each.recall_without,
                    "users": each.users,
                }
                for each in self.catalogues
            ],
            "works": [
                {
                    "own": each.own,
                    "items": each.items,
                    "rows": each.rows,
                    "seconds": each.everything.as_dict(),
                    "candidates_ratio": each.ratio.as_dict(),
                    "seconds_a_pair": each.pair,
                }
                for each in self.works
            ],
        }


def measure(
    sizes: Sequence[int],
    rounds: int,
    *,
    histories: Sequence[int] = (50, 200, 1_000),
    users: int = 20,
    own: tuple[Snapshot, Sequence[UserMemory]] | None = None,
    enlarge: bool = False,
    progress: ProgressCallback = no_progress,
) -> CandidateResults:
    """Catalogues of `sizes` items by a model without training.

    Args:
        sizes: of the catalogues, growing.
        rounds: of each timing.
        histories: how many rows the memories of the timed users have.
        users: how many judge the recall.
        own: a snapshot and some memories of a data set, to be judged as well.
        enlarge: also judge by copies of its items, where it is trained: as many as make those of
            `sizes` that an index is for.
        progress: called with the number of sizes that are done.
    """
    catalogues, works = [], []
    for number, n in enumerate(sizes):
        progress(number, len(sizes))
        pair = _Pair.of(random_snapshot(n))
        memories = [random_memory(pair.bare, 200, seed) for seed in range(users)]
        catalogues.append(_catalogue(pair, memories, rounds, own=False))
        timed = [random_memory(pair.bare, m) for m in histories]
        works += [_work(pair, memory, rounds, own=False) for memory in timed]
    if own is not None:
        pair, memories = _Pair.of(own[0]), list(own[1])
        catalogues.append(_catalogue(pair, memories, rounds, own=True))
        works += [_work(pair, memory, rounds, own=True) for memory in memories[:2]]
        for copies in _copies(own[0], sizes) if enlarge else ():
            large = enlarged(own[0], copies)
            judges = moved(memories, own[0], large)
            found = _catalogue(_Pair.of(large), judges, rounds, own=True, copies=copies)
            catalogues.append(found)
    progress(len(sizes), len(sizes))
    return CandidateResults(catalogues, works)


def _copies(snapshot: Snapshot, sizes: Sequence[int]) -> list[int]:
    """Copies of each trained item in the smallest catalogues that reach these sizes."""
    n = snapshot.trained.model.config.n_items if snapshot.trained else 0
    wanted = {-(-size // n) for size in sizes if size >= INDEXED} if n > 1 else set()
    return sorted(wanted - {1})


def random_snapshot(items: int) -> Snapshot:
    """So many items without texts, by a model without training, and no index over them."""
    ids = tuple(str(number) for number in range(items))
    model = random_model(items, content=_CONTENT)
    trained = TrainedModel(model, ids, np.ones(items, dtype=np.int64), "none", {})
    empty = Catalogue.empty(_CONTENT)
    return Snapshot.build("random", trained, empty, np.zeros(0, np.int64), index_from=items + 1)


def random_memory(snapshot: Snapshot, rows: int, seed: int = 0) -> UserMemory:
    """The memory of someone who came upon items at random, half of them near one item."""
    generator = np.random.default_rng(seed)
    n = len(snapshot.has_vector)
    vectors = snapshot.tables.vectors
    near = torch.topk(vectors @ vectors[int(generator.integers(n))], min(n, 50)).indices.numpy()
    items = np.where(
        generator.random(rows) < 0.5, generator.choice(near, rows), generator.integers(0, n, rows)
    )
    times = np.sort(generator.integers(0, 365 * _DAY, rows))
    types = np.full(rows, UNKNOWN, np.int32)
    past = UserHistory(items.astype(np.int32), times, np.ones(rows, np.float32), types)
    return build_memory(snapshot, past, 366 * _DAY)


# ------------------------------------------------------------------------------ the parts


@dataclass(frozen=True, slots=True)
class _Pair:
    """One catalogue with an index over its items, and without."""

    bare: Snapshot
    indexed: Snapshot
    index: ann_index.CoarseIndex
    keys: Tensor  # [N, dim + 1] vectors and prior
    build: float  # seconds to index

    @classmethod
    @torch.inference_mode()
    def of(cls, snapshot: Snapshot) -> _Pair:
        tables = snapshot.tables
        keys = torch.cat([tables.vectors, tables.prior[:, None]], 1)
        started = time.process_time()
        index = item_index(tables)
        build = time.process_time() - started
        bare = replace(snapshot, index=None)
        indexed = replace(snapshot, index=index)
        return cls(bare, indexed, index, keys, build)

    @property
    def served(self) -> Snapshot:
        """The snapshot that a service would answer from."""
        return self.indexed if len(self.keys) >= INDEXED else self.bare


@torch.inference_mode()
def _catalogue(
    pair: _Pair, memories: Sequence[UserMemory], rounds: int, *, own: bool, copies: int = 1
) -> Catalogues:
    keys, known, index = pair.keys, pair.bare.has_vector, pair.index
    count = min(INDEXED_CANDIDATES, len(keys))
    user = memories[0]
    readout = coarse_query(pair.bare, user).readout
    query, row = torch.cat([readout, torch.ones(1)]), readout[None].numpy()
    timed = alternate(
        {
            "product": lambda: torch.topk(keys @ query, count),
            "index": lambda: index.search(row, count),  # it adds the prior itself
            "without": lambda: candidates(pair.bare, user, known, count),
            "with": lambda: candidates(pair.indexed, user, known, count),
        },
        rounds,
    )
    exact = [_best(pair.bare, memory) for memory in memories]
    return Catalogues(
        own,
        copies,
        len(keys),
        keys.shape[1],
        timed.seconds("product"),
        timed.ratio("index", "product"),
        timed.ratio("without", "product"),
        timed.ratio("with", "product"),
        pair.build,
        _recall(pair.indexed, memories, exact, count),
        _recall(pair.bare, memories, exact, count),
        len(memories),
    )


def _best(snapshot: Snapshot, user: UserMemory) -> NDArray[np.int64]:
    """The items that stand highest when all of them are scored."""
    rows = np.flatnonzero(snapshot.has_vector)
    totals = score(snapshot, user, rows).total
    best: NDArray[np.int64] = rows[torch.topk(totals, min(TOP, len(rows))).indices.numpy()]
    return best


def _recall(
    snapshot: Snapshot,
    memories: Sequence[UserMemory],
    exact: Sequence[NDArray[np.int64]],
    count: int,
) -> float:
    shares = [
        np.isin(best, candidates(snapshot, user, snapshot.has_vector, count)).mean()
        for user, best in zip(memories, exact, strict=True)
    ]
    return float(np.mean(shares))


def _work(pair: _Pair, user: UserMemory, rounds: int, *, own: bool) -> Work:
    snapshot, known = pair.served, pair.served.has_vector
    rows = np.flatnonzero(known)

    def some() -> object:
        return score(snapshot, user, candidates(snapshot, user, known, INDEXED_CANDIDATES))

    timed = alternate({"all": lambda: score(snapshot, user, rows), "some": some}, rounds)
    return Work(own, len(rows), len(user), timed.seconds("all"), timed.ratio("some", "all"))
