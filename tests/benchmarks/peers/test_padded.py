"""The model over padded histories, beside what the service computes from a user's memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from models.catalogue.snapshot import Snapshot
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.scoring import score
from tests.benchmarks.peers.padded import Padded
from tests.support.pasts import AT, TRAINED, basket_snapshot, drawn_snapshot
from tests.support.small import DAY, past, random_past

LENGTHS = (1, 3, 5, 9, 17)  # the window is 5


def padded(
    pasts: list[UserHistory], filled: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Items, times and lengths; the padding holds an item that nobody asked about."""
    longest = max(len(each.rows) for each in pasts)
    items = np.full((len(pasts), longest), filled, dtype=np.int64)
    times = np.zeros((len(pasts), longest), dtype=np.int64)
    for row, each in enumerate(pasts):
        items[row, : len(each.rows)] = each.rows
        times[row, : len(each.rows)] = each.timestamps
    lengths = [len(each.rows) for each in pasts]
    return torch.from_numpy(items), torch.from_numpy(times), torch.tensor(lengths)


def pasts() -> list[UserHistory]:
    """Histories of trained items alone, of types and weights that ratings have."""
    drawn = [random_past(seed, length, TRAINED) for seed, length in enumerate(LENGTHS)]
    return [past(each.rows, each.timestamps, types=np.zeros(len(each.rows), np.int32))
            for each in drawn]  # fmt: skip


@pytest.mark.parametrize("made", [drawn_snapshot, basket_snapshot])
@pytest.mark.parametrize("at", [AT, 400 * DAY])
def test_it_is_the_score_that_the_service_gives(made: Callable[[], Snapshot], at: int) -> None:
    """Scores over padded histories equal those of the service, to 1e-4."""
    snapshot, users = made(), pasts()
    trained = snapshot.trained
    assert trained is not None
    content = snapshot.catalogue.content[snapshot.catalogue.rows(trained.item_ids)]
    model = Padded(trained.model, content)
    batch = padded(users, filled=7)
    asked = torch.full((len(users),), at)
    rng = np.random.default_rng(0)
    targets = np.stack([rng.permutation(TRAINED)[:5] for _ in users])
    every = model.scores(*batch, asked)
    some = model.scores(*batch, asked, torch.from_numpy(targets))
    for row, each in enumerate(users):
        wanted = score(snapshot, build_memory(snapshot, each, at), np.arange(TRAINED)).total.numpy()
        np.testing.assert_allclose(every[row].numpy(), wanted, atol=1e-4)
        np.testing.assert_allclose(some[row].numpy(), wanted[targets[row]], atol=1e-4)
    assert float(every.std(1).min()) > 0.1  # the users' scores differ from item to item


def test_padding_says_nothing() -> None:
    """Scores do not depend on the items in the padding."""
    snapshot, users = drawn_snapshot(), pasts()
    trained = snapshot.trained
    assert trained is not None
    content = snapshot.catalogue.content[snapshot.catalogue.rows(trained.item_ids)]
    model, asked = Padded(trained.model, content), torch.full((len(users),), AT)
    one, other = (model.scores(*padded(users, filled), asked) for filled in (0, 11))
    assert torch.equal(one, other)
