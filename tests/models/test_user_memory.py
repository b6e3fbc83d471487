"""What is remembered of a past, what is left out, and what it weighs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.scoring import score
from models.snapshot import Snapshot
from models.user_memory import remember
from tests.models.pasts import AT, EVERY, ITEMS, WINDOW, drawn_snapshot
from tests.models.small import DAY, SECOND, encode, past, random_model
from tests.models.small import snapshot as small_snapshot


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return drawn_snapshot()


def test_what_cannot_be_seen_never_happened(snapshot: Snapshot) -> None:
    """Hidden, unknown and undescribed items leave no trace in place, order, sequence or score."""
    wider = snapshot.refreshed(snapshot.catalogue.covering(["only an event"]), snapshot.counts)
    seen = past([3, 13, 7], [0, DAY, 2 * DAY], [1, 2, 0.5])
    more = past(
        [5, 3, -1, 13, ITEMS, 99, 7],
        [0, 0, SECOND, DAY, DAY, 2 * DAY, 2 * DAY],
        [9, 1, 9, 2, 9, 9, 0.5],
        visible=np.array([False, True, True, True, True, True, True]),
    )
    assert not wider.known[ITEMS]
    users = [remember(wider, made, AT) for made in (seen, more)]
    assert users[0].source.tolist() == [0, 1, 2]
    assert users[1].source.tolist() == [1, 3, 6]
    both = [score(wider, user, EVERY) for user in users]
    for part in ("total", "sequence", "attention", "prior"):
        np.testing.assert_array_equal(getattr(both[0], part), getattr(both[1], part))


def test_an_event_after_the_request_is_just_now(snapshot: Snapshot) -> None:
    """Its age is none, not negative."""
    ahead = remember(snapshot, past([3, 4], [0, AT + DAY]), AT)
    now = remember(snapshot, past([3, 4], [0, AT]), AT)
    assert ahead.age.tolist() == [AT, 0]
    np.testing.assert_array_equal(ahead.bias, now.bias)


def test_weights_are_multiplicities(snapshot: Snapshot) -> None:
    """Where places do not count, an event of weight 3 attends like three events of weight 1."""
    flat = random_model(11, window=WINDOW)
    with torch.no_grad():
        flat.recency.position.zero_()
    even = small_snapshot(ITEMS, flat)
    heavy = score(even, remember(even, past([4, 7], [0, DAY], [3, 1]), AT), EVERY)
    thrice = score(even, remember(even, past([4, 4, 4, 7], [0, 0, 0, DAY]), AT), EVERY)
    np.testing.assert_allclose(heavy.attention, thrice.attention, atol=1e-5)


def test_extreme_weights_give_numbers(snapshot: Snapshot) -> None:
    """From the smallest to the largest weight that float32 holds."""
    made = past([4, 7, 9], [0, 1, 2], [1.2e-38, 1, 3.4e38])
    scores = score(snapshot, remember(snapshot, made, AT), EVERY)
    assert torch.isfinite(scores.total).all()
    only = score(snapshot, remember(snapshot, past([9], [2]), AT), EVERY)
    np.testing.assert_allclose(scores.attention, only.attention, atol=1e-4)


def test_own_vectors_stand_in_for_the_item(snapshot: Snapshot) -> None:
    """The item's own text, brought by hand, changes nothing for an item known by text alone."""
    own = snapshot.catalogue.content[13]
    plain = past([3, 13], [0, DAY])
    brought = replace(plain, vectors={1: (own, own)})
    both = [score(snapshot, remember(snapshot, made, AT), EVERY) for made in (plain, brought)]
    np.testing.assert_allclose(both[0].total, both[1].total, atol=1e-5)


@pytest.mark.parametrize("row", [-1, ITEMS + 3])
def test_of_an_unknown_item_one_vector_stands_for_both(snapshot: Snapshot, row: int) -> None:
    """A key without a value (or the other way) is K = V; no other item's values leak in."""
    vector = encode(["brought"])[0]
    totals = []
    for pair in ((vector, vector), (vector, None), (None, vector)):
        made = past([3, row], [0, DAY], vectors={1: pair})
        totals.append(score(snapshot, remember(snapshot, made, AT), EVERY).total)
    np.testing.assert_array_equal(totals[0], totals[1])
    np.testing.assert_array_equal(totals[0], totals[2])


def test_the_profile_stands_beside_the_history(snapshot: Snapshot) -> None:
    """Its rows come last, weigh like the oldest of events, and do not age."""
    made = past([3], [AT], profile_rows=np.array([5, -1], np.int32),
                profile_content=encode(["x", "jazz"]))  # fmt: skip
    user = remember(snapshot, made, AT)
    later = remember(snapshot, made, AT + 300 * DAY)
    assert user.source.tolist() == [0, -1, -2]
    assert user.rows.tolist() == [3, 5, -1]
    np.testing.assert_array_equal(user.bias[:, 1:], later.bias[:, 1:])
    bias = snapshot.model.recency
    with torch.inference_mode():
        np.testing.assert_allclose(user.bias[:, 1], bias.position[31] + bias.age[39], atol=1e-6)
    alone = remember(snapshot, replace(made, rows=made.rows[:0], timestamps=made.timestamps[:0],
                                       weights=made.weights[:0]), AT)  # fmt: skip
    assert not score(snapshot, alone, EVERY).sequence.any()
    assert score(snapshot, alone, EVERY).attention.abs().min() > 0


def test_the_encoder_reads_its_window_and_the_attention_everything(snapshot: Snapshot) -> None:
    """What lies before the window changes the attention part alone."""
    recent = past([1, 2, 3, 4, 5], np.arange(5) * DAY)
    longer = past([9, 1, 2, 3, 4, 5], [0, *np.arange(5) * DAY])
    short, long = (remember(snapshot, made, AT) for made in (recent, longer))
    np.testing.assert_allclose(short.summary, long.summary, atol=1e-6)
    change = score(snapshot, short, EVERY).attention - score(snapshot, long, EVERY).attention
    assert change.abs().min() > 0
