"""Effects of rows on scores: exact ones equal deletion, estimates equal derivatives of the loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import models.ranking.effects
import models.recommender.item_similarity
import models.recommender.log_statistics
from models.catalogue.snapshot import Snapshot
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.collapsed_history import CollapsedHistory, collapsible_events
from models.history.event_shares import similarity_lost, similarity_shares
from models.history.user_history import UserHistory
from models.history.user_memory import NEWEST_LEFT_OUT, build_memory
from models.ranking.contributions import contributions
from models.ranking.effects import closed_form, effects_of
from models.ranking.encoder_slopes import encoder_slopes
from models.ranking.explain import Effects, Reason, explain
from models.ranking.leave_one_out import scores_without
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
    ((each,),) = effects_of(snapshot, user, [found], [[every]], options, exact=exact)
    return dict(zip(user.source.tolist(), each, strict=True))


@few
@given(made=pasts(least=1), options=ways)
def test_exact_effects_are_differences_to_the_score_without_the_row(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions
) -> None:
    """An exact effect is the score minus the score of the history without the row, to 1e-4."""
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
    monkeypatch.setattr(models.ranking.effects, "EXACT_EVENTS", least)
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
    for module in (models.recommender.item_similarity, models.recommender.log_statistics):
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
        shares = similarity_shares(served, served_by, torch.arange(7), torch.tensor([TARGET]))
        lost = similarity_lost(served, served_by, shares, torch.tensor([TARGET]))
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
    monkeypatch.setattr(models.ranking.effects, "EXACT_EVENTS", 0)


@pytest.mark.usefixtures("only_newest")
@few
@given(seed=st.integers(0, 1000), events=st.integers(1, 12))
def test_estimates_are_the_closed_form_and_the_slope(seed: int, events: int) -> None:
    """An estimated effect is what the row's own part loses plus the derivative by its gate."""
    served = small_snapshot(ITEMS, random_model(11, window=40))
    made = random_past(seed, NEWEST_LEFT_OUT + events, ITEMS)
    user = build_memory(served, made, AT)
    target = torch.tensor([TARGET])
    found = contributions(served, user, target)
    with torch.inference_mode():
        closed = closed_form(served, found, 0, np.arange(len(user.source)), DEFAULT_OPTIONS)
    slopes = encoder_slopes(served, user, target, DEFAULT_OPTIONS)[0]
    for source, (effect, is_exact) in effects(served, made).items():
        if not is_exact:
            assert effect == pytest.approx(float(closed[source] + slopes[source]), abs=1e-5)
    assert not all(is_exact for _, is_exact in effects(served, made).values())


@pytest.mark.usefixtures("only_newest")
@pytest.mark.parametrize("events", [120, 121])
def test_effects_before_the_window_are_those_of_an_earlier_beginning(events: int) -> None:
    """Estimates of events that the encoder has not read are near their exact effects.

    Both where the window moves without an event, at 121, and where it stays. The closed form alone,
    which keeps all states, is five times as far from them at least.
    """
    served = small_snapshot(ITEMS, random_model(11, window=40))
    missed, missed_by_closed_form = 0.0, 0.0
    for seed in range(3):
        made = random_past(seed, events, ITEMS)
        user = build_memory(served, made, AT)
        assert user.encoded is not None
        older = range(user.encoded.first_item)
        assert len(older) == {120: 80, 121: 90}[events]
        found = contributions(served, user, torch.tensor([TARGET]))
        closed = closed_form(served, found, 0, np.array(older), DEFAULT_OPTIONS).tolist()
        estimated, exact = effects(served, made), effects(served, made, exact=True)
        assert not any(is_exact for source, (_, is_exact) in estimated.items() if source < 79)
        for source in older:
            effect = exact[source][0]
            missed += abs(estimated[source][0] - effect)
            missed_by_closed_form += abs(closed[source] - effect)
    assert missed < missed_by_closed_form / 5


@pytest.mark.usefixtures("only_newest")
@pytest.mark.parametrize("exclude_self", [False, True])
def test_effects_in_a_long_history_are_those_of_every_event(exclude_self: bool) -> None:
    """Effects are near those over every event; the targets share one derivative of the encoder.

    Estimates of what it read take the older events as one row that the query does not change.
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
    every = explain(
        served, build_memory(served, made, at), rows, 3_000, options, effects="estimate"
    )
    assert passes == 1
    guessed = 0
    for named, all_named in zip(estimated, every, strict=True):
        wanted = {reason.source: reason for reason in all_named}
        for reason in named:
            other = wanted[reason.source]
            sloped = not reason.effect_is_exact and reason.source >= older.count
            assert reason.effect == pytest.approx(other.effect, abs=0.1 if sloped else 2e-4)
            assert reason.effect_is_exact == other.effect_is_exact
            guessed += sloped
    assert guessed > 3
    assert explained("exact")[1] == 0
