"""Scores of targets that attend over a history, against a float64 loop."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.scoring import score
from tests.support.pasts import (
    AT,
    EVERY,
    ITEMS,
    TRAINED,
    WINDOW,
    Loop,
    basket_snapshot,
    drawn_snapshot,
    pasts,
    similar_snapshot,
    ways,
)
from tests.support.small import DAY, random_model, random_past
from tests.support.small import snapshot as small_snapshot


@pytest.fixture(scope="module", params=[drawn_snapshot, basket_snapshot, similar_snapshot])
def snapshot(request: pytest.FixtureRequest) -> Snapshot:
    made: Snapshot = request.param()
    return made


@settings(max_examples=40, deadline=None, derandomize=True)
@given(made=pasts(), options=ways, at=st.one_of(st.just(AT), st.integers(-DAY, 400 * DAY)))
def test_scores_equal_the_loop(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions, at: int
) -> None:
    """Every part of every target's score, for any past, way of attending and request time."""
    scores = score(snapshot, build_memory(snapshot, made, at), EVERY, options)
    loop = Loop(snapshot, made, at)
    assert scores.memory_rows == len(loop.rows)
    for target in range(ITEMS):
        alpha, gain = loop.attention(target, options)
        transitions = loop.transitions(target, options)
        assert float(scores.transitions[target]) == pytest.approx(transitions, abs=1e-4)
        assert float(scores.attention[target]) == pytest.approx((alpha * gain).sum(), abs=1e-4)
        if scores.similarity is not None:
            expected = loop.similarity(target)
            assert float(scores.similarity[target]) == pytest.approx(expected, abs=1e-5)
    assert ("similarity" in scores.parts) == bool(snapshot.model.config.similar_items)
    prior = snapshot.model.prior.detach().numpy()
    if (
        snapshot.model.recent_popularity_weight is not None
        and snapshot.model.statistics.recent_popularity is not None
    ):
        prior = (
            prior
            + (
                snapshot.model.recent_popularity_weight
                @ snapshot.model.statistics.recent_popularity
            )
            .detach()
            .numpy()[:TRAINED]
        )
    np.testing.assert_allclose(scores.prior[:TRAINED], prior, atol=1e-6)
    total = torch.stack(list(scores.parts.values())).sum(0)
    np.testing.assert_allclose(scores.total, total, atol=1e-5)


@pytest.mark.parametrize("shape", [{"blocks": 0}, {"transitions_per_item": 0}])
def test_a_part_that_the_model_has_not_is_zero(shape: dict[str, int]) -> None:
    """Without an encoder or without counts transitions are 0."""
    snapshot = small_snapshot(ITEMS, random_model(11, window=WINDOW, **shape))
    made = random_past(4, 9, ITEMS)
    scores = score(snapshot, build_memory(snapshot, made, AT), EVERY)
    loop = Loop(snapshot, made, AT)
    assert not scores.transitions.any()
    for target in range(ITEMS):
        alpha, gain = loop.attention(target, DEFAULT_OPTIONS)
        assert loop.transitions(target) == 0
        assert float(scores.attention[target]) == pytest.approx((alpha * gain).sum(), abs=1e-4)
    total = scores.attention + scores.prior
    np.testing.assert_allclose(scores.total, total, atol=1e-6)


def test_without_a_past_only_the_prior_speaks(snapshot: Snapshot) -> None:
    """Without history every part of a score but the prior is 0."""
    user = build_memory(snapshot, UserHistory.empty(), AT)
    scores = score(snapshot, user, EVERY)
    assert len(user) == scores.memory_rows == 0
    assert not scores.transitions.any()
    assert not scores.attention.any()
    np.testing.assert_array_equal(scores.total, scores.prior)
    assert score(snapshot, user, np.zeros(0, np.int64)).total.shape == (0,)


def test_scores_by_lists_and_exact_ones_are_concatenated(snapshot: Snapshot) -> None:
    """Targets that were scored exactly have the error zero beside others, in either order."""
    exact = score(snapshot, build_memory(snapshot, random_past(3, 20, ITEMS), AT), EVERY)
    error = torch.full_like(exact.total, 0.01)
    listed = exact._replace(mode="lists", relative_error=error)
    for one, other, wanted in (
        (exact, listed, [0 * error, error]),
        (listed, exact, [error, 0 * error]),
        (listed, listed, [error, error]),
    ):
        found = one.concat(other)
        assert found.mode == "lists"
        assert found.relative_error is not None
        assert torch.equal(found.relative_error, torch.cat(wanted))
        assert torch.equal(found.total, torch.cat([one.total, other.total]))
    assert exact.concat(exact).relative_error is None


def test_many_targets_are_scored_in_blocks(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = build_memory(snapshot, random_past(3, 6, ITEMS), AT)
    whole = score(snapshot, user, EVERY)
    monkeypatch.setattr("models.ranking.scoring._TARGET_BLOCK", 40)
    blocks = score(snapshot, user, EVERY)
    np.testing.assert_allclose(blocks.total, whole.total, atol=1e-5)
    assert blocks.mass.tolist() == [1.0] * ITEMS
