"""What follows what: counts against loops over pairs, and a user's own pairs really taken out."""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions
from models.recommender.transition_counts import (
    HeldOutTransitions,
    OwnTransitions,
    TransitionCounts,
    top_transitions,
    transition_counts,
    transition_shares,
    transition_sums,
)
from tests.support.small import random_followers

ITEMS = 7
Counts = dict[tuple[int, int], float]

quick = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def logs(draw: st.DrawFn) -> Interactions:
    """A few users, some without events, some longer than the window, who take items again.

    Of some logs a third of the events are dislikes.
    """
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 5, 9, 30]), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    return Interactions.from_columns(
        np.repeat(np.arange(len(lengths)), lengths),
        rng.integers(0, draw(st.integers(1, ITEMS)), sum(lengths)),
        np.arange(sum(lengths)),
        types=rng.integers(0, 3, sum(lengths)),
        n_users=len(lengths),
        n_items=ITEMS,
        dislike_type=draw(st.sampled_from([-1, 1])),
    )


def counted(histories: Sequence[Sequence[tuple[int, bool]]]) -> Counts:
    """1 / distance² over every pair of events of one user at most 20 apart, the later a liked."""
    counts: Counts = defaultdict(float)
    for events in histories:
        for i in range(len(events)):
            for j in range(i + 1, min(len(events), i + 21)):
                if events[j][1]:
                    counts[events[i][0], events[j][0]] += 1 / (j - i) ** 2
    return counts


def history(log: Interactions, user: int) -> list[tuple[int, bool]]:
    """A user's items, and whether each was liked."""
    events = log.user(user)
    liked = [log.dislike_type < 0 or type_ != log.dislike_type for type_ in events.types.tolist()]
    return list(zip(events.items.tolist(), liked, strict=True))


def histories(log: Interactions) -> list[list[tuple[int, bool]]]:
    return [history(log, user) for user in range(log.n_users)]


def table(kept: TransitionCounts) -> Counts:
    """The counts that were kept; each pair must be there once."""
    found: Counts = {}
    for row in range(len(kept.items)):
        pairs = zip(kept.items[row].tolist(), kept.counts[row].tolist(), strict=True)
        for column, count in pairs:
            if column == len(kept.items):
                assert count == 0
            else:
                assert (row, column) not in found
                found[row, column] = count
    return found


# ---------------------------------------------------------------------------- counting


@quick
@given(log=logs())
def test_counts_equal_a_loop_over_all_pairs(log: Interactions) -> None:
    """Of any log, with everything kept; items that come again follow themselves."""
    found, expected = table(transition_counts(log, ITEMS)), counted(histories(log))
    assert found.keys() == expected.keys()
    for pair, count in expected.items():
        assert found[pair] == pytest.approx(count, rel=1e-5)


def test_counts_by_hand() -> None:
    """One user who takes 0, 1, 0, 2: pairs at distances 1, 2 and 3."""
    log = Interactions.from_columns([0] * 4, [0, 1, 0, 2], range(4), n_users=1, n_items=3)
    found = table(transition_counts(log, 3))
    assert found == pytest.approx(
        {(0, 1): 1, (0, 0): 1 / 4, (0, 2): 1 + 1 / 9, (1, 0): 1, (1, 2): 1 / 4}
    )


@quick
@given(log=logs(), most=st.integers(1, ITEMS + 2))
def test_the_largest_are_kept(log: Interactions, most: int) -> None:
    """As many of each item as asked, largest first, none larger left out; the rest is nothing."""
    kept = transition_counts(log, most)
    assert kept.items.shape == kept.counts.shape == (ITEMS, most)
    assert (kept.items.dtype, kept.counts.dtype) == (torch.int32, torch.float32)
    found, every = table(kept), counted(histories(log))
    for row in range(ITEMS):
        there = sorted((count for (item, _), count in every.items() if item == row), reverse=True)
        mine = [count for (item, _), count in found.items() if item == row]
        assert mine == pytest.approx(there[:most], rel=1e-5)
        assert mine == sorted(mine, reverse=True)
    for pair, count in found.items():
        assert count == pytest.approx(every[pair], rel=1e-5)


def test_no_followers_at_all_cannot_be_kept() -> None:
    """`most` counts from 1; a log without events has none to keep."""
    empty = Interactions.from_columns([], [], [], n_users=2, n_items=3)
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        transition_counts(empty, 0)
    assert table(transition_counts(empty, 2)) == {}


# ---------------------------------------------------------------------------- after a user's items


def loop(kept: TransitionCounts, items: Sequence[int], target: int) -> list[float]:
    """What each of the last eight items, newest first, adds to F(target)."""
    counts = table(kept)
    return [0.3**k * counts.get((item, target), 0.0) for k, item in enumerate(items[:8])]


@quick
@given(
    seed=st.integers(0, 1000),
    most=st.integers(0, 6),
    items=st.lists(st.integers(-1, ITEMS - 1), max_size=12),
)
def test_what_followed_is_the_sum_of_its_shares(seed: int, most: int, items: list[int]) -> None:
    """F and the shares of F against the loop; an unknown item takes a place and adds nothing."""
    kept = random_followers(seed, ITEMS, most)
    total = transition_sums(kept, torch.tensor(items, dtype=torch.int64))
    assert total.shape == (ITEMS,)
    for target in range(ITEMS):
        shares = transition_shares(kept, torch.tensor(items, dtype=torch.int64), target)
        expected = loop(kept, items, target)
        assert shares.tolist() == pytest.approx(expected, abs=1e-5)
        assert float(total[target]) == pytest.approx(sum(expected), abs=1e-5)


def test_nothing_follows_to_what_was_not_trained() -> None:
    """The shares of an unknown target are 0, one for each item."""
    kept = random_followers(1, ITEMS, 3)
    assert transition_shares(kept, torch.tensor([2, 1, -1]), -1).tolist() == [0, 0, 0]


# ---------------------------------------------------------------------------- one's own pairs


def own(log: Interactions, user: int) -> Counts:
    return counted([history(log, user)])


@quick
@given(log=logs())
def test_own_pairs_are_those_of_the_user_alone(log: Interactions) -> None:
    """For each event, every follower of its item in that user's history, once."""
    events = np.random.default_rng(0).permutation(len(log))
    place, column, count = OwnTransitions(log).starting_at(events)
    found = list(zip(place.tolist(), column.tolist(), strict=True))
    assert len(set(found)) == len(found)
    values = dict(zip(found, count.tolist(), strict=True))
    expected = {
        (at, follower): weight
        for at, event in enumerate(events.tolist())
        for (item, follower), weight in own(log, int(log.users[event])).items()
        if item == log.items[event]
    }
    assert values.keys() == expected.keys()
    for pair, weight in expected.items():
        assert values[pair] == pytest.approx(weight, rel=1e-5)


def rectangle(log: Interactions, spans: list[tuple[int, int]]) -> tuple[Tensor, NDArray[np.int64]]:
    """Items and events [B, L] of stretches of one user each; padding reads the last event again."""
    length = max(end - first for first, end in spans)
    events = np.array([
        [min(first + at, end - 1) for at in range(length)] for first, end in spans
    ])  # fmt: skip
    return torch.from_numpy(log.items[events].astype(np.int64)), events


def stretches(log: Interactions, data: st.DataObject) -> list[tuple[int, int]]:
    """Windows as training takes them: of one user each, from anywhere on."""
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
    kept = table(transition_counts(log, most))
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
@given(log=logs().filter(len), most=st.integers(1, ITEMS), data=st.data())
def test_each_position_counts_what_others_did(
    log: Interactions, most: int, data: st.DataObject
) -> None:
    """The user's own pairs really removed, with items that come again; an item's column its row."""
    spans = stretches(log, data)
    items, events = rectangle(log, spans)
    counting = HeldOutTransitions(transition_counts(log, most), OwnTransitions(log))
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
    """In any order: the same numbers in other places, and what has no column adds nothing."""
    spans = stretches(log, data)
    items, events = rectangle(log, spans)
    chosen = data.draw(st.lists(st.integers(0, ITEMS - 1), unique=True, min_size=1))
    column = torch.full((ITEMS + 1,), len(chosen))
    column[torch.tensor(chosen)] = torch.arange(len(chosen))
    counting = HeldOutTransitions(transition_counts(log, most), OwnTransitions(log))
    found = counting.log_counts(items, events, column, len(chosen))
    whole = counting.log_counts(items, events, None, ITEMS)
    np.testing.assert_allclose(found, whole[:, :, chosen], atol=1e-6)


def test_who_is_alone_learns_from_no_one() -> None:
    """With one user in the log nothing is left; with a twin exactly the twin's pairs are."""
    taken = [0, 1, 0, 2, 2, 1, 0, 0, 3, 1]
    alone = Interactions.from_columns([0] * 10, taken, range(10), n_users=1, n_items=4)
    twins = Interactions.from_columns(
        [0] * 10 + [1] * 10, taken * 2, [*range(10)] * 2, n_users=2, n_items=4
    )
    for log, left in ((alone, False), (twins, True)):
        items, events = rectangle(log, [(0, 10)])
        found = HeldOutTransitions(transition_counts(log, 4), OwnTransitions(log)).log_counts(
            items, events, None, 4
        )
        if not left:
            np.testing.assert_allclose(found, 0, atol=1e-6)
            continue
        kept = transition_counts(alone, 4)
        for place in range(10):
            recent = torch.tensor(taken[: place + 1][::-1])
            expected = torch.log1p(2 * transition_sums(kept, recent))
            np.testing.assert_allclose(found[0, place], expected, atol=1e-5)


@pytest.mark.parametrize("size", [12, 5_000])
def test_what_followed_most_is_the_top_of_all(size: int) -> None:
    """Of few items, and of so many that hardly one followed; untrained items count for nothing."""
    generator = torch.Generator().manual_seed(size)
    columns = torch.randint(size + 1, (size, 6), generator=generator, dtype=torch.int32)
    counts = torch.rand(size, 6, generator=generator) * (columns < size)
    kept, items = TransitionCounts(columns, counts), torch.tensor([3, -1, 7, 3, 11])
    total = transition_sums(kept, items)
    for count in (4, 1_000):
        found = top_transitions(kept, items, count)
        best = [n for n in torch.argsort(-total, stable=True).tolist() if total[n] > 0][:count]
        assert total[found].tolist() == total[torch.tensor(best)].tolist()
        assert len(set(found.tolist())) == len(found) == min(count, len(best))
