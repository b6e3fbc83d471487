"""Scores of targets that attend over a past, against a loop; and coarse beside exact."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.catalogue.snapshot import Snapshot
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.scoring import Scores, head_indexes, score
from tests.support.pasts import (
    AT,
    EVERY,
    HEADS,
    ITEMS,
    TRAINED,
    WINDOW,
    Loop,
    basket_snapshot,
    drawn_snapshot,
    long_user,
    pasts,
    ways,
)
from tests.support.small import DAY, past, random_model, random_past
from tests.support.small import snapshot as small_snapshot

quick = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture(scope="module", params=[drawn_snapshot, basket_snapshot])
def snapshot(request: pytest.FixtureRequest) -> Snapshot:
    made: Snapshot = request.param()
    return made


@quick
@given(made=pasts(), options=ways)
def test_scores_equal_the_loop(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions
) -> None:
    """Every part of every target's score, for any past and any way of attending."""
    scores = score(snapshot, build_memory(snapshot, made, AT), EVERY, options)
    loop = Loop(snapshot, made, AT)
    assert scores.memory == len(loop.rows)
    for target in range(ITEMS):
        sequence, alpha, gain = loop.parts(target, options)
        transitions = loop.transitions(target, options)
        assert float(scores.sequence[target]) == pytest.approx(sequence, abs=1e-4)
        assert float(scores.transitions[target]) == pytest.approx(transitions, abs=1e-4)
        assert float(scores.attention[target]) == pytest.approx((alpha * gain).sum(), abs=1e-4)
    prior = snapshot.model.prior.detach().numpy()
    if snapshot.model.trend is not None and snapshot.model.lately is not None:
        prior = prior + (snapshot.model.trend @ snapshot.model.lately).detach().numpy()[:TRAINED]
    np.testing.assert_allclose(scores.prior[:TRAINED], prior, atol=1e-6)
    total = scores.sequence + scores.transitions + scores.attention + scores.prior
    np.testing.assert_allclose(scores.total, total, atol=1e-6)


@quick
@given(made=pasts(least=1), at=st.integers(-DAY, 400 * DAY))
def test_the_request_may_come_at_any_time(snapshot: Snapshot, made: UserHistory, at: int) -> None:
    """Before the newest event, within the horizon or years after it: every part as the loop's."""
    scores = score(snapshot, build_memory(snapshot, made, at), EVERY)
    loop = Loop(snapshot, made, at)
    for target in (0, 7, 13):
        sequence, alpha, gain = loop.parts(target, DEFAULT_OPTIONS)
        transitions = loop.transitions(target)
        assert float(scores.sequence[target]) == pytest.approx(sequence, abs=1e-4)
        assert float(scores.transitions[target]) == pytest.approx(transitions, abs=1e-4)
        assert float(scores.attention[target]) == pytest.approx((alpha * gain).sum(), abs=1e-4)


@pytest.mark.parametrize("shape", [{"blocks": 0}, {"followers": 0}])
def test_a_part_that_the_model_has_not_is_zero(shape: dict[str, int]) -> None:
    """Without an encoder neither sequence nor transitions, without followers no transitions."""
    snapshot = small_snapshot(ITEMS, random_model(11, window=WINDOW, **shape))
    made = random_past(4, 9, ITEMS)
    scores = score(snapshot, build_memory(snapshot, made, AT), EVERY)
    loop = Loop(snapshot, made, AT)
    assert not scores.transitions.any()
    assert bool(scores.sequence.any()) == ("blocks" not in shape)
    for target in range(ITEMS):
        sequence, alpha, gain = loop.parts(target, DEFAULT_OPTIONS)
        assert loop.transitions(target) == 0
        assert float(scores.sequence[target]) == pytest.approx(sequence, abs=1e-4)
        assert float(scores.attention[target]) == pytest.approx((alpha * gain).sum(), abs=1e-4)
    total = scores.sequence + scores.attention + scores.prior
    np.testing.assert_allclose(scores.total, total, atol=1e-6)


def test_without_a_past_only_the_prior_speaks(snapshot: Snapshot) -> None:
    """No rows, no attention, no sequence, no transitions, and no error."""
    user = build_memory(snapshot, UserHistory.empty(), AT)
    scores = score(snapshot, user, EVERY)
    assert len(user) == scores.memory == 0
    assert not scores.sequence.any()
    assert not scores.transitions.any()
    assert not scores.attention.any()
    np.testing.assert_array_equal(scores.total, scores.prior)
    assert score(snapshot, user, np.zeros(0, np.int64)).total.shape == (0,)


def test_no_targets_no_scores(snapshot: Snapshot) -> None:
    """An empty list of targets is answered with an empty list, in either mode."""
    user = build_memory(snapshot, random_past(1, 4, ITEMS), AT)
    for mode in ("exact", "coarse"):
        scores = score(snapshot, user, np.zeros(0, np.int32), AttentionOptions(mode=mode))
        assert scores.total.shape == scores.mass.shape == (0,)


def test_targets_may_repeat_and_come_in_any_order(snapshot: Snapshot) -> None:
    """Each place is answered for itself."""
    user = build_memory(snapshot, random_past(2, 6, ITEMS), AT)
    whole = score(snapshot, user, EVERY).total
    asked = np.array([3, 3, 14, 0, 3])
    np.testing.assert_allclose(score(snapshot, user, asked).total, whole[asked], atol=1e-6)


def test_many_targets_are_scored_in_blocks(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the block, the scores are the same."""
    user = build_memory(snapshot, random_past(3, 6, ITEMS), AT)
    whole = score(snapshot, user, EVERY)
    monkeypatch.setattr("models.ranking.scoring._TARGET_BLOCK", 40)
    blocks = score(snapshot, user, EVERY)
    np.testing.assert_allclose(blocks.total, whole.total, atol=1e-6)
    assert blocks.mass.tolist() == [1.0] * ITEMS


# ---------------------------------------------------------------------------- coarse


def close(one: Scores, other: Scores) -> None:
    for part in ("total", "sequence", "transitions", "attention", "prior"):
        np.testing.assert_allclose(getattr(one, part), getattr(other, part), atol=1e-5)


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("hard", [False, True])
def test_coarse_with_every_row_is_exact(snapshot: Snapshot, exclude_self: bool, hard: bool) -> None:
    """k = n, or more: the same scores, all of the mass, all visible rows kept."""
    user = long_user(snapshot, 60)
    way = AttentionOptions(exclude_self=exclude_self, hard=hard, temperature=0.7)
    whole = score(snapshot, user, EVERY, way)
    for k in (60, 1000):
        found = score(snapshot, user, EVERY, replace(way, mode="coarse", k=k))
        close(found, whole)
        assert found.mode == "coarse"
        assert whole.mode == "exact"
        np.testing.assert_allclose(found.mass, 1, atol=1e-6)
        assert found.within is not None
        assert found.within.shape == (ITEMS, HEADS, 60)


@pytest.mark.parametrize("given_indexes", [False, True])
def test_coarse_attends_over_the_best_rows_of_each_head(
    snapshot: Snapshot, given_indexes: bool
) -> None:
    """A flat index names the k largest logits; what is attended is the softmax over those."""
    made, k = random_past(7, 60, ITEMS), 8
    user = build_memory(snapshot, made, AT)
    options = AttentionOptions(mode="coarse", k=k)
    indexes = head_indexes(user.memory) if given_indexes else None
    found = score(snapshot, user, EVERY, options, indexes=indexes)
    assert found.within is not None
    assert (found.within.sum(2) == k).all()
    loop = Loop(snapshot, made, AT)
    for target in (0, 5, 14):
        _, alpha, gain = loop.parts(target, DEFAULT_OPTIONS)
        expected, mass = 0.0, 1.0
        for head in range(HEADS):
            top = np.argsort(-alpha[head], kind="stable")[:k]
            held = alpha[head, top].sum()
            assert set(top) == set(found.within[target, head].nonzero().flatten().tolist())
            expected += (alpha[head, top] * gain[head, top]).sum() / held
            mass = min(mass, held)
        assert float(found.attention[target]) == pytest.approx(expected, abs=1e-4)
        assert float(found.mass[target]) == pytest.approx(mass, abs=1e-4)


def test_a_target_keeps_no_row_it_cannot_see(snapshot: Snapshot) -> None:
    """Where fewer than k rows are visible, those are kept, and none in place of the missing."""
    user = build_memory(snapshot, past([3] * 8 + [5, 6], np.arange(10) * DAY), AT)
    options = AttentionOptions(mode="coarse", k=5, exclude_self=True)
    found = score(snapshot, user, np.array([3, 5]), options)
    assert found.within is not None
    for head in range(HEADS):
        assert found.within[0, head].nonzero().flatten().tolist() == [8, 9]
        assert int(found.within[1, head].sum()) == 5
        assert not found.within[1, head, 8]
    whole = score(snapshot, user, np.array([3]), AttentionOptions(exclude_self=True))
    np.testing.assert_allclose(found.attention[:1], whole.attention, atol=1e-5)


def test_long_memories_are_clustered(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number of rows the indexes are clustered; all clusters probed, they are exact."""
    user = long_user(snapshot, 400)
    options = AttentionOptions(mode="coarse", k=100)
    flat = score(snapshot, user, EVERY, options)
    monkeypatch.setattr("models.ranking.scoring._CLUSTERED_FROM", 300)
    full, few = (score(snapshot, user, EVERY, replace(options, probes=n)) for n in (20, 1))
    np.testing.assert_allclose(full.attention, flat.attention, atol=1e-4)
    assert full.mass.mean() > few.mass.mean()


def test_auto_is_exact_up_to_a_length(snapshot: Snapshot) -> None:
    """And coarse beyond; `exact` and `coarse` hold at any length."""
    user = long_user(snapshot, 50)
    for limit, mode in ((50, "exact"), (49, "coarse")):
        assert score(snapshot, user, EVERY, AttentionOptions(exact_up_to=limit)).mode == mode
    assert AttentionOptions(mode="exact", exact_up_to=1).resolve_mode(10) == "exact"
    assert AttentionOptions(mode="coarse").resolve_mode(1) == "coarse"
