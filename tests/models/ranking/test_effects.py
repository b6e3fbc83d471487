"""Effects of rows on scores: exact ones equal deletion, estimates equal derivatives of the loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import models.ranking.explanation
import models.recommender.co_occurrence
import models.recommender.recommender
from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.history.long_history import CollapsedHistory, collapsible_events
from models.history.user_history import UserHistory
from models.history.user_memory import NEWEST_LEFT_OUT, build_memory
from models.ranking.contributions import contributions, similarity_shares
from models.ranking.explanation import (
    Effects,
    Reason,
    TargetRows,
    closed_form,
    effects_of,
    encoder_slopes,
    explain,
    scores_without,
)
from models.ranking.scoring import score
from tests.support.pasts import AT, ITEMS, Loop, drawn_snapshot, pasts, ways
from tests.support.small import DAY, TOLD, past, random_model, random_past
from tests.support.small import snapshot as small_snapshot

few = settings(max_examples=25, deadline=None, derandomize=True)
TARGET = 6
MODELS: list[dict[str, Any]] = [
    {},
    TOLD,
    {"next_basket": True, "repeat_consumption": True},
    {"similar_items": 5},
]


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return drawn_snapshot()


def effects(
    snapshot: Snapshot,
    made: UserHistory,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    exact: bool = False,
) -> dict[int, tuple[float, bool]]:
    """Return the effect of every row of a memory on one target, by source."""
    user = build_memory(snapshot, made, AT)
    found = contributions(snapshot, user, torch.tensor([TARGET]), options)
    every = np.arange(len(user.source))
    (each,) = effects_of(
        snapshot, user, [TargetRows(found, 0, TARGET, every)], options, exact=exact
    )
    return dict(zip(user.source.tolist(), each, strict=True))


@few
@given(made=pasts(least=1), options=ways)
def test_exact_effects_are_differences_to_the_score_without_the_row(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions
) -> None:
    user = build_memory(snapshot, made, AT)
    total = float(score(snapshot, user, np.array([TARGET]), options).total[0])
    found = effects(snapshot, made, options, exact=True)
    less = scores_without(snapshot, user, {source: [TARGET] for source in found}, options)
    for source, (effect, is_exact) in found.items():
        assert effect == pytest.approx(total - less[source, TARGET], abs=1e-4)
        assert is_exact


@pytest.mark.parametrize("least", [19, 20])
def test_effects_of_the_newest_events_are_never_estimated(
    monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """Without `explain_exact` the newest eight events and the profile have exact effects.

    Where the encoder reads at most `EXACT_EVENTS`, all effects are exact.
    """
    monkeypatch.setattr(models.ranking.explanation, "EXACT_EVENTS", least)
    served = small_snapshot(ITEMS, random_model(11, window=40))
    made = random_past(5, 20, ITEMS)
    made = past(made.rows, np.arange(20) * 3600, profile_rows=np.array([3], np.int32))
    estimated, exact = effects(served, made), effects(served, made, exact=True)
    for source, (effect, is_exact) in estimated.items():
        assert is_exact == (least == 20 or source < 0 or source >= 20 - NEWEST_LEFT_OUT)
        if is_exact:
            assert effect == pytest.approx(exact[source][0], abs=1e-4)


@pytest.mark.parametrize("shape", [{}, {"blocks": 0}])
def test_without_an_event_the_next_one_counts_for_similarity(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, int]
) -> None:
    """Exact effects are differences of scores where histories exceed the depth of similarities."""
    for module in (models.recommender.co_occurrence, models.recommender.recommender):
        monkeypatch.setattr(module, "SIMILARITY_DEPTH", 6)
    served = small_snapshot(ITEMS, random_model(11, window=40, similar_items=5, **shape))
    moved = 0
    for seed in range(12):
        made = random_past(seed, 11, ITEMS)
        total = float(score(served, build_memory(served, made, AT), np.array([TARGET])).total[0])
        for source, (effect, is_exact) in effects(served, made).items():
            less = build_memory(served, made.without(source), AT)
            assert is_exact
            assert effect == pytest.approx(
                total - float(score(served, less, np.array([TARGET])).total[0]), abs=1e-4
            )
        served_by = build_memory(served, made, AT)
        shares, lost = similarity_shares(served, served_by, torch.tensor([TARGET]))
        moved += int((lost < 0).sum() + (shares == 0).logical_and(lost != 0).sum())
    assert moved > 0


@pytest.mark.parametrize("options", [{}, {"temperature": 0.3}, {"exclude_self": True}], ids=str)
@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: str(list(shape)))
def test_slopes_equal_numeric_derivatives_of_the_loop(
    shape: dict[str, Any], options: dict[str, Any]
) -> None:
    """The derivative by each gate equals a central difference of the float64 loop."""
    served = small_snapshot(ITEMS, random_model(11, window=40, **shape))
    made = random_past(5, 9, ITEMS)
    types = np.arange(9, dtype=np.int32) % 3 if "n_event_types" in shape else made.types
    rows = np.where(np.isin(np.arange(9), (2, 5)), TARGET, made.rows)
    made = replace(made, rows=rows, types=types)
    user, how = build_memory(served, made, AT), AttentionOptions(**options)
    found = encoder_slopes(served, user, torch.tensor([TARGET]), how)[0]
    for event in range(9):
        up, down = (gated_score(served, made, how, event, 1 + step) for step in (1e-4, -1e-4))
        assert float(found[event]) == pytest.approx((up - down) / 2e-4, abs=1e-4)


def gated_score(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions, event: int, gate: float
) -> float:
    """Return the loop's score where one event of a history has a gate in the encoder."""
    loop = Loop(snapshot, made, AT)
    reference, times = loop.reference, made.timestamps.tolist()
    gates = [gate if at == event else 1.0 for at in range(len(times))]
    read = [
        reference.read(loop.items[row], type_, weight)
        for row, type_, weight in zip(
            made.rows.tolist(), made.types.tolist(), made.weights.tolist(), strict=True
        )
    ]
    states = reference.states(read, times, gates)
    loop.states = [*states]
    at = min(AT, times[-1] + int(reference.state["statistics.max_request_gap"]))
    loop.user_state = reference.at_request(states[-1], times[-1], at)
    alpha, gain = loop.attention(TARGET, options)
    return float((alpha * gain).sum()) + loop.transitions(TARGET, options) + loop.similarity(TARGET)


@pytest.fixture
def only_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate the effects of few events as those of many."""
    monkeypatch.setattr(models.ranking.explanation, "EXACT_EVENTS", 0)


@pytest.mark.usefixtures("only_newest")
@pytest.mark.parametrize(("events", "older"), [(41, 10), (120, 80), (121, 90)])
def test_effects_count_that_the_window_moves(events: int, older: int) -> None:
    """Estimates are much nearer to exact effects than those of a window that stays.

    Without an event that the encoder has not read, and without any event just after a move.
    """
    served = small_snapshot(ITEMS, random_model(11, window=40))
    missed, missed_by_staying = np.zeros(2), np.zeros(2)
    for seed in range(3):
        made = random_past(seed, events, ITEMS)
        user = build_memory(served, made, AT)
        assert user.encoded is not None
        assert user.encoded.first_item == older
        target = torch.tensor([TARGET])
        found = contributions(served, user, target)
        closed = closed_form(served, found, 0, np.arange(events), DEFAULT_OPTIONS).tolist()
        slopes = [0.0] * older + encoder_slopes(served, user, target, DEFAULT_OPTIONS)[0].tolist()
        estimated, exact = effects(served, made), effects(served, made, exact=True)
        for source, (effect, is_exact) in estimated.items():
            if not is_exact:
                was_read = int(source >= older)
                staying = closed[source] + slopes[source]
                missed[was_read] += abs(effect - exact[source][0])
                missed_by_staying[was_read] += abs(staying - exact[source][0])
    assert missed_by_staying.all()
    assert missed[0] < missed_by_staying[0] / 2
    assert (missed[1] < 0.8 * missed_by_staying[1]) == (events != 120)


@pytest.mark.usefixtures("only_newest")
def test_a_heavy_event_before_the_window_moves_it_as_any_other() -> None:
    """An event of a thousand times the weight is not the one whose effect tells the others'."""
    served = small_snapshot(ITEMS, random_model(11, window=40))
    made = random_past(3, 120, ITEMS)
    weights = made.weights.copy()
    weights[79] *= 1_000
    made = replace(made, weights=weights)
    estimated, exact = effects(served, made), effects(served, made, exact=True)
    missed = [abs(estimated[source][0] - exact[source][0]) for source in range(79)]
    assert np.mean(missed) < 0.1 * np.mean([abs(exact[source][0]) for source in range(79)])


def test_a_window_that_moves_with_every_event_keeps_effects_exact() -> None:
    """A window of one event begins at the same event without one before it."""
    served = small_snapshot(ITEMS, random_model(11, window=1))
    made = random_past(3, 20, ITEMS)
    estimated, exact = effects(served, made), effects(served, made, exact=True)
    for source, (effect, is_exact) in estimated.items():
        assert is_exact
        assert effect == pytest.approx(exact[source][0], abs=1e-4)


@pytest.mark.usefixtures("only_newest")
@pytest.mark.parametrize("exclude_self", [False, True])
def test_effects_in_a_long_history_are_those_of_every_event(exclude_self: bool) -> None:
    """Effects are those over every event; the targets share one derivative of the encoder.

    Estimates of what it read take the older events as one row that the query does not change, and
    are as near to the exact effects as estimates over every event.
    """
    served = small_snapshot(ITEMS, random_model(11, window=40))
    encoder, made = served.model.encoder, random_past(3, 3_000, ITEMS)
    assert encoder is not None
    at, rows = int(made.timestamps[-1]) + DAY, np.array([0, 4, 11])
    older = CollapsedHistory(served, made, collapsible_events(3_000, 40), at)
    together = build_memory(served, made, at, collapsed=older)
    options = AttentionOptions(exclude_self=exclude_self)
    partial = score(served, together, rows, options).partial

    def explained(effects: Effects) -> tuple[list[list[Reason]], int]:
        with patch.object(encoder, "forward_gated", wraps=encoder.forward_gated) as gated:
            reasons = explain(served, together, rows, 50, options, partial=partial, effects=effects)
        return reasons, gated.call_count

    estimated, passes = explained("estimate")
    whole = build_memory(served, made, at)
    every = explain(served, whole, rows, 3_000, options, effects="estimate")
    assert passes == 1
    totals = score(served, whole, rows, options).total.tolist()
    read = dict.fromkeys(range(3_000 - 40, 3_000), rows.tolist())
    without = scores_without(served, whole, read, options)
    guessed: list[tuple[float, float, float]] = []
    for target, total, named, all_named in zip(
        rows.tolist(), totals, estimated, every, strict=True
    ):
        wanted = {reason.source: reason for reason in all_named}
        for reason in named:
            other = wanted[reason.source]
            assert reason.effect is not None
            assert other.effect is not None
            assert reason.effect_is_exact == other.effect_is_exact
            if not reason.effect_is_exact and reason.source >= 3_000 - 40:
                if reason.source < 3_000 - 16:
                    assert reason.effect == pytest.approx(other.effect, abs=0.03)
                exact = total - without[reason.source, target]
                guessed.append((reason.effect, other.effect, exact))
            else:
                assert reason.effect == pytest.approx(other.effect, abs=5e-5)
    assert len(guessed) > 3
    found, over_every, exactly = np.array(guessed).T
    assert np.abs(found - exactly).mean() < 1.2 * np.abs(over_every - exactly).mean()
    assert explained("exact")[1] == 0
