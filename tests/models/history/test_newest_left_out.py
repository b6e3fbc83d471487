"""Attention without each of the newest events, by factors and row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.data.windows import window_start
from models.history.user_history import UserHistory
from models.history.user_memory import NEWEST_LEFT_OUT, build_memory
from models.ranking import contributions
from models.ranking.contributions import attention_without_newest, leave_out_newest
from tests.support.pasts import (
    AT,
    ITEMS,
    WINDOW,
    Loop,
    drawn_snapshot,
    long_user,
    pasts,
    told_snapshot,
    without_event,
)
from tests.support.small import random_model, random_past
from tests.support.small import snapshot as small_snapshot

few = settings(max_examples=25, deadline=None, derandomize=True)
SNAPSHOTS = {"drawn": drawn_snapshot(), "told": told_snapshot()}


@few
@given(
    made=pasts(least=1),
    temperature=st.sampled_from([1.0, 0.3, 0.002]),
    exclude_self=st.booleans(),
    kind=st.sampled_from(list(SNAPSHOTS)),
)
def test_attention_without_an_event_is_that_of_the_loop(
    made: UserHistory, temperature: float, exclude_self: bool, kind: str
) -> None:
    snapshot = SNAPSHOTS[kind]
    user = build_memory(snapshot, made, AT)
    options = AttentionOptions(temperature=temperature, exclude_self=exclude_self)
    targets = [0, 7, ITEMS - 1]
    found = attention_without_newest(snapshot, user, torch.tensor(targets), options)
    whole = Loop(snapshot, made, AT)
    read = [row for row in whole.recent if whole.states[row] is not None][:NEWEST_LEFT_OUT]
    if found is None:
        assert not read
        return
    assert found.left_out.rows.tolist() == read
    start = window_start(len(whole.recent), WINDOW)
    for row, parts in zip(read, found.attention.tolist(), strict=True):
        less = Loop(snapshot, without_event(made, whole.sources[row]), AT)
        less.encode(less.recent[::-1], start)
        for target, part in zip(targets, parts, strict=True):
            weights, gains = less.attention(target, options)
            # Scores are divided by the temperature, and so are the digits of float32.
            assert part == pytest.approx((weights * gains).sum(), abs=1e-4 + 1e-5 / temperature)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_products_of_factors_are_the_attention_of_every_row(
    monkeypatch: pytest.MonkeyPatch, temperature: float, exclude_self: bool
) -> None:
    snapshot = small_snapshot(ITEMS, random_model(11, window=60))
    user = build_memory(snapshot, random_past(7, 300, ITEMS), AT)
    options = AttentionOptions(temperature=temperature, exclude_self=exclude_self)
    targets = torch.arange(ITEMS)
    by_factors = attention_without_newest(snapshot, user, targets, options)
    monkeypatch.setattr(contributions, "_by_factors", lambda *_: None)
    one_by_one = attention_without_newest(snapshot, user, targets, options)
    assert by_factors is not None
    assert one_by_one is not None
    assert by_factors.attention.shape == (NEWEST_LEFT_OUT, ITEMS)
    assert torch.allclose(by_factors.attention, one_by_one.attention, atol=1e-5)
    assert by_factors.attention.std(0).min() > 1e-3


def test_factors_too_small_for_float32_are_not_multiplied() -> None:
    """Where a target and the user each see another row alone, all rows are attended instead."""
    snapshot = SNAPSHOTS["drawn"]
    user = long_user(snapshot)
    targets = torch.arange(ITEMS)
    left_out = leave_out_newest(snapshot, user)
    assert left_out is not None
    cold = replace(DEFAULT_OPTIONS, temperature=0.002)
    assert contributions._by_factors(snapshot, user, left_out, targets, DEFAULT_OPTIONS) is not None
    assert contributions._by_factors(snapshot, user, left_out, targets, cold) is None
