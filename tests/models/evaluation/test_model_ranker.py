"""Rankers of models compared with the model's own scores."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.catalogue.snapshot import Snapshot
from models.data.interactions import Interactions
from models.encoder.history_encoder import NO_REQUEST_TIME
from models.evaluation import model_ranker
from models.evaluation.full_ranking import Ranker
from models.evaluation.model_ranker import ModelRanker
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, build_memory
from models.ranking.scoring import score
from tests.support.ranker_contract import RankerContract
from tests.support.reference_model import ReferenceModel
from tests.support.small import DAY, TOLD, events_of, random_model
from tests.support.small import snapshot as small_snapshot
from tests.support.training import QUICK, content, drawn_log, train


@torch.inference_mode()
def at_no_time(snapshot: Snapshot, user: UserMemory) -> UserMemory:
    """The memory as a request has it whose time is unknown."""
    model, read = snapshot.model, user.encoded
    if read is None or not len(read.cache):
        return user
    never = torch.tensor(NO_REQUEST_TIME)
    state = model.user_states(read.cache.states[-1], read.cache.timestamps[-1], never)
    # What the memory keeps of its transitions is of its own user state.
    return replace(user, user_state=state, query=model.user_query(state), transitions=None)


class TestRecommenderRanker(RankerContract):
    """The contract, for a trained recommender."""

    tolerance = 1e-4

    @classmethod
    def fit(cls, log: Interactions) -> Ranker:
        config = replace(QUICK, epochs=40, batch_tokens=48)
        return ModelRanker(train(log, config).model, content(log.n_items))


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"blocks": 0},
        TOLD,
        TOLD | {"next_basket": True, "repeat_consumption": True, "similar_items": 5},
    ],
)
@pytest.mark.parametrize("gap", [None, 0, DAY, 5 * DAY])
def test_ranking_and_serving_agree(gap: int | None, shape: dict[str, int]) -> None:
    """The evaluated score equals the served one for the same history and time, to 1e-4.

    Also after more than the model's horizon of two days, where no time is told, and of events of
    types that the model knows and one that it does not.
    """
    model = random_model(5, window=10, **shape)
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
        memory = build_memory(snapshot, made, int(asked[user]))
        if gap is None:
            memory = at_no_time(snapshot, memory)
        expected = score(snapshot, memory, np.arange(12)).total
        np.testing.assert_allclose(got[user], expected, atol=1e-4)


@pytest.mark.parametrize("target_in_query", [True, False])
@pytest.mark.parametrize("window", [4, 8])
def test_every_event_is_attended_and_the_newest_window_has_states(
    window: int, target_in_query: bool
) -> None:
    model = random_model(7, window=window)
    reference = ReferenceModel(model, 3, window)
    vectors = [reference.vector(row, content(12)[row]) for row in range(12)]
    log = drawn_log(8, [window + 1, 4, 20, 3 * window], 12)
    ranker = ModelRanker(model, content(12), target_in_query=target_in_query)
    found = ranker.scores(log, np.arange(4, dtype=np.int32), None)
    for user in range(4):
        mine = events_of(log, user)
        rows, times = mine.items.tolist(), mine.timestamps.tolist()
        weights = mine.weights.tolist()
        attended = [vectors[row] for row in rows]
        pairs = zip(attended, weights, strict=True)
        read = [reference.read(vector, -1, weight) for vector, weight in pairs]
        states, user_state = reference.encode(read, times)
        for item in range(12):
            alpha, gain = reference.attention(
                vectors[item],
                attended,
                attended,
                user=user_state,
                states=states,
                distances=list(range(len(rows) - 1, -1, -1)),
                ages=[times[-1] - time for time in times],
                weights=weights,
                target_in_query=target_in_query,
            )
            expected = float((alpha * gain).sum()) + model.prior[item].item()
            expected += reference.transitions(user_state, rows[::-1], item)
            assert found[user, item] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("repeats", [True, False])
def test_in_two_stages_the_best_candidates_get_their_exact_scores(
    monkeypatch: pytest.MonkeyPatch, repeats: bool
) -> None:
    """The best to first order in the target's query are scored exactly, the others to first order.

    First order is the difference quotient by a factor of W_Q. Seen items are candidates where users
    take items again.
    """
    monkeypatch.setattr(model_ranker, "CANDIDATES", 3)
    model = random_model(7, window=4, repeat_consumption=repeats)
    log, users = drawn_log(8, [5, 3, 0, 9], 12), np.arange(4, dtype=np.int32)
    exact = ModelRanker(model, content(12)).scores(log, users, None)
    found = ModelRanker(model, content(12), two_stage=True).scores(log, users, None)
    near = ModelRanker(model, content(12), target_in_query=False).scores(log, users, None)
    moved = []
    for factor in (0.01, -0.01):
        scaled = copy.deepcopy(model)
        scaled.cross_attention.w_q.weight.data *= factor
        moved.append(ModelRanker(scaled, content(12)).scores(log, users, None))
    near += (moved[0] - moved[1]) / 0.02
    for user in range(4):
        order = near[user].copy()
        if not repeats:
            order[events_of(log, user).items] = -np.inf
        best = np.argsort(-order)[:3]
        expected = near[user].copy()
        expected[best] = exact[user, best]
        np.testing.assert_allclose(found[user], expected, atol=1e-3)
        np.testing.assert_allclose(found[user, best], exact[user, best], atol=1e-5)
    assert np.abs(exact - near).max() > 1e-2


def test_a_log_without_any_event_is_scored() -> None:
    model = random_model(7)
    log = drawn_log(8, [0, 0], 12)
    scores = ModelRanker(model, content(12)).scores(log, np.array([1, 0], np.int32), None)
    prior = model.prior.detach().numpy()
    np.testing.assert_allclose(scores, [prior, prior], atol=1e-6)


def test_many_users_are_ranked_in_request_order() -> None:
    model = random_model(7)
    log = drawn_log(9, list(np.random.default_rng(0).integers(0, 30, 60)), 12)
    ranker = ModelRanker(model, content(12))
    users = np.random.default_rng(1).permutation(60).astype(np.int32)
    together = ranker.scores(log, users, None)
    for place in range(0, 60, 7):
        alone = ranker.scores(log, users[place : place + 1], None)
        np.testing.assert_allclose(together[place], alone[0], atol=1e-4)
