"""Leave-one-out scores: equal to scoring the history without the event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.snapshot import UNTRAINED, Snapshot
from models.encoder.history_encoder import EncoderCache, HistoryEncoder
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.explanation import scores_without
from models.ranking.scoring import score
from models.recommender.recommender import content_only_model
from tests.support.pasts import (
    AT,
    ITEMS,
    WINDOW,
    Loop,
    basket_snapshot,
    drawn_snapshot,
    pasts,
    similar_snapshot,
    ways,
    without_event,
)
from tests.support.small import catalogue, random_model, random_past
from tests.support.small import snapshot as small_snapshot

few = settings(max_examples=25, deadline=None, derandomize=True)
TARGETS = (0, 6, 13)


@pytest.fixture(scope="module", params=[drawn_snapshot, basket_snapshot, similar_snapshot])
def snapshot(request: pytest.FixtureRequest) -> Snapshot:
    made: Snapshot = request.param()
    return made


def without(whole: UserHistory, source: int) -> UserHistory:
    """The past without an event, or without profile entry -1 - source, by plain lists."""
    if source >= 0:
        return without_event(whole, source)
    left = [at for at in range(len(whole.profile_rows)) if at != -1 - source]
    content = whole.profile_content
    return UserHistory(
        whole.rows,
        whole.timestamps,
        whole.weights,
        whole.types,
        whole.visible,
        whole.vectors,
        whole.profile_rows[left],
        None if content is None else content[left],
    )


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
    assert content_only_model(8).encoder is None
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
