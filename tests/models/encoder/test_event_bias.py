"""Biases by position, age and type, and what a type changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.snapshot import UNTRAINED, Snapshot
from models.encoder.event_bias import (
    AGE_BUCKETS,
    AGE_EDGES,
    BUCKETS,
    FARTHEST,
    MASKED,
    POSITION_BUCKETS,
    UNKNOWN,
    RecencyBias,
    age_bucket,
    bucket_margins,
    position_bucket,
    recency_bucket,
)
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.explanation import scores_without
from models.ranking.recommend import coarse_query, recommend
from models.ranking.scoring import score
from models.recommender.recommender import Recommender, RecommenderConfig
from tests.support import reference_model
from tests.support.pasts import (
    AT,
    ATTENTION_HEADS,
    EVERY,
    ITEMS,
    Loop,
    parts_without,
    pasts,
    reasons_of,
    told_snapshot,
    ways,
)
from tests.support.small import DAY, catalogue, past, random_model, random_past

HOUR = 3_600 * 1_000_000


def test_every_distance_falls_into_its_bucket() -> None:
    """Each of the first ten thousand distances, one by one, as the definition says."""
    distances = torch.arange(10_000)
    expected = [reference_model.position_bucket(d) for d in range(10_000)]
    assert position_bucket(distances).tolist() == expected
    assert sorted(set(expected)) == list(range(POSITION_BUCKETS))


def test_ages_fall_into_their_buckets() -> None:
    """Ages on both sides of every edge, where 1 + 1.4 log2(1 + seconds) passes a whole number."""
    edges = [int((2 ** (k / 1.4) - 1) * 1e6) for k in range(45)]
    ages = sorted({max(0, edge + near) for edge in edges for near in (-1, 0, 1, 2)})
    # log2(2^5) = 5 and 1.4 · 5 = 7 are whole: 31 seconds are the first of their bucket.
    ages += [31_000_000 - 1, 31_000_000, 1023_000_000 - 1, 1023_000_000]
    got = age_bucket(torch.tensor(ages)).tolist()
    assert got == [reference_model.age_bucket(age) for age in ages]
    assert got[-4:] == [7, 8, 14, 15]
    assert set(got) == set(range(AGE_BUCKETS))


def test_position_and_age_have_a_bucket_together() -> None:
    distance = torch.tensor([-3, 0, 7, 15, 16, 40, 600, 2**62])[:, None]
    age = torch.tensor([-HOUR, 0, 1, HOUR, 31_000_000, 2**62])
    got = recency_bucket(distance, age)
    assert got.dtype == torch.int32
    assert got.tolist() == [
        [40 * reference_model.position_bucket(d) + reference_model.age_bucket(int(a)) for a in age]
        for d in distance[:, 0].tolist()
    ]
    assert int(got.max()) == BUCKETS - 1


def drawn(heads: int) -> RecencyBias:
    """A bias of which all three tables are drawn."""
    bias = RecencyBias(heads)
    generator = torch.Generator().manual_seed(heads)
    with torch.no_grad():
        for table in bias.parameters():
            table.normal_(generator=generator)
    return bias


def places(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances [4, 5] and ages [2, 4, 5], some negative."""
    rng = np.random.default_rng(seed)
    distance = torch.from_numpy(rng.integers(-2, 400, (4, 5)))
    return distance, torch.from_numpy(rng.integers(-HOUR, 1000 * HOUR, (2, 4, 5)))


def test_the_bias_is_the_three_tables_read_at_the_buckets() -> None:
    bias = drawn(3)
    distance, age = places(0)
    with torch.no_grad():
        got = bias(distance, age)
    position, ages, joint = (
        table.detach().numpy() for table in (bias.position, bias.age, bias.joint)
    )
    assert got.shape == (3, 2, 4, 5)
    for h, b, q, k in np.ndindex(3, 2, 4, 5):
        place = reference_model.position_bucket(int(distance[q, k]))
        when = reference_model.age_bucket(int(age[b, q, k]))
        expected = float(position[h, place] + ages[h, when] + joint[h, 40 * place + when])
        assert float(got[h, b, q, k]) == pytest.approx(expected, abs=1e-6)


def test_heads_start_with_different_reach() -> None:
    """Initial position biases are flat for the first head and steeper for each later one."""
    bias = RecencyBias(4)
    slopes = bias.position[:, 0] - bias.position[:, -1]
    assert slopes.tolist() == pytest.approx([0, 4 / 3, 8 / 3, 4], abs=1e-6)
    assert torch.all(torch.diff(bias.position, dim=1) <= 0)
    assert torch.all(bias.age == 0)
    assert torch.all(bias.joint == 0)


def test_all_three_tables_learn() -> None:
    """The gradient of a table entry is the sum over the places that read it."""
    bias = drawn(2)
    distance, age = places(1)
    weight = torch.randn(2, 2, 4, 5, generator=torch.Generator().manual_seed(1))
    (bias(distance, age) * weight).sum().backward()
    position, ages = np.zeros((2, POSITION_BUCKETS)), np.zeros((2, AGE_BUCKETS))
    joint = np.zeros((2, BUCKETS))
    for h, b, q, k in np.ndindex(2, 2, 4, 5):
        place = reference_model.position_bucket(int(distance[q, k]))
        when = reference_model.age_bucket(int(age[b, q, k]))
        given = float(weight[h, b, q, k])
        position[h, place] += given
        ages[h, when] += given
        joint[h, 40 * place + when] += given
    for table, expected in ((bias.position, position), (bias.age, ages), (bias.joint, joint)):
        assert table.grad is not None
        np.testing.assert_allclose(table.grad, expected, atol=1e-5)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.integers(-5_000_000, 5_000_000),
            st.integers(0, 10**16),
            st.sampled_from([int(edge) for edge in AGE_EDGES]),
        ),
        max_size=6,
    )
)
def test_bucket_margins_bound_the_unchanged_interval(ages: list[int]) -> None:
    younger, older = bucket_margins(np.array(ages, dtype=np.int64))
    here = torch.tensor(ages, dtype=torch.int64)
    same = age_bucket(here)
    assert older >= 1
    assert younger >= 0
    for back, changes in ((younger, False), (younger + 1, True)):
        if younger < FARTHEST:
            assert torch.equal(age_bucket(here - back), same) != changes
    for on, changes in ((older - 1, False), (older, True)):
        if older < FARTHEST:
            assert torch.equal(age_bucket(here + on), same) != changes
    if younger == FARTHEST:
        assert torch.equal(age_bucket(here - 10**17), same)
    if older == FARTHEST:
        assert torch.equal(age_bucket(here + 10**17), same)


few = settings(max_examples=25, deadline=None, derandomize=True)
VIEW, DISLIKE, PURCHASE = range(3)
LAST = ATTENTION_HEADS - 1  # the head that sees dislikes


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return told_snapshot()


# ---------------------------------------------------------------------------- against the loop


@few
@given(made=pasts(), options=ways)
def test_scores_equal_the_loop(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions
) -> None:
    """Whatever the types are, every part is what plain loops give."""
    scores = score(snapshot, build_memory(snapshot, made, AT), EVERY, options)
    loop = Loop(snapshot, made, AT)
    assert scores.memory_rows == len(loop.rows)
    for target in range(ITEMS):
        alpha, gain = loop.attention(target, options)
        assert float(scores.transitions[target]) == pytest.approx(
            loop.transitions(target), abs=1e-4
        )
        assert float(scores.attention[target]) == pytest.approx((alpha * gain).sum(), abs=1e-4)


@few
@given(made=pasts(least=1), options=ways, target=st.integers(0, ITEMS - 1))
def test_without_an_event_is_the_loop_over_the_rest(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions, target: int
) -> None:
    user = build_memory(snapshot, made, AT)
    scores = score(snapshot, user, np.array([target]), options)
    rest = float(scores.prior[0])
    events = [reason.source for reason in reasons_of(snapshot, user, target, 100, options)]
    closed = parts_without(snapshot, user, target, options)
    exact = scores_without(snapshot, user, {event: [target] for event in events}, options)
    known = Loop(snapshot, made, AT)
    for event in events:
        loop = Loop(snapshot, made.without(event), AT)
        alpha, gain = loop.attention(target, options)
        whole = float((alpha * gain).sum()) + loop.transitions(target) + rest
        assert exact[event, target] == pytest.approx(whole, abs=1e-4)
        # States, the user's among them, are those of the whole history in the closed form.
        loop.use_states_of(known, event)
        alpha, gain = loop.attention(target, options)
        part = float((alpha * gain).sum()) + loop.transitions(target)
        assert closed[event] == pytest.approx(part, abs=1e-4)


def test_cached_states_of_another_type_are_not_extended(snapshot: Snapshot) -> None:
    liked, disliked = (
        past([3, 4], [0, DAY], types=np.array([VIEW, kind], np.int32)) for kind in (VIEW, DISLIKE)
    )
    kept = build_memory(snapshot, liked, AT).encoded
    found = build_memory(snapshot, disliked, AT, encoded=kept)
    assert torch.equal(found.user_state, build_memory(snapshot, disliked, AT).user_state)
    assert not torch.equal(found.user_state, build_memory(snapshot, liked, AT).user_state)


# ---------------------------------------------------------------------------- who sees what


@torch.inference_mode()
@pytest.mark.parametrize("kind", [VIEW, DISLIKE])
def test_a_head_that_sees_nothing_adds_nothing(snapshot: Snapshot, kind: int) -> None:
    """Heads whose rows are all hidden have weight 0, and every score is finite."""
    made = replace(random_past(5, 9, ITEMS), types=np.full(9, kind, np.int32))
    user = build_memory(snapshot, made, AT)
    blind = slice(0, LAST) if kind == DISLIKE else slice(LAST, ATTENTION_HEADS)
    assert (user.bias[blind] == -torch.inf).all()
    scores = score(snapshot, user, EVERY)
    assert torch.isfinite(scores.total).all()
    seeing = ATTENTION_HEADS - len(range(ATTENTION_HEADS)[blind])
    weights = [r.weight for r in reasons_of(snapshot, user, 3, 100)]
    assert sum(weights) == pytest.approx(seeing / ATTENTION_HEADS, abs=1e-5)
    everything = np.ones(ITEMS, np.bool_)
    ranked = recommend(snapshot, user, limit=5, allowed=everything, excluded=np.zeros(0, np.int64))
    assert torch.isfinite(ranked.scores.total).all()
    loop = Loop(snapshot, made, AT)
    readout = coarse_query(snapshot, user).readout
    for target in range(ITEMS):
        alpha, gain = loop.attention(target, DEFAULT_OPTIONS, target_in_query=False)
        assert not alpha[blind].any()
        attended = float(snapshot.tables.vectors[target] @ readout)
        assert attended == pytest.approx(float((alpha * gain).sum()), abs=1e-4)
    assert readout.any()


def test_without_heads_for_them_dislikes_are_read_but_not_attended() -> None:
    model = random_model(3, attention_heads=1, n_event_types=3, dislike_type=DISLIKE)
    bias = model.memory_bias(torch.arange(3), torch.zeros(3), torch.zeros(3), torch.arange(3))
    assert (bias[0] == -torch.inf).tolist() == [False, True, False]
    vectors = torch.zeros(1, 12)
    assert model.event_inputs(vectors, torch.tensor([DISLIKE]), torch.zeros(1)).any()


def test_an_unknown_type_reads_as_no_type(snapshot: Snapshot) -> None:
    model = snapshot.model
    vectors, zeros = torch.randn(4, 12), torch.zeros(4)
    types = torch.tensor([UNKNOWN, 3, 99, -7])
    assert torch.equal(model.event_inputs(vectors, types, zeros), vectors)
    place, age = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    bias = model.memory_bias(place, age, zeros, types)
    assert torch.equal(bias[:LAST], model.recency(place, age)[:LAST])
    assert (bias[LAST] == -torch.inf).all()


def test_types_have_the_models_own_numbers(snapshot: Snapshot) -> None:
    """Type names map to the model's rows; a model without dislikes masks them."""
    names = ["purchase", "view", "dislike", "share", "view"]
    assert snapshot.type_rows(names).tolist() == [2, 0, 1, UNKNOWN, 0]
    plain = Snapshot.build(UNTRAINED, None, catalogue(ITEMS), np.zeros(ITEMS, np.int64))
    assert plain.type_rows(names).tolist() == [UNKNOWN, UNKNOWN, MASKED, UNKNOWN, UNKNOWN]
    types = plain.type_rows(["view", "dislike", "view"])
    told = build_memory(plain, past([1, 2, 3], [0, 1, 2], types=types), AT)
    without = build_memory(plain, past([1, 3], [0, 2]), AT)
    assert told.source.tolist() == [0, 2]
    expected = score(plain, without, EVERY)
    np.testing.assert_array_equal(score(plain, told, EVERY).total, expected.total)


# ---------------------------------------------------------------------------- where nothing is said


def test_one_type_and_unit_weights_say_nothing() -> None:
    model = random_model(6)
    assert model.event_embedding is not None
    assert model.event_embedding.type_embedding is None
    assert model.type_bias is None
    vectors, zeros = torch.randn(5, 12), torch.zeros(5)
    types = torch.zeros(5, dtype=torch.int64)
    assert model.event_inputs(vectors, types, zeros) is vectors
    place, age = torch.arange(5), torch.arange(5) * DAY
    assert torch.equal(model.memory_bias(place, age, zeros, types), model.recency(place, age))


def test_types_say_nothing_before_they_are_learned() -> None:
    """A new model with types has the weights and outputs of one without."""
    torch.manual_seed(3)
    plain = Recommender(RecommenderConfig(n_items=12, dim=12, heads=3, transitions_per_item=0))
    torch.manual_seed(3)
    told = Recommender(
        RecommenderConfig(n_items=12, dim=12, heads=3, transitions_per_item=0, n_event_types=3)
    )
    state = told.state_dict()
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, state[name]), name
    vectors, zeros = torch.randn(3, 12), torch.zeros(3)
    assert torch.equal(told.event_inputs(vectors, torch.arange(3), zeros), vectors)
    place = torch.arange(3)
    bias = told.memory_bias(place, place, zeros, place)
    assert torch.equal(bias, plain.memory_bias(place, place, zeros, place))
