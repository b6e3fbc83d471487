"""Buckets of distance and age, exact at their edges, and the bias read from them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.encoder.event_bias import (
    AGE_BUCKETS,
    AGE_EDGES,
    BUCKETS,
    FARTHEST,
    POSITION_BUCKETS,
    RecencyBias,
    age_bucket,
    bucket_margins,
    bucket_sums,
    position_bucket,
    recency_bucket,
)
from tests.support import reference_model

HOUR = 3_600 * 1_000_000


def test_every_distance_falls_into_its_bucket() -> None:
    """Each of the first ten thousand distances, one by one, as the definition says."""
    distances = torch.arange(10_000)
    expected = [reference_model.position_bucket(d) for d in range(10_000)]
    assert position_bucket(distances).tolist() == expected
    assert sorted(set(expected)) == list(range(POSITION_BUCKETS))


def test_known_edges_of_distance() -> None:
    """Distances below 16 have one bucket each, then three per octave, with bounded ends."""
    distances = torch.tensor([-(2**62), -1, 0, 15, 16, 20, 21, 31, 32, 64, 128, 512, 2**62])
    expected = [0, 0, 0, 15, 16, 16, 17, 18, 19, 22, 25, 31, 31]
    assert position_bucket(distances).tolist() == expected


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


def test_a_clock_that_ran_backwards_is_no_age() -> None:
    """Negative ages have bucket 0, one microsecond has bucket 1, the oldest share bucket 39."""
    ages = torch.tensor([-(2**63), -HOUR, -1, 0, 1, 2**62, 2**63 - 1])
    assert age_bucket(ages).tolist() == [0, 0, 0, 0, 1, 39, 39]


def test_position_and_age_have_a_bucket_together() -> None:
    """Each pair of distance and age has a joint bucket, distance-major."""
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
    """The bias is the sum of the position, age and joint tables at the buckets."""
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


def test_weights_are_summed_by_bucket() -> None:
    """`bucket_sums` adds weights per bucket and head; absent buckets have 0."""
    bucket = torch.tensor([4, 0, 4, 2], dtype=torch.int32)
    weights = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 0.25, 0.0]])
    found = bucket_sums(bucket, weights, 6)
    assert found.dtype == torch.float32
    assert found.tolist() == [[2, 0, 4, 0, 4, 0], [0.5, 0, 0, 0, -0.75, 0]]
    assert bucket_sums(bucket[:0], weights[:, :0], 3).tolist() == [[0] * 3, [0] * 3]


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
    """Within `bucket_margins` no age changes its bucket, and one microsecond beyond, one does."""
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
