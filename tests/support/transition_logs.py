"""Logs, and transition counts of them by plain loops."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from models.data.interactions import Interactions
from models.recommender.co_occurrence import TransitionCounts
from tests.support.small import events_of

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


def counted(histories: Sequence[Sequence[tuple[int, bool]]], power: int = 2) -> Counts:
    """1 / distance^power over pairs of events of a user at most 20 apart, the later one liked."""
    counts: Counts = defaultdict(float)
    for events in histories:
        for i in range(len(events)):
            for j in range(i + 1, min(len(events), i + 21)):
                if events[j][1]:
                    counts[events[i][0], events[j][0]] += 1 / (j - i) ** power
    return counts


def damped(counts: Counts, log: Interactions) -> Counts:
    """Counts of a small log, where an item's are divided by the fourth root of its popularity."""
    taken = [5 + sum(1 for item in log.items if item == row) for row in range(ITEMS)]
    mean = sum(taken) / ITEMS
    return {pair: count * (taken[pair[0]] / mean) ** -0.25 for pair, count in counts.items()}


def history(log: Interactions, user: int) -> list[tuple[int, bool]]:
    """A user's items, and whether each was liked."""
    events = events_of(log, user)
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
