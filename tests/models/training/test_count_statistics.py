"""Statistics of the log in a model, counted at first and again after more events."""

import math

import pytest
import torch

from models.data.interactions import Interactions
from models.recommender.recommender import Recommender
from models.training.fit import fit_statistics, update_statistics
from tests.support.training import tiny


def test_more_events_move_a_trained_prior_with_the_popularity() -> None:
    """What training added to the prior stays; counts and the popularity are of the longer log."""
    log = Interactions.from_columns([0, 0, 1], [0, 1, 0], [1, 2, 3], n_users=2, n_items=3)
    users, items, times = [0, 0, 0, 1, 1], [0, 1, 2, 0, 2], [1, 2, 4, 3, 5]
    longer = Interactions.from_columns(users, items, times, n_users=2, n_items=3)
    model, counted = Recommender(tiny(3)), Recommender(tiny(3))
    fit_statistics(model, log)
    fit_statistics(counted, longer)
    trained = torch.tensor([0.5, -0.25, 2.0])
    with torch.no_grad():
        model.prior.add_(trained)
        model.new_prior.add_(1)
    new_prior = model.new_prior.item()
    update_statistics(model, log, longer)
    # Events by item, 1 added: 3, 2, 1 of mean 2; then 3, 2, 3 of mean 8 / 3.
    expected = [math.log(3 / (8 / 3)), math.log(2 / (8 / 3)), math.log(3 / (8 / 3))]
    assert (model.prior - trained).tolist() == pytest.approx(expected, abs=1e-6)
    assert model.new_prior.item() == new_prior
    for name, buffer in counted.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name]), name
