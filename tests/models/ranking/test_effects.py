"""Effects of rows on scores: exact ones equal deletion, estimates equal derivatives of the loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.catalogue.snapshot import Snapshot
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.contributions import contributions
from models.ranking.effects import EXACT_NEWEST, closed_form, effects_of, encoder_slopes
from models.ranking.leave_one_out import scores_without
from models.ranking.scoring import score
from tests.support.pasts import AT, ITEMS, Loop, drawn_snapshot, pasts, ways
from tests.support.small import past, random_model, random_past
from tests.support.small import snapshot as small_snapshot

few = settings(max_examples=25, deadline=None, derandomize=True)
TARGET = 6


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


def test_effects_of_the_newest_events_are_never_estimated() -> None:
    """Without `explain_exact` the newest eight events and the profile have exact effects."""
    served = small_snapshot(ITEMS, random_model(11, window=40))
    made = random_past(5, 20, ITEMS)
    made = past(made.rows, np.arange(20) * 3600, profile_rows=np.array([3], np.int32))
    estimated, exact = effects(served, made), effects(served, made, exact=True)
    for source, (effect, is_exact) in estimated.items():
        assert is_exact == (source < 0 or source >= 20 - EXACT_NEWEST)
        if is_exact:
            assert effect == pytest.approx(exact[source][0], abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_slopes_equal_numeric_derivatives_of_the_loop(temperature: float) -> None:
    """The derivative by each gate equals a central difference of the float64 loop."""
    served = small_snapshot(ITEMS, random_model(11, window=40))
    made = random_past(5, 9, ITEMS)
    user = build_memory(served, made, AT)
    options = AttentionOptions(temperature=temperature)
    found = encoder_slopes(served, user, torch.tensor([TARGET]), options)[0]
    for event in range(9):
        up, down = (gated_score(served, made, options, event, step) for step in (1e-4, -1e-4))
        assert float(found[event]) == pytest.approx((up - down) / 2e-4, abs=1e-4)


def gated_score(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions, event: int, log_gate: float
) -> float:
    """Return the loop's score where one event of a history has a gate in the encoder."""
    loop = Loop(snapshot, made, AT)
    reference, times = loop.reference, made.timestamps.tolist()
    gates = [log_gate if at == event else 0.0 for at in range(len(times))]
    read = [
        reference.read(loop.items[row], type_, weight)
        for row, type_, weight in zip(
            made.rows.tolist(), made.types.tolist(), made.weights.tolist(), strict=True
        )
    ]
    states = reference.states(read, times, gates)
    loop.states = [*states]
    at = min(AT, times[-1] + int(reference.state["max_request_gap"]))
    loop.summary = reference.at_request(states[-1], times[-1], at)
    alpha, gain = loop.attention(TARGET, options)
    return float((alpha * gain).sum()) + loop.transitions(TARGET, options)


@few
@given(seed=st.integers(0, 1000), events=st.integers(1, 12))
def test_estimates_are_the_closed_form_and_the_slope(seed: int, events: int) -> None:
    """An estimated effect is what the row's own part loses plus the derivative by its gate."""
    served = small_snapshot(ITEMS, random_model(11, window=40))
    made = random_past(seed, EXACT_NEWEST + events, ITEMS)
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
