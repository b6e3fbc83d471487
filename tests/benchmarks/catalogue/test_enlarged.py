"""The enlarged catalogue: copies of items and of their transition counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.catalogue.snapshot import Snapshot
from models.history.user_memory import build_memory
from models.ranking.candidates import candidates as find_candidates
from models.ranking.scoring import score
from tests.benchmarks.catalogue import candidates
from tests.benchmarks.catalogue.enlarged import enlarged, moved
from tests.support.small import past, random_model, random_past, snapshot

COPIES = 3
N = 12  # trained items of the small catalogue of 15


@pytest.fixture(scope="module")
def small() -> Snapshot:
    """Twelve trained items and three that only their text describes."""
    return snapshot(15, random_model(2))


@pytest.fixture(scope="module")
def large(small: Snapshot) -> Snapshot:
    """Three copies of each of the twelve."""
    return enlarged(small, COPIES)


def test_the_first_copy_is_the_item_itself(small: Snapshot, large: Snapshot) -> None:
    """The first copy of every item has the item's own tables."""
    assert len(large.catalogue) == COPIES * N
    assert (large.trained_rows.numpy() == np.arange(COPIES * N)).all()
    assert large.index is None
    for mine, theirs in zip(large.tables, small.tables, strict=True):
        items = theirs.shape[-2] if theirs.dim() > 1 else len(theirs)
        assert items == 15
        own = mine[..., :N, :] if theirs.dim() > 1 else mine[:N]
        old = theirs[..., :N, :] if theirs.dim() > 1 else theirs[:N]
        torch.testing.assert_close(own, old)


def test_copies_are_as_far_from_their_item_as_its_neighbours(
    small: Snapshot, large: Snapshot
) -> None:
    """On average by the median distance of an item to its nearest, by loops; texts are equal."""
    vectors = small.tables.vectors[:N].numpy()
    nearest = [
        min(float(np.linalg.norm(vectors[i] - vectors[j])) for j in range(N) if j != i)
        for i in range(N)
    ]
    copies = large.tables.vectors.numpy().reshape(COPIES, N, -1)
    away = np.linalg.norm(copies[1:] - copies[0], axis=-1)
    assert away.min() > 0
    assert away.mean() == pytest.approx(np.median(nearest), rel=0.2)
    texts = large.catalogue.content.reshape(COPIES, N, -1)
    assert (texts == small.catalogue.content[:N]).all()


def test_a_follower_is_one_of_the_followers_copies(small: Snapshot, large: Snapshot) -> None:
    """Copies have their item's transition counts, each to a copy of the follower."""
    old, new = small.model.statistics.transition_counts, large.model.statistics.transition_counts
    for row in range(COPIES * N):
        before = old.items[row % N].tolist()
        after = new.items[row].tolist()
        for wanted, found in zip(before, after, strict=True):
            if wanted == N:
                assert found == COPIES * N
            else:
                assert found < COPIES * N
                assert found % N == wanted
        assert new.counts[row].tolist() == old.counts[row % N].tolist()
    assert len(set((new.items[new.items < COPIES * N] // N).tolist())) == COPIES


def test_similar_items_are_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies have their item's similarity weights, unless there are too many items for EASE."""
    source = snapshot(15, random_model(2, similar_items=5))
    old = source.model.statistics.similarity
    assert old is not None
    large = enlarged(source, COPIES)
    new = large.model.statistics.similarity
    assert new is not None
    for row in range(COPIES * N):
        for wanted, found in zip(old.items[row % N].tolist(), new.items[row].tolist(), strict=True):
            assert found % N == wanted if wanted < N else found == COPIES * N
        assert new.weights[row].tolist() == old.weights[row % N].tolist()
    assert len(set((new.items[new.items < COPIES * N] // N).tolist())) == COPIES
    monkeypatch.setattr("tests.benchmarks.catalogue.enlarged.MAX_EASE_ITEMS", COPIES * N - 1)
    many = enlarged(source, COPIES)
    assert many.model.statistics.similarity is None
    assert many.model.config.similar_items == 0


def test_users_did_the_same_to_copies(small: Snapshot, large: Snapshot) -> None:
    """Moved memories keep order, time and item, without untrained items."""
    made = random_past(3, 30, 15)
    (memory,) = moved([build_memory(small, made, int(made.timestamps[-1]))], small, large)
    kept = np.flatnonzero(made.rows < N)
    assert memory.source.tolist() == kept.tolist()
    assert (memory.rows.numpy() % N == made.rows[kept]).all()
    assert len(set((memory.rows.numpy() // N).tolist())) == COPIES
    assert memory.at == made.timestamps[-1]
    assert (memory.history.timestamps == made.timestamps).all()


def test_one_copy_changes_no_score(small: Snapshot) -> None:
    """Without further copies the model is the same, and so is everybody's score."""
    made = past([0, 5, 3], [1, 2, 3])
    before = build_memory(small, made, 4)
    same = enlarged(small, 1)
    (after,) = moved([before], small, same)
    rows = np.arange(N)
    torch.testing.assert_close(score(same, after, rows).total, score(small, before, rows).total)


def test_what_is_not_trained_cannot_be_enlarged(small: Snapshot) -> None:
    """A snapshot without a model is refused."""
    with pytest.raises(ValueError, match="trained model"):
        enlarged(replace(small, trained=None), COPIES)


def test_recall_is_reported_for_indexed_catalogues(
    small: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies reach each size from INDEXED on; recall is of the best of all scores, by loops."""
    monkeypatch.setattr(candidates, "INDEXED", 700)
    monkeypatch.setattr(candidates, "INDEXED_CANDIDATES", 60)
    memories = [
        build_memory(small, made, int(made.timestamps[-1]))
        for made in (random_past(seed, 25, 15) for seed in range(3))
    ]
    found = candidates.measure(
        (600, 710), 1, histories=(20,), users=1, own=(small, memories), enlarge=True
    ).catalogues
    assert [(each.items, each.own, each.copies) for each in found] == [
        (600, False, 1), (710, False, 1), (15, True, 1), (720, True, 60),
    ]  # fmt: skip
    large = enlarged(small, 60)
    hits = 0
    for memory in moved(memories, small, large):
        totals = score(large, memory, np.arange(720)).total.tolist()
        best = sorted(range(720), key=lambda row: -totals[row])[: candidates.TOP]
        among = find_candidates(large, memory, large.has_vector, 60)
        hits += len(set(best) & set(among.tolist()))
    assert found[-1].users == 3
    assert found[-1].recall_without == pytest.approx(hits / (3 * candidates.TOP))
    assert 0 < found[-1].recall <= 1.0
