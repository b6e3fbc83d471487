"""The recommender as a ranker: the contract, and agreement with what is served."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.data.interactions import Interactions
from models.evaluation.full_ranking import Ranker
from models.evaluation.model_ranker import ModelRanker
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.scoring import score
from tests.support.ranker_contract import RankerContract
from tests.support.reference_model import ReferenceModel, window_start
from tests.support.small import DAY, TOLD, events_of, newest_events, random_model
from tests.support.small import snapshot as small_snapshot
from tests.support.training import QUICK, content, drawn_log, train


class TestRecommenderRanker(RankerContract):
    """The contract, for a trained recommender."""

    tolerance = 1e-4

    @classmethod
    def fit(cls, log: Interactions) -> Ranker:
        config = replace(QUICK, epochs=40, batch_tokens=48)
        return ModelRanker(train(log, config).model, content(log.n_items))


@pytest.mark.parametrize(
    "shape", [{}, TOLD, TOLD | {"next_basket": True, "repeat_consumption": True}]
)
@pytest.mark.parametrize("gap", [None, 0, DAY, 5 * DAY])
def test_ranking_and_serving_agree(gap: int | None, shape: dict[str, int]) -> None:
    """The evaluated score equals the served one for the same history and time, to 1e-4.

    Also after more than the model's horizon of two days, where no time is told, and of events of
    types that the model knows and one that it does not.
    """
    model = random_model(5, window=10, **shape)
    assert model.encoder is not None
    snapshot = small_snapshot(12, model)
    ranker = ModelRanker(model, snapshot.catalogue.content)
    log = drawn_log(6, [10, 1, 4, 0, 7], 12)
    types = np.random.default_rng(6).integers(-1, 4, len(log)).astype(np.int16)
    log = replace(log, types=types, dislike_type=1)
    users = np.arange(5, dtype=np.int32)
    mine = [events_of(log, user) for user in range(5)]
    last = [int(each.timestamps[-1]) if len(each.items) else 0 for each in mine]
    asked = np.array(last) + (gap or 0)
    got = ranker.scores(log, users, None if gap is None else asked)
    for user, each in enumerate(mine):
        known = each.types.astype(np.int32)
        made = UserHistory(each.items, each.timestamps, each.weights, types=known)
        summary = None
        if gap is None:
            read = build_memory(snapshot, made, 0).encoded
            assert read is not None
            with torch.inference_mode():
                summary = model.encoder.user_state(read.state)
        memory = build_memory(snapshot, made, int(asked[user]), user_state=summary)
        expected = score(snapshot, memory, np.arange(12)).total
        np.testing.assert_allclose(got[user], expected, atol=1e-4)


@pytest.mark.parametrize("window", [4, 8])
def test_the_ranker_reads_the_last_window(window: int) -> None:
    """Long histories score as their newest window alone."""
    model = random_model(7, window=window)
    ranker = ModelRanker(model, content(12))
    lengths = [window + 1, 4, 20, 3 * window]
    log = drawn_log(8, lengths, 12)
    read = [length - window_start(length, window) for length in lengths]
    users = np.arange(4, dtype=np.int32)
    whole = ranker.scores(log, users, None)
    for user in range(4):
        last = ranker.scores(newest_events(log, read[user]), users[user : user + 1], None)
        np.testing.assert_allclose(whole[user], last[0], atol=1e-5)


def test_without_attention_the_rest_is_ranked() -> None:
    """Without attention the scores lack exactly the attention part of the float64 loop."""
    model = random_model(9)
    log = drawn_log(10, [6, 3], 12)
    users = np.arange(2, dtype=np.int32)
    found = [
        ModelRanker(model, content(12), attention=attention).scores(log, users, None)
        for attention in (True, False)
    ]
    reference = ReferenceModel(model, 3)
    vectors = [reference.vector(row, content(12)[row]) for row in range(12)]
    for user in range(2):
        mine = events_of(log, user)
        rows, times = mine.items.tolist(), mine.timestamps.tolist()
        for item in range(12):
            alpha, gain = reference.attention(
                vectors[item],
                [vectors[row] for row in rows],
                [vectors[row] for row in rows],
                distances=list(range(len(rows) - 1, -1, -1)),
                ages=[times[-1] - time for time in times],
                weights=mine.weights.tolist(),
            )
            attended = found[0][user, item] - found[1][user, item]
            assert attended == pytest.approx(float((alpha * gain).sum()), abs=1e-4)


def test_a_log_without_any_event_is_scored() -> None:
    """Without any event every user's scores are the prior."""
    model = random_model(7)
    log = drawn_log(8, [0, 0], 12)
    scores = ModelRanker(model, content(12)).scores(log, np.array([1, 0], np.int32), None)
    prior = model.prior.detach().numpy()
    np.testing.assert_allclose(scores, [prior, prior], atol=1e-6)


def test_many_users_are_ranked_in_request_order() -> None:
    """Scores come in the order of the given users, equal to those of each user alone."""
    model = random_model(7)
    log = drawn_log(9, list(np.random.default_rng(0).integers(0, 30, 60)), 12)
    ranker = ModelRanker(model, content(12))
    users = np.random.default_rng(1).permutation(60).astype(np.int32)
    together = ranker.scores(log, users, None)
    for place in range(0, 60, 7):
        alone = ranker.scores(log, users[place : place + 1], None)
        np.testing.assert_allclose(together[place], alone[0], atol=1e-4)
