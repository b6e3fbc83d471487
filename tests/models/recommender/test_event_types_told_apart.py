"""Event types and dislikes in training: small worlds whose next event depends on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.evaluation.full_ranking import evaluate
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import leave_one_out
from tests.support.small import SECOND
from tests.support.training import QUICK, content, tiny, train

MINUTE = 60 * SECOND
ITEMS = 24
VIEW, PURCHASE = 0, 1
LIKE, DISLIKE = 0, 1
CLUSTERS, EACH = 4, 6  # items of a cluster
PACE = replace(QUICK, epochs=10, batch_tokens=200, attention_batch_tokens=200)


def in_order(events: list[tuple[int, int, int]], dislike: int = -1) -> Interactions:
    """Build a log of (user, item, type) events, one minute apart."""
    users, items, types = np.array(events).T
    times = np.arange(len(events)) * MINUTE
    n_users = int(users.max()) + 1
    return Interactions.from_columns(
        users, items, times, types=types, n_users=n_users, n_items=ITEMS, dislike_type=dislike
    )


# ---------------------------------------------------------------------------- types


def shop(seed: int) -> Interactions:
    """Users buy the items in a fixed cycle and view random items in between."""
    rng = np.random.default_rng(seed)
    events = []
    for user in range(120):
        item = int(rng.integers(ITEMS))
        for number in range(7):
            looks = rng.integers(ITEMS, size=rng.integers(0, 4) if number else 0)
            events += [(user, int(look), VIEW) for look in looks]
            item = (item + 1) % ITEMS
            events.append((user, item, PURCHASE))
    return in_order(events)


def test_a_purchase_is_not_a_view() -> None:
    """A model trained with event types ranks the next purchase better than one without."""
    log = shop(0)
    found = {}
    for name, given in (("told", log), ("untold", replace(log, types=np.zeros_like(log.types)))):
        split = leave_one_out(given)
        done = train(split.test.history, PACE, shape=tiny(ITEMS, dim=32))
        ranker = ModelRanker(done.model, content(ITEMS))
        found[name] = evaluate(ranker, split.test, exclude_seen=False).ndcg
    assert found["told"] > found["untold"] + 0.15


# ---------------------------------------------------------------------------- dislikes


def tastes(seed: int) -> Interactions:
    """Users try each cluster, like or dislike it, and continue within liked clusters.

    No item says which cluster it belongs to but by what it is taken with.
    """
    rng = np.random.default_rng(seed)
    events = []
    for user in range(120):
        liked = rng.random(CLUSTERS) < 0.5
        liked[rng.integers(CLUSTERS)] = True
        for cluster in rng.permutation(CLUSTERS).tolist():
            item = cluster * EACH + int(rng.integers(EACH))
            events.append((user, item, LIKE if liked[cluster] else DISLIKE))
        after = rng.choice(np.flatnonzero(liked), 6) * EACH + rng.integers(EACH, size=6)
        events += [(user, int(item), LIKE) for item in after]
    return in_order(events, DISLIKE)


def first_tries(seed: int, kind: int) -> tuple[Interactions, list[int]]:
    """Return histories with one event of the given kind, and the cluster of each."""
    rng = np.random.default_rng(seed)
    events, odd = [], []
    for user in range(40):
        order = rng.permutation(CLUSTERS).tolist()
        odd.append(order[user % CLUSTERS])
        for cluster in order:
            item = cluster * EACH + int(rng.integers(EACH))
            events.append((user, item, kind if cluster == odd[-1] else LIKE))
    return in_order(events, DISLIKE), odd


def standing(ranker: ModelRanker, kind: int) -> NDArray[np.float64]:
    """Return each history's mean score of the odd cluster above that of all items."""
    log, odd = first_tries(7, kind)
    scores = ranker.scores(log, np.arange(40, dtype=np.int32), None).astype(np.float64)
    own = [scores[user, at * EACH : (at + 1) * EACH].mean() for user, at in enumerate(odd)]
    over: NDArray[np.float64] = np.array(own) - scores.mean(1)
    return over


def test_dislikes_lower_the_scores_of_their_cluster() -> None:
    """A dislike lowers the scores of its cluster, in total and by attention alone.

    So it does by the target attention alone, in which a head of its own speaks against it.
    """
    done = train(tastes(1), replace(PACE, attention_epochs=4), shape=tiny(ITEMS, dim=32))
    assert done.model.config.dislike_heads == 1
    ranker = ModelRanker(done.model, content(ITEMS))
    liked, disliked = (standing(ranker, kind) for kind in (LIKE, DISLIKE))
    assert disliked.mean() < liked.mean() - 0.5
    assert (disliked < liked).mean() > 0.8
    with torch.no_grad():
        for part in (*done.model.transition_scale.parameters(), done.model.prior):
            part.zero_()
    alone = ModelRanker(done.model, content(ITEMS))
    attended = [standing(alone, kind) for kind in (LIKE, DISLIKE)]
    assert attended[1].mean() < min(0.0, attended[0].mean()) - 0.25


# ---------------------------------------------------------------------------- nothing to tell


def test_the_shape_follows_the_log() -> None:
    log = tastes(2)
    one = replace(QUICK, epochs=1)
    shapes = [
        train(given, one, shape=tiny(ITEMS, attention_heads=heads)).model.config
        for given in (log, replace(log, dislike_type=-1), log.liked())
        for heads in (2, 1)
    ]
    told = [(shape.n_event_types, shape.dislike_type, shape.dislike_heads) for shape in shapes]
    # A model that knows of dislikes but was shown none leaves them out.
    assert told == [(2, 1, 1), (2, 1, 0), (2, -1, 0), (2, -1, 0), (2, 1, 0), (2, 1, 0)]


def test_a_log_of_dislikes_teaches_nothing() -> None:
    log = tastes(3)
    with pytest.raises(ValueError, match="nothing to learn an order from"):
        train(replace(log, types=np.full_like(log.types, DISLIKE)))
