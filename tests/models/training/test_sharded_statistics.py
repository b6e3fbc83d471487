"""Statistics of a log in three processes with users of their own, beside those of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import models.recommender.co_occurrence
import models.recommender.recent_popularity
from models.compute.device import SINGLE_PROCESS, Processes
from models.data.interactions import Interactions
from models.recommender.co_occurrence import (
    BASKET_WINDOW,
    SEQUENCE_WINDOW,
    SMALL_LOG_WINDOW,
    count_transitions,
    ease_similarity,
    ease_weights,
    transition_matrix,
)
from models.recommender.recent_popularity import RecentPopularity
from models.recommender.recommender import Recommender
from models.training.fit import fit_statistics, update_statistics
from models.training.log_profile import (
    first_interactions,
    has_repeat_consumption,
    hold_out,
    hold_out_rule,
    prediction_task,
    repeat_share,
    target_weights,
    tied_share,
)
from models.training.window_batch import HeldOutTransitions
from tests.support.shards import in_processes, shard_of
from tests.support.small import DAY
from tests.support.training import tiny

pytestmark = pytest.mark.verify

COUNT, ITEMS, USERS = 3, 23, 90


def drawn(seed: int, *, baskets: bool, uneven: bool) -> Interactions:
    """Users with repeats, dislikes and weights, in baskets or one by one.

    Uneven: of every three users the first has a few events and the second none.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 40, USERS)
    if uneven:
        lengths[0::COUNT] = rng.integers(0, 3, len(lengths[0::COUNT]))
        lengths[1::COUNT] = 0
    events = int(lengths.sum())
    times = rng.integers(0, 300 * DAY, events)
    return Interactions.from_columns(
        np.repeat(np.arange(USERS), lengths),
        (rng.beta(1, 3, events) * ITEMS).astype(np.int64),
        times // (60 * DAY) * (60 * DAY) if baskets else times,
        rng.uniform(0.2, 40, events).astype(np.float32),
        (rng.random(events) < 0.1).astype(np.int16),
        n_users=USERS,
        n_items=ITEMS,
        dislike_type=1,
    )


LOGS = {
    "sequences": drawn(0, baskets=False, uneven=False),
    "baskets": drawn(1, baskets=True, uneven=False),
    "uneven": drawn(2, baskets=True, uneven=True),
    "nothing": Interactions.from_columns([], [], [], n_users=USERS, n_items=ITEMS),
}


def of_the_log(log: Interactions) -> Iterator[tuple[str, Any]]:
    """Statistics that are of all events, the same in all processes."""
    history, cases = hold_out(log)
    yield "counts", log.total_item_counts()
    yield "shares", (repeat_share(log), tied_share(log), has_repeat_consumption(log))
    yield "rule", hold_out_rule(log).__name__
    yield "task", (prediction_task(log, cases), prediction_task(history))
    for window in (SEQUENCE_WINDOW, SMALL_LOG_WINDOW, BASKET_WINDOW):
        yield f"weights {window}", window.item_weights(log)
        for kept in (4, ITEMS):
            yield f"transitions {window} {kept}", count_transitions(log, kept, window)[:2]
    yield "matrix", transition_matrix(log, window=20, power=1.0).to_dense()
    yield "popularity", RecentPopularity(log)._tables
    yield "EASE", ease_weights(log)
    yield "similarity", tuple(ease_similarity(log))
    for basket in (False, True):
        torch.manual_seed(0)
        model = Recommender(tiny(ITEMS, next_basket=basket))
        fit_statistics(model, history)
        yield f"model {basket}", list(model.state_dict().values())
        update_statistics(model, history, log)
        yield f"updated model {basket}", list(model.state_dict().values())


def of_the_events(log: Interactions) -> Iterator[tuple[str, Any]]:
    """Statistics of each event, in the order of the log."""
    yield "items", log.items
    yield "target weights", target_weights(log)
    yield "first", first_interactions(log)
    for window in (SEQUENCE_WINDOW, SMALL_LOG_WINDOW):
        held_out = HeldOutTransitions(count_transitions(log, ITEMS, window), log)
        # A window of one event each, so that no other user's events are among the inputs.
        items = torch.from_numpy(log.items.astype(np.int64))[:, None]
        events = np.arange(len(log))[:, None]
        yield f"held out {window}", held_out.log_counts(items, events, None, ITEMS)[:, 0]


def statistics(shards: Processes) -> dict[str, tuple[Any, Any]]:
    """Both kinds of statistics of a shard of each log."""
    logs = {name: shard_of(log, shards) for name, log in LOGS.items()}
    return {name: (dict(of_the_log(log)), dict(of_the_events(log))) for name, log in logs.items()}


def in_many_chunks(shards: Processes) -> dict[str, tuple[Any, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.recommender.co_occurrence, "CHUNK", 4_000)
        patch.setattr(models.recommender.recent_popularity, "_BLOCK", 200)
        return statistics(shards)


def equal(found: Any, expected: Any) -> bool:
    """Whether values are the same, arrays and tensors bit by bit."""
    if isinstance(expected, tuple | list) and not isinstance(expected, str):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(expected, np.ndarray | torch.Tensor):
        return bool(np.array_equal(np.asarray(found), np.asarray(expected)))
    return bool(found == expected)


def test_statistics_of_shards_are_those_of_the_whole_log() -> None:
    expected = statistics(SINGLE_PROCESS)
    for index, found in enumerate(in_processes(COUNT, in_many_chunks)):
        for name, log in LOGS.items():
            of_log, of_events = expected[name]
            differing = [key for key in of_log if not equal(found[name][0][key], of_log[key])]
            assert differing == [], (name, index)
            mine = log.users % COUNT == index
            for key, values in of_events.items():
                assert equal(found[name][1][key], values[mine]), (name, key, index)
