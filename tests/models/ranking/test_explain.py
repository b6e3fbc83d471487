"""Explanations: contributions sum to the score, and the closed form equals deleting the row.

Scores without a row equal those of the history without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.snapshot import UNTRAINED, Snapshot
from models.encoder.history_encoder import EncoderCache, HistoryEncoder
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.explanation import scores_without
from models.ranking.scoring import score
from tests.support.pasts import (
    AT,
    ITEMS,
    WINDOW,
    Loop,
    basket_snapshot,
    drawn_snapshot,
    parts_without,
    pasts,
    reasons_of,
    similar_snapshot,
    ways,
    without_event,
)
from tests.support.small import DAY, catalogue, past, random_model, random_past
from tests.support.small import snapshot as small_snapshot

few = settings(max_examples=25, deadline=None, derandomize=True)
TARGETS = (0, 6, 13)


@pytest.fixture(scope="module", params=[drawn_snapshot, basket_snapshot, similar_snapshot])
def snapshot(request: pytest.FixtureRequest) -> Snapshot:
    made: Snapshot = request.param()
    return made


def without(whole: UserHistory, source: int) -> UserHistory:
    """The past without an event, or without profile entry -1 - source."""
    if source >= 0:
        return without_event(whole, source)
    content = whole.profile_content
    return replace(
        whole,
        profile_rows=np.delete(whole.profile_rows, -1 - source),
        profile_content=None if content is None else np.delete(content, -1 - source, axis=0),
    )


@few
@given(made=pasts(least=1), options=ways, target=st.integers(0, ITEMS - 1))
def test_contributions_add_up_to_the_score(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions, target: int
) -> None:
    """Σ contributions + prior = the score, as the parts add up to it.

    To 1e-4, however it was attended.
    """
    user = build_memory(snapshot, made, AT)
    scores = score(snapshot, user, np.array([target]), options)
    reasons = reasons_of(snapshot, user, target, 50, options)
    summed = math.fsum(reason.contribution for reason in reasons)
    assert sum(float(part[0]) for part in scores.parts.values()) == pytest.approx(
        float(scores.total[0]), abs=1e-4
    )
    whole = summed + float(scores.prior[0])
    assert whole == pytest.approx(float(scores.total[0]), abs=1e-4)
    sources = [reason.source for reason in reasons]
    assert len(set(sources)) == len(sources)
    assert set(sources) <= set(user.source.tolist())


@few
@given(made=pasts(least=1), options=ways, target=st.integers(0, ITEMS - 1))
def test_reasons_equal_the_loop(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions, target: int
) -> None:
    """Weights and contributions of all reasons equal the loop, in descending order."""
    user = build_memory(snapshot, made, AT)
    loop = Loop(snapshot, made, AT)
    alpha, _ = loop.attention(target, options)
    each, margin = loop.contributions(target, options)
    assume(margin > 1e-5)  # rounding decides otherwise which rows share
    place = {source: at for at, source in enumerate(user.source.tolist())}
    reasons = reasons_of(snapshot, user, target, 50, options)
    for reason in reasons:
        at = place[reason.source]
        assert reason.weight == pytest.approx(alpha[:, at].mean(), abs=1e-5)
        # 1 - α, by which is divided, may be 1e-3: float32 knows it to four digits then.
        assert reason.contribution == pytest.approx(each[at], abs=1e-4, rel=1e-4)
    named = [reason.contribution for reason in reasons]
    assert named == sorted(named, reverse=True)
    missing = set(place.values()) - {place[reason.source] for reason in reasons}
    assert all(alpha[:, at].sum() < 1e-6 and each[at] == 0 for at in missing)


@few
@given(
    made=pasts(least=1),
    options=ways,
    target=st.integers(0, ITEMS - 1),
    top=st.integers(1, 6),
)
def test_what_raises_the_score_is_named_before_what_lowers_it(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions, target: int, top: int
) -> None:
    """`top` takes the largest positive contributions first, then the most negative."""
    user = build_memory(snapshot, made, AT)
    loop = Loop(snapshot, made, AT)
    alpha, _ = loop.attention(target, options)
    contributed, margin = loop.contributions(target, options)
    assume(margin > 1e-5)  # rounding decides otherwise which rows share
    seen = (alpha.sum(0) > 0) | (contributed != 0)
    each = contributed[seen].tolist()
    raising = sorted((one for one in each if one > 0), reverse=True)
    lowering = sorted(one for one in each if one <= 0)
    wanted = sorted([*raising, *lowering][:top], reverse=True)
    found = [reason.contribution for reason in reasons_of(snapshot, user, target, top, options)]
    assert found == pytest.approx(wanted, abs=1e-4)


def without_row(
    snapshot: Snapshot, made: UserHistory, source: int, target: int, options: AttentionOptions
) -> float:
    """Attention and transitions over what is left of a past, in the states of the whole of it."""
    loop = Loop(snapshot, without(made, source), AT)
    loop.use_states_of(Loop(snapshot, made, AT), source)
    alpha, gain = loop.attention(target, options)
    return float((alpha * gain).sum()) + loop.transitions(target, options) + loop.similarity(target)


@few
@given(made=pasts(least=1), options=ways, target=st.integers(0, ITEMS - 1))
def test_the_closed_form_is_what_deleting_the_row_gives(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions, target: int
) -> None:
    """The closed form equals attention and transitions after deletion of the row, to 1e-4.

    What remains moves one place nearer to the present, so that places shift as they would. The
    encoder's states, of which the λ is a function too, are those of the whole past.
    """
    user = build_memory(snapshot, made, AT)
    for source, part in parts_without(snapshot, user, target, options).items():
        expected = without_row(snapshot, made, source, target, options)
        assert part == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("hard", [False, True])
def test_without_the_dominant_event_is_the_score_of_the_others(
    snapshot: Snapshot, hard: bool
) -> None:
    made = past([4, 7, 9], [0, DAY, 2 * DAY], [1, 1e30, 2])
    options = AttentionOptions(hard=hard)
    user = build_memory(snapshot, made, AT)
    reasons = reasons_of(snapshot, user, 6, 3, options)
    (reason,) = (reason for reason in reasons if reason.weight > 0.5)
    assert reason.source == 1
    assert reason.weight == pytest.approx(1, abs=1e-6)
    left = parts_without(snapshot, user, 6, options)[1]
    assert left == pytest.approx(without_row(snapshot, made, 1, 6, options), abs=1e-5)


def test_a_target_that_sees_only_itself_has_no_reasons(snapshot: Snapshot) -> None:
    """With exclude_self a history of the target alone has no reasons and attention 0."""
    user = build_memory(snapshot, past([3, 3], [0, DAY]), AT)
    options = AttentionOptions(exclude_self=True)
    assert score(snapshot, user, np.array([3]), options).attention.tolist() == [0]
    assert reasons_of(snapshot, user, 3, 5, options) == []
    assert len(reasons_of(snapshot, user, 4, 5, options)) == 2


def test_the_closed_form_is_computed_in_blocks(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = build_memory(snapshot, random_past(5, 9, ITEMS), AT)
    whole = parts_without(snapshot, user, 4)
    monkeypatch.setattr("models.ranking.explanation._BLOCK", 60)
    assert parts_without(snapshot, user, 4) == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("shape", [{"blocks": 0}, {"transitions_per_item": 0}])
def test_a_model_without_transitions_is_explained(shape: dict[str, int]) -> None:
    """Without transitions, contributions sum to the attention; the closed form is deletion."""
    snapshot = small_snapshot(ITEMS, random_model(11, window=WINDOW, **shape))
    made = random_past(5, 9, ITEMS)
    user = build_memory(snapshot, made, AT)
    for target in (2, 6):
        scores = score(snapshot, user, np.array([target]))
        reasons = reasons_of(snapshot, user, target, 50)
        summed = math.fsum(reason.contribution for reason in reasons)
        assert summed == pytest.approx(float(scores.attention[0]), abs=1e-4)
        for source, part in parts_without(snapshot, user, target).items():
            expected = without_row(snapshot, made, source, target, DEFAULT_OPTIONS)
            assert part == pytest.approx(expected, abs=1e-4)


# ---------------------------------------------------------------------------- leave one out


def expected(
    snapshot: Snapshot, made: UserHistory, target: int, options: AttentionOptions
) -> float:
    """The score of a target, in float64 and plain loops."""
    loop = Loop(snapshot, made, AT)
    alpha, gain = loop.attention(target, options)
    prior = float(snapshot.tables.prior[target])
    return (
        float((alpha * gain).sum())
        + loop.transitions(target, options)
        + loop.similarity(target)
        + prior
    )


def every(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions = DEFAULT_OPTIONS
) -> dict[Any, float]:
    """The scores of the targets without each row of the memory."""
    user = build_memory(snapshot, made, AT)
    return scores_without(snapshot, user, dict.fromkeys(user.source.tolist(), TARGETS), options)


@few
@given(made=pasts(least=1), options=ways)
def test_each_score_is_that_of_the_loop_over_the_rest(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions
) -> None:
    """Each leave-one-out score equals the loop over the remaining rows, to 1e-4."""
    found = every(snapshot, made, options)
    sources = build_memory(snapshot, made, AT).source.tolist()
    assert set(found) == {(source, target) for source in sources for target in TARGETS}
    for (source, target), got in found.items():
        less = without(made, source)
        assert got == pytest.approx(expected(snapshot, less, target, options), abs=1e-4)


@pytest.mark.parametrize("events", [1, 2, WINDOW, WINDOW + 1, WINDOW + 2, 4 * WINDOW])
@pytest.mark.parametrize("window", [1, 2, WINDOW, 8])
def test_leave_one_out_for_any_window_start(events: int, window: int) -> None:
    served = small_snapshot(ITEMS, random_model(11, window=window))
    made = random_past(events, events, ITEMS)
    for (source, target), got in every(served, made).items():
        less = build_memory(served, without_event(made, source), AT)
        only = score(served, less, np.array([target])).total
        assert got == pytest.approx(float(only[0]), abs=1e-4)


@few
@given(made=pasts(least=1), options=ways)
def test_leave_one_out_without_a_model(made: UserHistory, options: AttentionOptions) -> None:
    """Leave-one-out scores of the content model equal scoring the remaining rows."""
    served = Snapshot.build(UNTRAINED, None, catalogue(ITEMS), np.arange(ITEMS))
    for (source, target), got in every(served, made, options).items():
        less = build_memory(served, without(made, source), AT)
        assert got == pytest.approx(
            float(score(served, less, np.array([target]), options).total[0]), abs=1e-5
        )


def test_near_events_are_left_out_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """150 events within the window are left out in five branch passes, without re-encoding."""
    served = small_snapshot(ITEMS, random_model(11, window=200))
    user = build_memory(served, random_past(3, 150, ITEMS), AT)
    passes: list[int] = []
    branch = HistoryEncoder.branch

    def counted(self: HistoryEncoder, state: Any, shared: int, events: Any, *more: Any) -> Any:
        passes.append(len(events))
        return branch(self, state, shared, events, *more)

    def refused(_: HistoryEncoder, cache: EncoderCache, events: Any, *more: Any) -> Any:
        assert not len(events), "nothing is to be encoded from its beginning"
        return cache

    monkeypatch.setattr(HistoryEncoder, "branch", counted)
    monkeypatch.setattr(HistoryEncoder, "append", refused)
    targets: Mapping[int, list[int]] = {source: [0] for source in range(150)}
    assert len(scores_without(served, user, targets)) == 150
    assert passes == [32, 32, 32, 32, 22]


def test_events_before_the_window_are_left_out_by_one_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Histories without each of 60 events that the encoder has not read are encoded once."""
    served = small_snapshot(ITEMS, random_model(11, window=40))
    user = build_memory(served, random_past(3, 100, ITEMS), AT)
    assert user.encoded is not None
    assert user.encoded.first_item == 60
    encoded: list[tuple[int, int]] = []
    branch = HistoryEncoder.branch

    def counted(self: HistoryEncoder, state: Any, shared: int, events: Any, *more: Any) -> Any:
        encoded.append(tuple(events.shape[:2]))
        return branch(self, state, shared, events, *more)

    monkeypatch.setattr(HistoryEncoder, "branch", counted)
    targets: Mapping[int, list[int]] = {source: [0] for source in range(60)}
    assert len(scores_without(served, user, targets)) == 60
    assert encoded == [(1, 39)]
