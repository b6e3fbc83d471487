"""Statistics that training counts from the log."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions
from models.recommender.co_occurrence import SMALL_LOG_WINDOW, count_transitions
from models.recommender.recommender import Recommender
from models.training.fit import fit_statistics, update_statistics
from models.training.window_batch import HeldOutTransitions
from tests.support.training import tiny
from tests.support.transition_logs import (
    ITEMS,
    counted,
    damped,
    histories,
    logs,
    quick,
    table,
)


def test_more_events_move_a_trained_prior_with_the_popularity() -> None:
    log = Interactions.from_columns([0, 0, 1], [0, 1, 0], [1, 2, 3], n_users=2, n_items=3)
    users, items, times = [0, 0, 0, 1, 1], [0, 1, 2, 0, 2], [1, 2, 4, 3, 5]
    longer = Interactions.from_columns(users, items, times, n_users=2, n_items=3)
    model, counted = Recommender(tiny(3)), Recommender(tiny(3))
    fit_statistics(model, log)
    fit_statistics(counted, longer)
    trained = torch.tensor([0.5, -0.25, 2.0])
    with torch.no_grad():
        model.prior.add_(trained)
        model.new_prior.add_(1)
    new_prior = model.new_prior.item()
    update_statistics(model, log, longer)
    # Events by item, 1 added: 3, 2, 1 of mean 2; then 3, 2, 3 of mean 8 / 3.
    expected = [math.log(3 / (8 / 3)), math.log(2 / (8 / 3)), math.log(3 / (8 / 3))]
    assert (model.prior - trained).tolist() == pytest.approx(expected, abs=1e-6)
    assert model.new_prior.item() == new_prior
    for name, buffer in counted.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name]), name


def rectangle(log: Interactions, spans: list[tuple[int, int]]) -> tuple[Tensor, NDArray[np.int64]]:
    """Items and events [B, L] of stretches of one user each; padding reads the last event again."""
    length = max(end - first for first, end in spans)
    events = np.array([
        [min(first + at, end - 1) for at in range(length)] for first, end in spans
    ])  # fmt: skip
    return torch.from_numpy(log.items[events].astype(np.int64)), events


def stretches(log: Interactions, data: st.DataObject) -> list[tuple[int, int]]:
    """Draw windows of one user each, with any start."""
    users = [user for user in range(log.n_users) if log.lengths[user]]
    spans = []
    for user in data.draw(st.lists(st.sampled_from(users), min_size=1, max_size=3)):
        begin, end = int(log.offsets[user]), int(log.offsets[user + 1])
        first = data.draw(st.integers(begin, end - 1))
        spans.append((first, data.draw(st.integers(first + 1, end))))
    return spans


def expected_at(log: Interactions, most: int, first: int, place: int) -> list[float]:
    """log(1 + 2F) of every item at an event of a window, counted in a log without its user.

    Of the pairs that were kept: what others hold of another is not known.
    """
    kept = table(count_transitions(log, most))
    user = int(log.users[first])
    others = counted([items for other, items in enumerate(histories(log)) if other != user])
    totals = [0.0] * ITEMS
    for k in range(min(8, place + 1)):
        for target in range(ITEMS):
            pair = (int(log.items[first + place - k]), target)
            if pair in kept:
                totals[target] += 0.3**k * others.get(pair, 0.0)
    return [math.log1p(2 * total) for total in totals]


@quick
@given(log=logs().filter(len), data=st.data())
def test_small_logs_leave_out_the_damped_pairs_of_the_user(
    log: Interactions, data: st.DataObject
) -> None:
    spans = stretches(log, data)
    items, events = rectangle(log, spans)
    counting = HeldOutTransitions(count_transitions(log, ITEMS, SMALL_LOG_WINDOW), log)
    found = counting.log_counts(items, events, None, ITEMS)
    for row, (first, end) in enumerate(spans):
        user = int(log.users[first])
        others = [items for other, items in enumerate(histories(log)) if other != user]
        counts = damped(counted(others, power=1), log)
        for place in range(end - first):
            newest = [int(log.items[first + place - k]) for k in range(min(32, place + 1))]
            expected = [
                math.log1p(
                    2
                    * sum(0.7**k * counts.get((item, target), 0.0) for k, item in enumerate(newest))
                )
                for target in range(ITEMS)
            ]
            np.testing.assert_allclose(found[row, place], expected, atol=1e-5)


@quick
@given(log=logs().filter(len), most=st.integers(1, ITEMS), data=st.data())
def test_each_position_counts_what_others_did(
    log: Interactions, most: int, data: st.DataObject
) -> None:
    spans = stretches(log, data)
    items, events = rectangle(log, spans)
    counting = HeldOutTransitions(count_transitions(log, most), log)
    found = counting.log_counts(items, events, None, ITEMS)
    assert found.shape == (*items.shape, ITEMS)
    for row, (first, end) in enumerate(spans):
        for place in range(end - first):
            expected = expected_at(log, most, first, place)
            np.testing.assert_allclose(found[row, place], expected, atol=1e-5)


@quick
@given(log=logs().filter(len), most=st.integers(1, ITEMS), data=st.data())
def test_columns_may_be_of_some_items_only(
    log: Interactions, most: int, data: st.DataObject
) -> None:
    spans = stretches(log, data)
    items, events = rectangle(log, spans)
    chosen = data.draw(st.lists(st.integers(0, ITEMS - 1), unique=True, min_size=1))
    column = torch.full((ITEMS + 1,), len(chosen))
    column[torch.tensor(chosen)] = torch.arange(len(chosen))
    counting = HeldOutTransitions(count_transitions(log, most), log)
    found = counting.log_counts(items, events, column, len(chosen))
    whole = counting.log_counts(items, events, None, ITEMS)
    np.testing.assert_allclose(found, whole[:, :, chosen], atol=1e-6)
