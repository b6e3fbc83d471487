"""The snapshot ranker: ranker contract, agreement with ModelRanker, and untrained items."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.catalogue.catalogue import Catalogue
from models.catalogue.item_values import ItemEntry
from models.catalogue.snapshot import Snapshot
from models.data.interactions import Interactions
from models.data.vocabulary import Vocabulary
from models.evaluation.full_ranking import Ranker
from models.evaluation.model_ranker import ModelRanker
from models.recommender.artifact import TrainedModel
from tests.support.ranker_contract import RankerContract
from tests.support.reference_model import ReferenceModel
from tests.support.small import DAY, DIMENSION, encode, events_of, random_model
from tests.support.small import snapshot as small_snapshot
from tests.support.snapshot_ranker import SnapshotRanker
from tests.support.training import QUICK, content, drawn_log, train


class TestSnapshotRanker(RankerContract):
    """The contract, for a trained model in a snapshot."""

    tolerance = 1e-4

    @classmethod
    def fit(cls, log: Interactions) -> Ranker:
        config = replace(QUICK, epochs=40, batch_tokens=48)
        model = train(log, config).model
        ids = tuple(f"i{row}" for row in range(log.n_items))
        entries = [
            ItemEntry(id_, embedding=text)
            for id_, text in zip(ids, content(log.n_items), strict=True)
        ]
        catalogue = Catalogue.empty(DIMENSION, Vocabulary(ids)).updated(entries, [], encode)
        made = TrainedModel(model, ids, log.item_counts(), "fake", {})
        return SnapshotRanker(Snapshot.build("v", made, catalogue, log.item_counts()))


@pytest.mark.parametrize("gap", [None, DAY])
@pytest.mark.parametrize("blocks", [2, 0])
def test_scores_equal_the_model_ranker(gap: int | None, blocks: int) -> None:
    """For trained items the scores equal those of ModelRanker, with and without a time."""
    model = random_model(5, window=10, blocks=blocks)
    snapshot = small_snapshot(12, model)
    log = drawn_log(6, [10, 1, 4, 0, 7], 12)
    users = np.array([4, 0, 3, 1], dtype=np.int32)
    ends = np.array([events_of(log, user).timestamps.max(initial=0) for user in users])
    times = None if gap is None else ends + gap
    fast = ModelRanker(model, snapshot.catalogue.content).scores(log, users, times)
    np.testing.assert_allclose(SnapshotRanker(snapshot).scores(log, users, times), fast, atol=1e-4)


def test_an_item_never_trained_is_scored_by_its_text() -> None:
    """An untrained item is scored by its projected text, with the prior of new items."""
    model = random_model(3)
    snapshot = small_snapshot(15, model)  # twelve were trained
    reference = ReferenceModel(model, 3)
    texts = snapshot.catalogue.content
    drawn = drawn_log(4, [6], 15)
    log = replace(drawn, weights=np.ones(6, dtype=np.float32))
    mine = events_of(log, 0)
    scores = SnapshotRanker(snapshot).scores(log, np.zeros(1, np.int32), mine.timestamps[-1:])
    vectors = [reference.vector(row if row < 12 else -1, texts[row]) for row in range(15)]
    items, times = mine.items.tolist(), mine.timestamps.tolist()
    prior = model.new_prior.item()
    read = [vectors[row] for row in items]
    states, user_state = reference.encode(read, times, times[-1])
    for item in (12, 13, 14):
        alpha, gain = reference.attention(
            vectors[item],
            read,
            read,
            user=user_state,
            states=states,
            distances=list(range(5, -1, -1)),
            ages=[times[-1] - time for time in times],
            weights=[1.0] * 6,
        )
        expected = float((alpha * gain).sum()) + prior
        assert scores[0, item] == pytest.approx(expected, abs=1e-4)


def test_item_without_training_or_text_scores_minus_infinity() -> None:
    """An item with neither training nor text scores -inf."""
    snapshot = small_snapshot(12)
    bare = Snapshot.build(
        "v",
        snapshot.trained,
        snapshot.catalogue.with_items(["unheard of"]),
        np.zeros(0, np.int64),
    )
    log = drawn_log(4, [6], 13)
    scores = SnapshotRanker(bare).scores(log, np.zeros(1, np.int32), None)
    assert scores[0, 12] == -np.inf
    assert np.isfinite(scores[0, :12]).all()
