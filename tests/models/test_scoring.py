"""Scores of targets that attend over a past, and explanations: against loops and real deletion."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import models.scoring
from models.recommender import Recommender
from models.scoring import (
    SOFTMAX,
    Attending,
    Past,
    Scores,
    UserMemory,
    explain,
    head_indexes,
    remember,
    score,
)
from models.snapshot import Snapshot
from tests.models.reference_model import ReferenceModel
from tests.models.small import DAY, SECOND, encode, past, random_model, random_past
from tests.models.small import snapshot as small_snapshot

ITEMS, TRAINED, HEADS, WINDOW = 15, 12, 3, 5
AT = 6 * DAY
FOREVER = 2**62
EVERY = np.arange(ITEMS)

quick = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def model() -> Recommender:
    return random_model(11, window=WINDOW)


@pytest.fixture(scope="module")
def snapshot(model: Recommender) -> Snapshot:
    return small_snapshot(ITEMS, model)


def without_event(whole: Past, event: int) -> Past:
    """The past as if that event had never been."""
    left = [at for at in range(len(whole.rows)) if at != event]
    return replace(
        whole,
        rows=whole.rows[left],
        timestamps=whole.timestamps[left],
        weights=whole.weights[left],
        visible=None if whole.visible is None else whole.visible[left],
        vectors={left.index(at): pair for at, pair in whole.vectors.items() if at != event},
    )


def without_entry(whole: Past, entry: int) -> Past:
    """The past without one entry of its profile."""
    content = whole.profile_content
    return replace(
        whole,
        profile_rows=np.delete(whole.profile_rows, entry),
        profile_content=None if content is None else np.delete(content, entry, axis=0),
    )


@st.composite
def pasts(draw: st.DrawFn, least: int = 0) -> Past:
    """Events on items trained, described and unknown; vectors of their own; masks; profiles."""
    events = draw(st.integers(least, 9))
    made = random_past(draw(st.integers(0, 10_000)), events, ITEMS)
    rows = made.rows.copy()
    vectors: dict[int, tuple[Any, Any]] = {}
    for event in range(events):
        kind = draw(st.sampled_from(["", "", "", "unknown", "own", "own unknown"]))
        if "unknown" in kind:
            rows[event] = draw(st.sampled_from([-1, ITEMS, ITEMS + 7]))
        if "own" in kind.split():
            key, value = encode([f"key {event}", f"value {event}"])
            vectors[event] = draw(st.sampled_from([(key, value), (key, None), (None, value)]))
    visible = None
    if draw(st.booleans()):
        visible = np.array(draw(st.lists(st.booleans(), min_size=events, max_size=events)), bool)
    profile = np.array(draw(st.lists(st.integers(-1, ITEMS - 1), max_size=3)), np.int32)
    words = (
        encode([f"interest {at}" for at in range(len(profile))]) if (profile < 0).any() else None
    )
    return replace(made, rows=rows, vectors=vectors, visible=visible, profile_rows=profile,
                   profile_content=words)  # fmt: skip


ways = st.builds(
    Attending,
    temperature=st.sampled_from([1.0, 0.3, 5.0]),
    hard=st.booleans(),
    exclude_self=st.booleans(),
)


class Loop:
    """The score of one target by one past, in float64 and plain loops."""

    def __init__(self, model: Recommender, snapshot: Snapshot, made: Past, at: int) -> None:
        self.reference = ReferenceModel(model, HEADS, WINDOW)
        content = snapshot.catalogue.content.astype(np.float64)
        self.items = [self.reference.vector(row if row < TRAINED else -1, content[row])
                      for row in range(ITEMS)]  # fmt: skip
        keys, values, rows, times, weights, known = [], [], [], [], [], []
        for event, row in enumerate(made.rows.tolist()):
            if made.visible is not None and not made.visible[event]:
                continue
            is_item = 0 <= row < ITEMS
            key, value = made.vectors.get(event, (None, None))
            if not is_item and key is None and value is None:
                continue
            own_key = None if key is None else self.reference.vector(-1, key)
            own_value = None if value is None else self.reference.vector(-1, value)
            item = self.items[row] if is_item else None
            keys.append(first(own_key, item, own_value))
            values.append(first(own_value, item, own_key))
            rows.append(row if is_item else -1)
            times.append(int(made.timestamps[event]))
            weights.append(float(made.weights[event]))
            known.append(is_item)
        seen = [j for j in range(len(rows)) if known[j]]
        self.summary = self.reference.summary(
            [self.items[rows[j]] for j in seen], [times[j] for j in seen]
        )
        distances = list(range(len(rows) - 1, -1, -1))
        ages = [max(0, at - time) for time in times]
        for entry, row in enumerate(made.profile_rows.tolist()):
            if row >= 0:
                vector = self.items[row]
            else:
                assert made.profile_content is not None
                vector = self.reference.vector(-1, made.profile_content[entry])
            keys.append(vector)
            values.append(vector)
            rows.append(row)
            distances.append(FOREVER)
            ages.append(FOREVER)
            weights.append(1.0)
        self.rows = rows
        self.distances, self.ages, self.weights = distances, ages, weights
        self.keys, self.values = keys, values

    def parts(
        self, target: int, how: Attending
    ) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
        """The sequence part; weights [H, m] and gains [H, m] of the attention part."""
        visible = [not how.exclude_self or row != target for row in self.rows]
        alpha, gain = self.reference.attention(
            self.items[target], self.keys, self.values, distances=self.distances,
            ages=self.ages, weights=self.weights, visible=visible, temperature=how.temperature,
            hard=how.hard,
        )  # fmt: skip
        return float(self.items[target] @ self.summary), alpha, gain


def first(*options: NDArray[np.float64] | None) -> NDArray[np.float64]:
    return next(option for option in options if option is not None)


# ---------------------------------------------------------------------------- scores


@quick
@given(made=pasts(), how=ways)
def test_scores_equal_the_loop(
    model: Recommender, snapshot: Snapshot, made: Past, how: Attending
) -> None:
    """Every part of every target's score, for any past and any way of attending."""
    scores = score(snapshot, remember(snapshot, made, AT), EVERY, how)
    loop = Loop(model, snapshot, made, AT)
    assert scores.memory == len(loop.rows)
    for target in range(ITEMS):
        sequence, alpha, gain = loop.parts(target, how)
        assert float(scores.sequence[target]) == pytest.approx(sequence, abs=1e-4)
        assert float(scores.attention[target]) == pytest.approx((alpha * gain).sum(), abs=1e-4)
    prior = model.prior.detach().numpy()
    np.testing.assert_array_equal(scores.prior[:TRAINED], prior)
    total = scores.sequence + scores.attention + scores.prior
    np.testing.assert_allclose(scores.total, total, atol=1e-6)


def test_without_a_past_only_the_prior_speaks(snapshot: Snapshot) -> None:
    """No rows, no attention, no sequence, nothing to explain, and no error."""
    user = remember(snapshot, Past.nothing(), AT)
    scores = score(snapshot, user, EVERY)
    assert len(user) == scores.memory == 0
    assert not scores.sequence.any()
    assert not scores.attention.any()
    np.testing.assert_array_equal(scores.total, scores.prior)
    assert explain(snapshot, user, 0, 5) == []
    assert score(snapshot, user, np.zeros(0, np.int64)).total.shape == (0,)


def test_no_targets_no_scores(snapshot: Snapshot) -> None:
    """An empty list of targets is answered with an empty list, in either mode."""
    user = remember(snapshot, random_past(1, 4, ITEMS), AT)
    for mode in ("exact", "coarse"):
        scores = score(snapshot, user, np.zeros(0, np.int32), Attending(mode=mode))
        assert scores.total.shape == scores.mass.shape == (0,)


def test_targets_may_repeat_and_come_in_any_order(snapshot: Snapshot) -> None:
    """Each place is answered for itself."""
    user = remember(snapshot, random_past(2, 6, ITEMS), AT)
    whole = score(snapshot, user, EVERY).total
    asked = np.array([3, 3, 14, 0, 3])
    np.testing.assert_allclose(score(snapshot, user, asked).total, whole[asked], atol=1e-6)


def test_many_targets_are_scored_in_blocks(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the block, the scores are the same."""
    user = remember(snapshot, random_past(3, 6, ITEMS), AT)
    whole = score(snapshot, user, EVERY)
    monkeypatch.setattr(models.scoring, "_TARGET_BLOCK", 40)
    blocks = score(snapshot, user, EVERY)
    np.testing.assert_allclose(blocks.total, whole.total, atol=1e-6)
    assert blocks.mass.tolist() == [1.0] * ITEMS


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


# ---------------------------------------------------------------------------- explanations


@quick
@given(made=pasts(least=1), how=ways, target=st.integers(0, ITEMS - 1))
def test_contributions_add_up_to_the_score(
    snapshot: Snapshot, made: Past, how: Attending, target: int
) -> None:
    """sequence + every row's contribution + prior = score, to 1e-4, however it was attended."""
    user = remember(snapshot, made, AT)
    scores = score(snapshot, user, np.array([target]), how)
    reasons = explain(snapshot, user, target, 50, how)
    summed = math.fsum(reason.contribution for reason in reasons)
    whole = float(scores.sequence[0]) + summed + float(scores.prior[0])
    assert whole == pytest.approx(float(scores.total[0]), abs=1e-4)
    sources = [reason.source for reason in reasons]
    assert len(set(sources)) == len(sources)
    assert set(sources) <= set(user.source.tolist())


@quick
@given(made=pasts(least=1), how=ways, target=st.integers(0, ITEMS - 1))
def test_reasons_equal_the_loop(
    model: Recommender, snapshot: Snapshot, made: Past, how: Attending, target: int
) -> None:
    """Mean weights and signed contributions of every row, largest first."""
    user = remember(snapshot, made, AT)
    _, alpha, gain = Loop(model, snapshot, made, AT).parts(target, how)
    place = {source: at for at, source in enumerate(user.source.tolist())}
    reasons = explain(snapshot, user, target, 50, how)
    for reason in reasons:
        at = place[reason.source]
        assert reason.weight == pytest.approx(alpha[:, at].mean(), abs=1e-5)
        expected = (alpha[:, at] * gain[:, at]).sum()
        assert reason.contribution == pytest.approx(expected, abs=1e-4)
    sizes = [abs(reason.contribution) for reason in reasons]
    assert sizes == sorted(sizes, reverse=True)
    missing = set(place.values()) - {place[reason.source] for reason in reasons}
    assert all(alpha[:, at].sum() < 1e-6 for at in missing)


@quick
@given(made=pasts(least=1), how=ways, target=st.integers(0, ITEMS - 1))
def test_without_is_what_deleting_the_row_gives(
    snapshot: Snapshot, made: Past, how: Attending, target: int
) -> None:
    """Each event and each profile entry, really deleted: the attention part to 1e-4.

    What remains moves one place nearer to the present, so that places shift as they would.
    """
    user = remember(snapshot, made, AT)
    scores = score(snapshot, user, np.array([target]), how)
    rest = float(scores.sequence[0] + scores.prior[0])
    for reason in explain(snapshot, user, target, 50, how, rest=rest):
        if reason.source >= 0:
            less = without_event(made, reason.source)
        else:
            less = without_entry(made, -1 - reason.source)
        again = score(snapshot, remember(snapshot, less, AT), np.array([target]), how)
        assert reason.without == pytest.approx(rest + float(again.attention[0]), abs=1e-4)


@pytest.mark.parametrize("hard", [False, True])
def test_without_the_event_that_held_everything_the_others_speak(
    snapshot: Snapshot, hard: bool
) -> None:
    """Its weight leaves the others none, and without it they share as if it had never been."""
    made = past([4, 7, 9], [0, DAY, 2 * DAY], [1, 1e30, 2])
    how = Attending(hard=hard)
    (reason,) = explain(snapshot, remember(snapshot, made, AT), 6, 1, how)
    less = score(snapshot, remember(snapshot, without_event(made, 1), AT), np.array([6]), how)
    assert reason.source == 1
    assert reason.weight == pytest.approx(1, abs=1e-6)
    assert reason.without == pytest.approx(float(less.attention[0]), abs=1e-5)


def test_without_the_only_event_nothing_is_attended(snapshot: Snapshot) -> None:
    """One event: it has all the weight, and without it there is the rest."""
    user = remember(snapshot, past([3], [0]), AT)
    scores = score(snapshot, user, np.array([6]))
    (reason,) = explain(snapshot, user, 6, 5, rest=1.25)
    assert reason.weight == pytest.approx(1, abs=1e-6)
    assert reason.contribution == pytest.approx(float(scores.attention[0]), abs=1e-5)
    assert reason.without == pytest.approx(1.25, abs=1e-6)


def test_a_target_that_sees_only_itself_has_no_reasons(snapshot: Snapshot) -> None:
    """With `exclude_self` nothing is left of a past of one item: weight nowhere, attention 0."""
    user = remember(snapshot, past([3, 3], [0, DAY]), AT)
    how = Attending(exclude_self=True)
    assert score(snapshot, user, np.array([3]), how).attention.tolist() == [0]
    assert explain(snapshot, user, 3, 5, how) == []
    assert len(explain(snapshot, user, 4, 5, how)) == 2


def test_long_explanations_are_made_in_blocks(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the block, the reasons are the same."""
    user = remember(snapshot, random_past(5, 9, ITEMS), AT)
    whole = explain(snapshot, user, 4, 50)
    monkeypatch.setattr(models.scoring, "_TARGET_BLOCK", 60)
    for one, other in zip(explain(snapshot, user, 4, 50), whole, strict=True):
        assert one.source == other.source
        assert one.without == pytest.approx(other.without, abs=1e-5)


def test_only_the_largest_reasons_are_named(snapshot: Snapshot) -> None:
    """`top` cuts the list, it does not change what is in it."""
    user = remember(snapshot, random_past(5, 9, ITEMS), AT)
    every = explain(snapshot, user, 4, 50)
    assert len(every) == 9
    for few, whole in zip(explain(snapshot, user, 4, 3), every[:3], strict=True):
        assert few.source == whole.source
        assert few.without == pytest.approx(whole.without, abs=1e-5)
    assert explain(snapshot, user, 4, 0) == []


# ---------------------------------------------------------------------------- coarse


def long_user(snapshot: Snapshot, events: int = 300) -> UserMemory:
    return remember(snapshot, random_past(7, events, ITEMS), AT)


def close(one: Scores, other: Scores) -> None:
    for part in ("total", "sequence", "attention", "prior"):
        np.testing.assert_allclose(getattr(one, part), getattr(other, part), atol=1e-5)


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("hard", [False, True])
def test_coarse_with_every_row_is_exact(snapshot: Snapshot, exclude_self: bool, hard: bool) -> None:
    """k = n, or more: the same scores, all of the mass, all visible rows kept."""
    user = long_user(snapshot, 60)
    way = Attending(exclude_self=exclude_self, hard=hard, temperature=0.7)
    whole = score(snapshot, user, EVERY, way)
    for k in (60, 1000):
        found = score(snapshot, user, EVERY, replace(way, mode="coarse", k=k))
        close(found, whole)
        assert found.mode == "coarse"
        assert whole.mode == "exact"
        np.testing.assert_allclose(found.mass, 1, atol=1e-6)
        assert found.within is not None
        assert found.within.shape == (ITEMS, HEADS, 60)


@pytest.mark.parametrize("given_indexes", [False, True])
def test_coarse_attends_over_the_best_rows_of_each_head(
    model: Recommender, snapshot: Snapshot, given_indexes: bool
) -> None:
    """A flat index names the k largest logits; what is attended is the softmax over those."""
    made, k = random_past(7, 60, ITEMS), 8
    user = remember(snapshot, made, AT)
    how = Attending(mode="coarse", k=k)
    indexes = head_indexes(user.memory) if given_indexes else None
    found = score(snapshot, user, EVERY, how, indexes=indexes)
    assert found.within is not None
    assert (found.within.sum(2) == k).all()
    loop = Loop(model, snapshot, made, AT)
    for target in (0, 5, 14):
        _, alpha, gain = loop.parts(target, SOFTMAX)
        expected, mass = 0.0, 1.0
        for head in range(HEADS):
            top = np.argsort(-alpha[head], kind="stable")[:k]
            held = alpha[head, top].sum()
            assert set(top) == set(found.within[target, head].nonzero().flatten().tolist())
            expected += (alpha[head, top] * gain[head, top]).sum() / held
            mass = min(mass, held)
        assert float(found.attention[target]) == pytest.approx(expected, abs=1e-4)
        assert float(found.mass[target]) == pytest.approx(mass, abs=1e-4)


@pytest.mark.parametrize("exclude_self", [False, True])
def test_coarse_explanations_add_up_too(snapshot: Snapshot, exclude_self: bool) -> None:
    """Over the rows that were kept, and no others."""
    user = long_user(snapshot, 80)
    how = Attending(mode="coarse", k=6, exclude_self=exclude_self)
    found = score(snapshot, user, EVERY, how)
    assert found.within is not None
    for target in range(ITEMS):
        reasons = explain(snapshot, user, target, 200, how, within=found.within[target])
        summed = math.fsum(reason.contribution for reason in reasons)
        assert summed == pytest.approx(float(found.attention[target]), abs=1e-4)
        kept = found.within[target].any(0).nonzero().flatten().tolist()
        assert {reason.source for reason in reasons} <= set(kept)
        if exclude_self:
            assert all(int(user.rows[row]) != target for row in kept)


def test_a_target_keeps_no_row_it_cannot_see(snapshot: Snapshot) -> None:
    """Where fewer than k rows are visible, those are kept, and none in place of the missing."""
    user = remember(snapshot, past([3] * 8 + [5, 6], np.arange(10) * DAY), AT)
    how = Attending(mode="coarse", k=5, exclude_self=True)
    found = score(snapshot, user, np.array([3, 5]), how)
    assert found.within is not None
    for head in range(HEADS):
        assert found.within[0, head].nonzero().flatten().tolist() == [8, 9]
        assert int(found.within[1, head].sum()) == 5
        assert not found.within[1, head, 8]
    whole = score(snapshot, user, np.array([3]), Attending(exclude_self=True))
    np.testing.assert_allclose(found.attention[:1], whole.attention, atol=1e-5)


def test_long_memories_are_clustered(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number of rows the indexes are clustered; all clusters probed, they are exact."""
    user = long_user(snapshot, 400)
    how = Attending(mode="coarse", k=100)
    flat = score(snapshot, user, EVERY, how)
    monkeypatch.setattr(models.scoring, "_CLUSTERED_FROM", 300)
    full, few = (score(snapshot, user, EVERY, replace(how, probes=n)) for n in (20, 1))
    np.testing.assert_allclose(full.attention, flat.attention, atol=1e-4)
    assert full.mass.mean() > few.mass.mean()


def test_auto_is_exact_up_to_a_length(snapshot: Snapshot) -> None:
    """And coarse beyond; `exact` and `coarse` hold at any length."""
    user = long_user(snapshot, 50)
    for limit, mode in ((50, "exact"), (49, "coarse")):
        assert score(snapshot, user, EVERY, Attending(exact_up_to=limit)).mode == mode
    assert Attending(mode="exact", exact_up_to=1).over(10) == "exact"
    assert Attending(mode="coarse").over(1) == "coarse"
