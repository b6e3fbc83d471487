"""Sampled softmax items: their corrected partition equals the full one on average."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from models.training.losses import MASKED_LOGIT, SoftmaxItems, sample_columns, softmax_items


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Samples are drawn from torch's own generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def drawn(items: int, targets: list[int], negatives: int) -> SoftmaxItems:
    return softmax_items(items, torch.tensor(targets), 10, negatives)


@pytest.mark.parametrize("negatives", [3, 20, 40])
def test_the_sampled_partition_is_unbiased(negatives: int) -> None:
    items, draws = 40, 4000
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=items) * 1.5)
    exact = float(logits.exp().sum())
    found = np.empty(draws)
    for draw in range(draws):
        chosen = drawn(40, [3, 7, 7, 30], negatives)
        found[draw] = float((logits[chosen.rows] + chosen.correction).exp().sum())
    error = found.std() / math.sqrt(draws)
    assert found.mean() == pytest.approx(exact, abs=5 * error + 1e-4)


def test_candidates_hold_every_target_once() -> None:
    """Targets are drawn once with weight 1; distinct negatives share the remaining weight."""
    for _ in range(50):
        chosen = drawn(40, [3, 7, 7, 30], 15)
        rows = chosen.rows.tolist()
        assert len(set(rows)) == len(rows) == 18
        weights = dict(zip(rows, chosen.correction.exp().tolist(), strict=True))
        assert [weights[item] for item in (3, 7, 30)] == [1, 1, 1]
        assert sum(weights.values()) == pytest.approx(40, abs=1e-3)
        columns = chosen.columns(torch.arange(40)).tolist()
        assert [columns[row] for row in rows] == list(range(18))
        assert columns.count(18) == 40 - 18


def test_where_every_item_is_a_target_none_is_drawn() -> None:
    chosen = drawn(12, list(range(12)), 5)
    assert chosen.rows.tolist() == list(range(12))
    assert not chosen.correction.any()


@pytest.mark.parametrize("count", [2, 8, 30])
def test_the_picked_partition_is_unbiased(count: int) -> None:
    items, length, draws = 40, 3, 4000
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.normal(size=(2, length, items)) * 2)
    logits[0, 1, 5] = 9.0
    logits[1, :, 8] = MASKED_LOGIT  # hidden from a whole window
    own = torch.tensor([[3, 7, 0], [30, 30, 1]])
    real = torch.tensor([[True, True, False], [True, True, True]])
    found = np.empty((draws, 2, length))
    for draw in range(draws):
        columns, correction = sample_columns(logits, own, real, count)
        for window, targets in enumerate([{3, 7}, {30, 1}]):
            rows = columns[window].tolist()
            assert len(set(rows)) == len(rows)
            kept = {row for row, weight in zip(rows, correction[window].tolist(), strict=True)
                    if weight == 0}  # fmt: skip
            assert targets <= kept
        chosen = logits.gather(2, columns[:, None].expand(-1, length, -1)) + correction[:, None]
        found[draw] = chosen.exp().sum(2)
    exact = logits.exp().sum(2).numpy()
    error = found.std(0) / math.sqrt(draws)
    assert (np.abs(found.mean(0) - exact) <= 5 * error + 1e-4)[real.numpy()].all()


def test_what_is_likely_is_always_picked() -> None:
    logits = torch.zeros(1, 2, 1000)
    logits[0, 0, 17] = logits[0, 1, 400] = 7.0  # about half of the probability of a position
    real = torch.ones(1, 2, dtype=torch.bool)
    sizes = []
    for _ in range(200):
        columns, correction = sample_columns(logits, torch.tensor([[1, 2]]), real, 10)
        weights = dict(zip(columns[0].tolist(), correction[0].tolist(), strict=True))
        assert [weights[item] for item in (1, 2, 17, 400)] == [0, 0, 0, 0]
        sizes.append(len(weights))
    # So many are drawn on average, those that are certain counted once.
    assert np.mean(sizes) < 4 + 10
