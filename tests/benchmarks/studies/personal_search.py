"""Personal search: ranks of users' next items, with the user's memory and without.

A case is a user's next item, held out, and the query is what that item's categories are called. It
is searched for as the service does, once for nobody and once for that user. What the user has had
already is passed over when the target's rank is counted, on both sides: the service leaves it in
an answer, but it cannot be the next item of who does not come back to items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.evaluation.full_ranking import PairedDifference, bootstrap, reciprocal_ranks
from models.evaluation.splits import Holdout
from models.ranking.matches import DEFAULTS, FieldMatches, SearchParameters
from models.ranking.scoring import score
from models.ranking.search import nearest, personal_bias, search
from models.recommender.artifact import TrainedModel
from models.training.presets import Preset
from service.domain.errors import ModelRejected
from service.domain.records import Item
from service.engine.search import RERANKED, match_text
from service.lab.protocols import EvaluationTask
from service.maintenance.search_calibration import build_snapshot
from service.snapshots.text_embeddings import EmbeddingCache
from service.training.train_and_publish import fit_model
from service.training.training_corpus import StageProgressCallback, TrainingCorpus
from tests.support import asking
from tests.support.small import events_of
from tests.support.snapshot_ranker import requester

Encode = Callable[[str], NDArray[np.float32]]
Ranks = NDArray[np.int64]  # [M] of the targets, from 0

# What `personal` is chosen from, and what it is where a request does not say.
GRID = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DEFAULT = asking.search(asking.who(), "").personal_weight
_EVERY = 20  # cases between two words of progress


class Cases(NamedTuple):
    """Held-out cases and their queries; items are rows of the catalogue."""

    holdout: Holdout
    queries: tuple[str, ...]  # [M]
    without_words: int  # cases left out, since nothing is known to ask for their targets by


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """Ranks of the targets of M cases."""

    nobody: Ranks
    memory: Mapping[float, Ranks]  # by what one standard deviation of the memory's scores is worth
    popularity: Mapping[float, Ranks]  # with the prior alone in the place of those scores

    def best(self, ranks: Mapping[float, Ranks]) -> float:
        """The worth by which the targets stood best, in MRR; the least of equals."""
        return max(ranks, key=lambda worth: (mrr(ranks[worth]), -worth))


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """The weight chosen on the validation cases, and the ranks of the test cases."""

    validation: Ranked
    test: Ranked
    chosen: float  # what `personal` should be by the validation cases
    chosen_popularity: float  # and what the same of popularity
    without_words: int  # test cases left out

    def gained(self, worth: float) -> PairedDifference:
        """In MRR on the test cases, by what is asked for a user rather than for nobody."""
        remembered = reciprocal_ranks(self.test.memory[worth])
        return bootstrap(remembered - reciprocal_ranks(self.test.nobody))

    def over_popularity(self, worth: float) -> PairedDifference:
        """The same over what popularity would do in the memory's place."""
        popular = reciprocal_ranks(self.test.popularity[self.chosen_popularity])
        return bootstrap(reciprocal_ranks(self.test.memory[worth]) - popular)


def mrr(ranks: Ranks) -> float:
    """The mean reciprocal rank."""
    return float(reciprocal_ranks(ranks).mean())


def measure(
    task: EvaluationTask,
    corpus: TrainingCorpus,
    items: Sequence[Item],
    embeddings: EmbeddingCache,
    preset: Preset,
    *,
    seed: int = 0,
    parameters: SearchParameters = DEFAULTS,
    told: StageProgressCallback | None = None,
) -> Measured:
    """Train without what is held out, choose by the validation cases, and judge by the test cases.

    Args:
        task: from `models.evaluation.splits`, of the corpus, with validation cases.
        corpus: whose log the task is of.
        items: the catalogue.
        embeddings: of texts and queries.
        preset: of the training.
        seed: of the training.
        parameters: what a match of a search is worth.
        told: called as work goes on.

    Raises:
        ModelRejected: when no case is left to choose or to judge by.
    """
    if task.validation is None:
        raise ModelRejected(f"task {task.name} has no validation cases to choose by")
    plan = preset.plan(task.train, corpus.content[task.items], task.validation, seed=seed)
    done = fit_model(plan, told)
    ids = tuple(corpus.item_ids[row] for row in task.items.tolist())
    counts = task.train.liked().item_counts()
    types = corpus.types[: done.model.config.n_event_types]
    trained = TrainedModel(done.model, ids, counts, embeddings.encoder.name, {}, types)
    catalogue = build_snapshot(items, embeddings, told).catalogue
    snapshot = Snapshot.build("trained", trained, catalogue, np.zeros(0, dtype=np.int64))
    validation, test = (
        cases_of(snapshot, holdout, ids, items) for holdout in (task.validation, task.test)
    )
    if not len(validation.holdout) or not len(test.holdout):
        raise ModelRejected("no held-out item has categories, which would be asked for")
    chosen_by = ranked(snapshot, embeddings.query, validation, parameters=parameters, told=told)
    judged_by = ranked(
        snapshot, embeddings.query, test, parameters=parameters, told=told, stage="test cases"
    )
    return Measured(
        chosen_by,
        judged_by,
        chosen_by.best(chosen_by.memory),
        chosen_by.best(chosen_by.popularity),
        test.without_words,
    )


def cases_of(
    snapshot: Snapshot, holdout: Holdout, item_ids: Sequence[str], items: Iterable[Item]
) -> Cases:
    """Held-out cases over a snapshot's rows, with the names of the targets' categories as queries.

    Args:
        snapshot: the catalogue.
        holdout: the cases, over rows of `item_ids`.
        item_ids: [N] of the holdout's items.
        items: the catalogue's, whose categories are known.
    """
    names = {item.item_id: " ".join(item.categories) for item in items}
    asked = [names.get(item_ids[target], "") for target in holdout.targets.tolist()]
    kept = np.array([bool(query.strip()) for query in asked], dtype=np.bool_)
    rows = snapshot.catalogue.rows(item_ids).astype(np.int32)
    log = holdout.history
    history = replace(log, items=rows[log.items], n_items=len(snapshot.catalogue))
    over = Holdout(holdout.users, rows[holdout.targets], holdout.timestamps, history).where(kept)
    queries = tuple(query for query, keep in zip(asked, kept.tolist(), strict=True) if keep)
    return Cases(over, queries, int(np.count_nonzero(~kept)))


def ranked(
    snapshot: Snapshot,
    encode: Encode,
    cases: Cases,
    *,
    grid: Sequence[float] = GRID,
    parameters: SearchParameters = DEFAULTS,
    told: StageProgressCallback | None = None,
    stage: str = "validation cases",
) -> Ranked:
    """Search for every case: for nobody, for the user, and by popularity in the user's place.

    The user is known by the history before the case; when the case happened is not told.

    Args:
        snapshot: what is searched, and the model.
        encode: a query to its vector [D].
        cases: from `cases_of` with the same snapshot.
        grid: what a standard deviation of the memory's scores may be worth, in logits.
        parameters: what a match is worth.
        told: called as work goes on.
        stage: what the work is called.
    """
    holdout, allowed = cases.holdout, snapshot.catalogue.servable
    nobody = np.zeros(len(holdout), dtype=np.int64)
    memory, popularity = (
        {worth: np.zeros(len(holdout), dtype=np.int64) for worth in grid} for _ in range(2)
    )
    for at, (user, target, query) in enumerate(
        zip(holdout.users.tolist(), holdout.targets.tolist(), cases.queries, strict=True)
    ):
        events = events_of(holdout.history, user)
        _, matches = match_text(query, snapshot, encode, allowed=allowed, parameters=parameters)
        known = requester(snapshot, events)
        near = nearest(matches, RERANKED) if len(known) else np.zeros(0, np.int64)
        scores = score(snapshot, known, near)
        nobody[at] = _rank(matches, None, target, events.items)
        for ranks, each in ((memory, scores), (popularity, scores._replace(total=scores.prior))):
            for worth in grid:
                bias = personal_bias(snapshot, each, near, worth)
                ranks[worth][at] = _rank(matches, bias, target, events.items)
        if told is not None and (at % _EVERY == 0 or at == len(holdout) - 1):
            told(stage, at + 1, len(holdout), None)
    return Ranked(nobody, memory, popularity)


def _rank(
    matches: FieldMatches, personal: NDArray[np.float32] | None, target: int, had: NDArray[np.int32]
) -> int:
    """The target's place among what is answered, from 0, less what was had; last if it is not."""
    catalogue = matches.catalogue
    rows = search(matches, limit=len(catalogue), personal=personal).rows
    place = np.flatnonzero(rows == target)
    before = rows[: place[0]] if len(place) else np.arange(len(catalogue) - 1)
    return int(np.count_nonzero(~np.isin(before, had)))
