"""Buckets of distance and age, exact at their edges, and the bias they name."""

import numpy as np
import pytest
import torch

from models.recency import AGE_BUCKETS, POSITION_BUCKETS, RecencyBias, age_bucket, position_bucket
from tests.models import reference_model

HOUR = 3_600 * 1_000_000


def test_every_distance_falls_into_its_bucket() -> None:
    """Each of the first ten thousand distances, one by one, as the definition says."""
    distances = torch.arange(10_000)
    expected = [reference_model.position_bucket(d) for d in range(10_000)]
    assert position_bucket(distances).tolist() == expected
    assert sorted(set(expected)) == list(range(POSITION_BUCKETS))


def test_known_edges_of_distance() -> None:
    """Below 16 a bucket each; an octave is three buckets; far away and negative are bounded."""
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
    """Negative ages count as none; a microsecond is already an age; the oldest share a bucket."""
    ages = torch.tensor([-(2**63), -HOUR, -1, 0, 1, 2**62, 2**63 - 1])
    assert age_bucket(ages).tolist() == [0, 0, 0, 0, 1, 39, 39]


def test_the_bias_is_the_two_tables_read_at_the_buckets() -> None:
    """[B, H, Q, K] from distances [Q, K] and ages [B, Q, K], each read by hand."""
    bias = RecencyBias(3)
    with torch.no_grad():
        bias.position.normal_()
        bias.age.normal_()
    rng = np.random.default_rng(0)
    distance = torch.from_numpy(rng.integers(-2, 400, (4, 5)))
    age = torch.from_numpy(rng.integers(-HOUR, 1000 * HOUR, (2, 4, 5)))
    with torch.no_grad():
        got = bias(distance, age)
    position_table, age_table = (table.detach().numpy() for table in (bias.position, bias.age))
    assert got.shape == (2, 3, 4, 5)
    for b, h, q, k in np.ndindex(2, 3, 4, 5):
        place = reference_model.position_bucket(int(distance[q, k]))
        when = reference_model.age_bucket(int(age[b, q, k]))
        expected = float(position_table[place, h] + age_table[when, h])
        assert float(got[b, h, q, k]) == pytest.approx(expected, abs=1e-6)


def test_heads_start_with_different_reach() -> None:
    """Before training the first head is flat, later ones fall ever steeper; age says nothing."""
    bias = RecencyBias(4)
    slopes = bias.position[0] - bias.position[-1]
    assert slopes.tolist() == pytest.approx([0, 4 / 3, 8 / 3, 4], abs=1e-6)
    assert torch.all(torch.diff(bias.position, dim=0) <= 0)
    assert torch.all(bias.age == 0)


def test_both_tables_learn() -> None:
    """The gradient of an entry is the number of times it was read."""
    bias = RecencyBias(1)
    bias(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, HOUR]])).sum().backward()
    assert bias.position.grad is not None
    assert bias.age.grad is not None
    assert bias.position.grad[:3, 0].tolist() == [1, 2, 0]
    assert bias.age.grad[0, 0] == 2
