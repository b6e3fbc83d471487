"""Snapshots: building, refreshing after catalogue changes, and indexes."""

import numpy as np
import pytest
import torch

from models.catalogue.catalogue import Catalogue
from models.catalogue.item_values import ItemEntry
from models.catalogue.snapshot import UNTRAINED, Snapshot
from models.data.vocabulary import Vocabulary
from models.history.user_memory import build_memory
from models.ranking.matches import match_fields
from models.ranking.recommend import recommend
from models.ranking.search import search
from models.recommender.artifact import TrainedModel
from tests.support.small import DIMENSION, catalogue, encode, entries, past, random_model, trained
from tests.support.small import snapshot as small_snapshot


@pytest.fixture(scope="module")
def made() -> TrainedModel:
    return trained(random_model(1))


def alike(one: Snapshot, other: Snapshot) -> None:
    """Assert that two snapshots are equal but for their indexes."""
    for mine, yours in zip(one.tables, other.tables, strict=True):
        np.testing.assert_allclose(mine, yours, atol=1e-6)
    for name in ("trained_rows", "has_vector", "counts"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert (one.version, len(one.catalogue)) == (other.version, len(other.catalogue))


@pytest.mark.parametrize("is_trained", [True, False])
def test_refreshing_equals_building(made: TrainedModel, is_trained: bool) -> None:
    """A refreshed snapshot equals a newly built one, and the old snapshot is unchanged."""
    model = made if is_trained else None
    counts = np.arange(14)
    before = Snapshot.build("v", model, catalogue(14), counts)
    kept = [table.clone() for table in before.tables]
    changed = [*entries(3, first=14), ItemEntry("i2", "new", {"title": "new"}), ItemEntry("i13")]
    after = before.catalogue.updated(changed, ["i5", "i12"], encode).with_items(["event"])
    popular = np.arange(18)[::-1].copy()
    refreshed = before.refreshed(after, popular)
    alike(refreshed, Snapshot.build("v", model, after, popular))
    with torch.inference_mode():
        content = torch.from_numpy(after.content)
        direct = refreshed.model.item_tables(refreshed.trained_rows, content)
    for name in ("vectors", "queries", "keys", "values", "outputs"):
        table = getattr(refreshed.tables, name)
        np.testing.assert_allclose(table, getattr(direct, name), atol=1e-6)
    for was, now in zip(kept, before.tables, strict=True):
        np.testing.assert_array_equal(was, now)
    np.testing.assert_array_equal(before.counts, counts)


@pytest.mark.parametrize("is_trained", [True, False])
def test_popularity_alone_may_be_refreshed(made: TrainedModel, is_trained: bool) -> None:
    """Refreshing the counts alone equals building with those counts."""
    model = made if is_trained else None
    before = Snapshot.build("v", model, catalogue(14), np.arange(14))
    popular = np.arange(14)[::-1].copy()
    alike(
        before.refreshed(before.catalogue, popular),
        Snapshot.build("v", model, before.catalogue, popular),
    )


def test_counts_are_copied(made: TrainedModel) -> None:
    """A snapshot copies the counts; items without a count have 0."""
    counts = np.arange(5)
    for snapshot in (
        Snapshot.build("v", made, catalogue(14), counts),
        Snapshot.build("v", made, catalogue(14), np.zeros(0, np.int64)).refreshed(
            catalogue(14), counts
        ),
    ):
        counts[:] = np.arange(5)
        counts += 100
        assert snapshot.counts.tolist() == [0, 1, 2, 3, 4, *[0] * 9]


def test_trained_items_outside_the_catalogue_are_known_and_not_listed(made: TrainedModel) -> None:
    """Trained items absent from the catalogue have vectors but are not visible."""
    vocabulary = Vocabulary(["i7", "other"])
    empty = Catalogue.empty(DIMENSION, vocabulary)
    snapshot = Snapshot.build("v", made, empty, np.zeros(0, np.int64))
    assert len(snapshot.catalogue) == 13
    assert not snapshot.catalogue.visible.any()
    assert snapshot.has_vector.tolist() == [True, False, *[True] * 11]
    expected = [int(id_[1:]) if id_ in made.item_ids else -1 for id_ in vocabulary.ids]
    assert snapshot.trained_rows.tolist() == expected
    ids = made.model.id_embedding.weight.detach()
    np.testing.assert_allclose(snapshot.tables.vectors[0], ids[7], atol=1e-6)


def test_untrained_items_take_the_prior_of_the_new(made: TrainedModel) -> None:
    snapshot = Snapshot.build("v", made, catalogue(14), np.zeros(14, np.int64))
    grown = snapshot.refreshed(catalogue(40), np.zeros(40, np.int64))
    new = made.model.new_prior.item()
    assert new
    assert float(snapshot.tables.prior[13]) == new
    assert grown.tables.prior[[13, 39]].tolist() == [new, new]


def test_before_training_popularity_only_breaks_ties() -> None:
    """Without a model the prior rises with the counts from 0 to at most 0.05."""
    counts = np.array([0, 5, 1, 100, 5])
    snapshot = Snapshot.build(UNTRAINED, None, catalogue(5), counts)
    prior = snapshot.tables.prior.numpy()
    assert np.argsort(prior, kind="stable").tolist() == [0, 2, 1, 4, 3]
    assert prior.min() == 0
    assert prior.max() == pytest.approx(0.05)
    assert snapshot.memory_reason == "content"
    assert small_snapshot().memory_reason == "personal"


def test_an_empty_service_has_a_snapshot() -> None:
    """A snapshot without items or model recommends and finds nothing, without an error."""
    empty = Catalogue.empty(DIMENSION)
    nothing = np.zeros(0, np.int64)
    for index_from in (0, 10):
        snapshot = Snapshot.build(UNTRAINED, None, empty, nothing, index_from=index_from)
        user = build_memory(snapshot, past([-1], [0]), 0)
        allowed = snapshot.catalogue.visible
        ranked = recommend(snapshot, user, limit=3, allowed=allowed, excluded=nothing)
        assert len(ranked.rows) == 0
        matches = match_fields(snapshot, encode(["x"])[0], allowed=allowed)
        assert len(search(matches, limit=3).rows) == 0


def test_a_model_of_another_text_space_is_refused(made: TrainedModel) -> None:
    """A model of another embedding dimension is refused, naming both dimensions."""
    with pytest.raises(ValueError, match=f"dimension {DIMENSION}, the catalogue's have 3"):
        Snapshot.build("v", made, Catalogue.empty(3), np.zeros(0, np.int64))


# ---------------------------------------------------------------------------- indexes


def test_an_encoder_defers_the_item_index(made: TrainedModel) -> None:
    catalogue_ = small_snapshot(40, made.model).catalogue
    nobody = np.zeros(0, np.int64)
    for trained_, least in ((made, 20), (None, 40)):
        for index_from, indexed in ((least, 40), (least + 1, 0)):
            snapshot = Snapshot.build("v", trained_, catalogue_, nobody, index_from=index_from)
            assert snapshot.indexed_items == indexed
            assert not snapshot.needs_reindex(index_from=index_from)


def test_an_index_is_due_once_there_are_items_enough(made: TrainedModel) -> None:
    """With an encoder a catalogue that grows to twice the number of rows needs an index of items.

    Keys, of which there are twice as many, have one from the start.
    """
    snapshot = small_snapshot(30, made.model, index_from=20)
    assert (snapshot.indexed_items, snapshot.indexed_keys) == (0, 60)
    for count, is_due in ((39, False), (40, True)):
        grown = snapshot.catalogue.updated(entries(count - 30, first=30), [], encode)
        assert snapshot.refreshed(grown, snapshot.counts).needs_reindex(index_from=20) == is_due


def test_the_key_index_stays_until_there_is_a_new_one(made: TrainedModel) -> None:
    """Refreshing keeps the key index and its keys; reindexing removes the orphaned keys."""
    snapshot = small_snapshot(40, made.model, index_from=20)
    assert snapshot.indexed_keys == 80
    changes: list[tuple[list[ItemEntry], list[str]]] = [
        (entries(5, 40), []),
        ([ItemEntry("i2", "new", {"title": "new"})], []),
        ([], ["i3"]),
        ([ItemEntry("i39", "", {"title": "new", "description": "new too"})], []),
    ]
    now = snapshot
    for changed, removed in changes:
        now = now.refreshed(now.catalogue.updated(changed, removed, encode), snapshot.counts)
        assert now.key_index is snapshot.key_index
        assert now.indexed_keys == 80
        np.testing.assert_array_equal(
            now.catalogue.keys.vectors[:80], snapshot.catalogue.keys.vectors
        )
    assert now.catalogue.keys.orphans == 6
    anew = now.reindexed(index_from=20)
    assert (anew.indexed_items, anew.indexed_keys) == (45, 80 + 10 - 6 + 3)
    assert anew.catalogue.keys.orphans == 0
    alike(anew, now)
