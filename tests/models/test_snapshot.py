"""Snapshots: what is kept in files and comes back bit for bit, and what one answer needs."""

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from models.catalogue import Catalogue, Entry
from models.ranking import recommend
from models.recommender import RecommenderConfig
from models.scoring import remember
from models.search import search
from models.snapshot import (
    DESCRIPTION,
    ITEMS,
    UNTRAINED,
    WEIGHTS,
    Snapshot,
    Trained,
    popular_first,
)
from models.vocabulary import Vocabulary
from tests.models.small import (
    DIMENSION,
    catalogue,
    encode,
    entries,
    past,
    random_model,
    trained,
)
from tests.models.small import snapshot as small_snapshot

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def made() -> Trained:
    return trained(random_model(1))


@pytest.fixture(scope="module")
def files(made: Trained) -> Files:
    return made.pack()


# ---------------------------------------------------------------------------- files


@pytest.mark.parametrize("shape", [{}, {"tied": True}, {"blocks": 0}, {"items": 0}])
def test_what_is_packed_comes_back_bit_for_bit(shape: dict[str, Any]) -> None:
    """Weights, shape, ids, counts, encoder and metadata, whatever the shape."""
    before = trained(random_model(2, **shape))
    after = Trained.unpack(before.pack())
    state = after.model.state_dict()
    assert state.keys() == before.model.state_dict().keys()
    for name, weight in before.model.state_dict().items():
        assert weight.numpy().tobytes() == state[name].numpy().tobytes()
        assert state[name].dtype == weight.dtype
    assert after.model.config == before.model.config
    assert not after.model.training
    assert after.item_ids == before.item_ids
    assert after.counts.dtype == np.int64
    np.testing.assert_array_equal(after.counts, before.counts)
    assert (after.encoder, dict(after.metadata)) == ("fake", {"note": "small"})


def test_packing_repeats() -> None:
    """The same model gives the same bytes, also after a round trip."""
    first = trained(random_model(3)).pack()
    assert trained(random_model(3)).pack() == first
    assert Trained.unpack(first).pack() == first


def test_any_id_survives() -> None:
    """Ids are any text: other scripts, quotes, what looks like a number."""
    ids = ("東京", 'a "quoted" id', "007", "ok\n", "😀", "a/b")
    model = random_model(1, items=len(ids))
    packed = Trained(model, ids, np.ones(6, np.int64), "fake", {}).pack()
    assert Trained.unpack(packed).item_ids == ids


def test_files_hold_no_pickle_and_run_nothing(made: Trained, files: Files, tmp_path: Path) -> None:
    """Nothing packed is a pickle; a pickle in place of a file is refused without being opened."""
    marker = tmp_path / "ran"

    class Poison:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    poison = pickle.dumps(Poison())
    for name, content in files.items():
        with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, KeyError, IndexError)):
            pickle.loads(content)
        with pytest.raises(ValueError, match=name):
            Trained.unpack(files | {name: poison})
    assert not marker.exists()
    pickle.loads(poison)
    assert marker.exists()  # so the poison was one


@pytest.mark.parametrize("name", [WEIGHTS, DESCRIPTION, ITEMS])
def test_a_missing_file_is_named(files: Files, name: str) -> None:
    """Each of the three is needed."""
    with pytest.raises(ValueError, match=f"{name} is missing"):
        Trained.unpack({k: v for k, v in files.items() if k != name})


def described(change: Mapping[str, Any]) -> Callable[[Files], bytes]:
    """The description with some members changed; None takes one away."""

    def corrupt(files: Files) -> bytes:
        description = json.loads(files[DESCRIPTION]) | change
        return json.dumps({k: v for k, v in description.items() if v is not None}).encode()

    return corrupt


def shaped(**change: Any) -> Callable[[Files], bytes]:
    """The description with a changed shape of the model."""

    def corrupt(files: Files) -> bytes:
        description = json.loads(files[DESCRIPTION])
        description["config"] |= change
        return json.dumps(description).encode()

    return corrupt


def weighed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Files], bytes]:
    """The weights with something changed."""

    def corrupt(files: Files) -> bytes:
        tensors = load(files[WEIGHTS])
        change(tensors)
        return save(tensors)

    return corrupt


def cut(name: str, share: float) -> Callable[[Files], bytes]:
    return lambda files: files[name][: int(share * len(files[name]))]


def listed(*ids: object) -> Callable[[Files], bytes]:
    return lambda _: json.dumps(ids).encode()


TWELVE = [f"i{n}" for n in range(12)]

MALFORMED: list[tuple[str, str, Callable[[Files], bytes]]] = [
    *((f"{name}: {share} of it", name, cut(name, share))
      for name in (WEIGHTS, DESCRIPTION, ITEMS) for share in (0, 0.5, 0.99)),
    ("not JSON", DESCRIPTION, lambda _: b"\xff\xfe"),
    ("deep JSON", DESCRIPTION, lambda _: b"[" * 100_000),
    ("a list", DESCRIPTION, lambda _: b"[]"),
    ("another format", DESCRIPTION, described({"format": 99})),
    ("no format", DESCRIPTION, described({"format": None})),
    ("no shape", DESCRIPTION, described({"config": None})),
    ("a shape that is no object", DESCRIPTION, described({"config": [1]})),
    ("no encoder", DESCRIPTION, described({"encoder": None})),
    ("an encoder that is no name", DESCRIPTION, described({"encoder": ["fake"]})),
    ("metadata that is no object", DESCRIPTION, described({"metadata": 3})),
    ("an unknown member of the shape", DESCRIPTION, shaped(depth=3)),
    ("heads that do not divide", DESCRIPTION, shaped(heads=5)),
    ("no heads", DESCRIPTION, shaped(heads=0)),
    ("a fractional dimension", DESCRIPTION, shaped(dim=1.5)),
    ("a dimension in words", DESCRIPTION, shaped(dim="twelve")),
    ("negative dimension", DESCRIPTION, shaped(dim=-12)),
    ("impossible dropout", DESCRIPTION, shaped(dropout="much")),
    ("dropout above one", DESCRIPTION, shaped(dropout=1.5)),
    ("tied in words", DESCRIPTION, shaped(tied="no")),
    ("negative blocks", DESCRIPTION, shaped(blocks=-1)),
    ("another dimension", WEIGHTS, shaped(dim=24)),
    ("a dimension that no machine holds", WEIGHTS, shaped(dim=3 * 10**12)),
    ("another text dimension", WEIGHTS, shaped(content=9)),
    ("fewer blocks", WEIGHTS, shaped(blocks=1)),
    ("more blocks", WEIGHTS, shaped(blocks=3)),
    ("more blocks than memory holds", WEIGHTS, shaped(blocks=10**12)),
    ("tied", WEIGHTS, shaped(tied=True)),
    ("a shape of more items", ITEMS, shaped(items=13)),
    ("a shape of more items than memory holds", ITEMS, shaped(items=10**15)),
    ("fewer ids", ITEMS, listed(*TWELVE[:-1])),
    ("an id twice", ITEMS, listed(*TWELVE[:-1], "i0")),
    ("an id that is a number", ITEMS, listed(*TWELVE[:-1], 7)),
    ("ids in an object", ITEMS, lambda _: json.dumps(dict.fromkeys(TWELVE, 1)).encode()),
    ("ids in a string", ITEMS, lambda _: b'"abcdefghijkl"'),
    ("ids that are null", ITEMS, lambda _: b"null"),
    ("a weight missing", WEIGHTS, weighed(lambda t: t.pop("norm.bias"))),
    ("a weight too many", WEIGHTS, weighed(lambda t: t.update(extra=torch.ones(1)))),
    ("a weight transposed", WEIGHTS, weighed(
        lambda t: t.update({"content.weight": t["content.weight"].T.contiguous()}))),
    ("a weight that is NaN", WEIGHTS, weighed(lambda t: t["norm.bias"].fill_(torch.nan))),
    ("one infinite weight", WEIGHTS, weighed(lambda t: t["ids.weight"][3, 3:4].fill_(torch.inf))),
    ("whole numbers for weights", WEIGHTS, weighed(
        lambda t: t.update({"norm.bias": t["norm.bias"].long()}))),
    ("half precision", WEIGHTS, weighed(
        lambda t: t.update({"norm.bias": t["norm.bias"].bfloat16()}))),
    ("no counts", WEIGHTS, weighed(lambda t: t.pop("counts"))),
    ("fewer counts", WEIGHTS, weighed(lambda t: t.update(counts=t["counts"][:-1].clone()))),
    ("counts in fractions", WEIGHTS, weighed(lambda t: t.update(counts=t["counts"].bfloat16()))),
    ("negative counts", WEIGHTS, weighed(lambda t: t["counts"].neg_())),
]  # fmt: skip


@pytest.mark.parametrize(
    ("blamed", "corrupt"), [pytest.param(*rest, id=name) for name, *rest in MALFORMED]
)
def test_a_malformed_file_is_named(
    files: Files, blamed: str, corrupt: Callable[[Files], bytes]
) -> None:
    """Whatever is wrong is a ValueError that names the file, before any memory is taken for it."""
    changed = corrupt(files)
    # A shape that does not fit is found by holding it against another file.
    place = DESCRIPTION if "shaped" in corrupt.__qualname__ else blamed
    with pytest.raises(ValueError, match=blamed):
        Trained.unpack(files | {place: changed})


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_damage_is_a_value_error_or_nothing(files: Files, data: st.DataObject) -> None:
    """Any bytes changed anywhere: another model, or a ValueError that names a file; never more."""
    name = data.draw(st.sampled_from([WEIGHTS, DESCRIPTION, ITEMS]))
    damaged = bytearray(files[name])
    # The header of the weights is a small part of them, and where damage matters most.
    end = data.draw(st.sampled_from([min(2_000, len(damaged)), len(damaged)]))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    try:
        Trained.unpack(files | {name: bytes(damaged)})
    except ValueError as error:
        assert any(each in str(error) for each in files)  # noqa: PT017


def test_parts_that_do_not_fit_are_refused(made: Trained) -> None:
    """Also when no file is involved."""
    counts = made.counts
    with pytest.raises(ValueError, match="must agree"):
        Trained(made.model, made.item_ids[:-1], counts, "fake", {})
    with pytest.raises(ValueError, match="must agree"):
        Trained(made.model, made.item_ids, counts[:-1], "fake", {})
    with pytest.raises(ValueError, match="distinct"):
        Trained(made.model, (*made.item_ids[:-1], "i0"), counts, "fake", {})
    broken = random_model(1)
    with torch.no_grad():
        broken.prior[3] = torch.nan
    with pytest.raises(ValueError, match=r"weight prior is not finite"):
        Trained(broken, made.item_ids, counts, "fake", {})


# ---------------------------------------------------------------------------- snapshots


def alike(one: Snapshot, other: Snapshot) -> None:
    """Everything but the indexes."""
    for mine, yours in zip(one.tables, other.tables, strict=True):
        np.testing.assert_allclose(mine, yours, atol=1e-6)
    for name in ("trained_rows", "known", "counts"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert (one.version, len(one.catalogue)) == (other.version, len(other.catalogue))


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_refreshed_snapshot_is_one_built_anew(made: Trained, is_trained: bool) -> None:
    """After items came, changed and went, and others were used; the old one stays as it was."""
    model = made if is_trained else None
    counts = np.arange(14)
    before = Snapshot.build("v", model, catalogue(14), counts)
    kept = [table.clone() for table in before.tables]
    changed = [*entries(3, first=14), Entry("i2", "new", {"title": "new"}), Entry("i13")]
    after = before.catalogue.updated(changed, ["i5", "i12"], encode).covering(["event"])
    popular = np.arange(18)[::-1].copy()
    alike(before.refreshed(after, popular), Snapshot.build("v", model, after, popular))
    for was, now in zip(kept, before.tables, strict=True):
        np.testing.assert_array_equal(was, now)
    np.testing.assert_array_equal(before.counts, counts)


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_few_changes_are_projected_alone(made: Trained, is_trained: bool) -> None:
    """One item of many changed, one came and one went: the same tables as from projecting all."""
    model = made if is_trained else None
    before = Snapshot.build("v", model, catalogue(40), np.arange(40))
    kept = [table.clone() for table in before.tables]
    changed = [Entry("i2", "new", {"title": "new"}), *entries(1, first=40)]
    after = before.catalogue.updated(changed, ["i5"], encode)
    now = before.refreshed(after, np.arange(41))
    alike(now, Snapshot.build("v", model, after, np.arange(41)))
    np.testing.assert_allclose(now.candidate_keys, now.model.candidate_keys(now.tables), atol=1e-6)
    for was, table in zip(kept, before.tables, strict=True):
        np.testing.assert_array_equal(was, table)


@pytest.mark.parametrize("is_trained", [True, False])
def test_popularity_alone_may_be_refreshed(made: Trained, is_trained: bool) -> None:
    """Over the same catalogue, with the same result as building."""
    model = made if is_trained else None
    before = Snapshot.build("v", model, catalogue(14), np.arange(14))
    popular = np.arange(14)[::-1].copy()
    alike(
        before.refreshed(before.catalogue, popular),
        Snapshot.build("v", model, before.catalogue, popular),
    )


def test_counts_are_copied(made: Trained) -> None:
    """The counter goes on counting; what the snapshot shows does not move. Missing ones are 0."""
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


def test_trained_items_outside_the_catalogue_are_known_and_not_listed(made: Trained) -> None:
    """Histories may hold them; answers may not. Rows follow the vocabulary, not the training."""
    vocabulary = Vocabulary(["i7", "other"])
    empty = Catalogue.empty(DIMENSION, vocabulary)
    snapshot = Snapshot.build("v", made, empty, np.zeros(0, np.int64))
    assert len(snapshot.catalogue) == 13
    assert not snapshot.catalogue.listed.any()
    assert snapshot.known.tolist() == [True, False, *[True] * 11]
    expected = [int(id_[1:]) if id_ in made.item_ids else -1 for id_ in vocabulary.ids]
    assert snapshot.trained_rows.tolist() == expected
    ids = made.model.ids.weight.detach()
    np.testing.assert_allclose(snapshot.tables.vectors[0], ids[7], atol=1e-6)


def test_untrained_items_take_the_prior_of_the_rare(made: Trained) -> None:
    """The mean prior of the least used quarter of the trained items."""
    counts = [50, 3, 40, 60, 1, 90, 70, 2, 80, 30, 20, 10]
    rare = trained(random_model(1), counts)
    snapshot = Snapshot.build("v", rare, catalogue(14), np.zeros(14, np.int64))
    prior = rare.model.prior.detach().numpy()
    assert float(snapshot.tables.prior[13]) == pytest.approx(prior[[1, 4, 7]].mean(), abs=1e-6)


def test_before_training_popularity_only_breaks_ties() -> None:
    """The prior rises with the counts, within a range too small to outweigh content."""
    counts = np.array([0, 5, 1, 100, 5])
    snapshot = Snapshot.build(UNTRAINED, None, catalogue(5), counts)
    prior = snapshot.tables.prior.numpy()
    assert np.argsort(prior, kind="stable").tolist() == [0, 2, 1, 4, 3]
    assert prior.min() == 0
    assert prior.max() == pytest.approx(0.05)
    assert snapshot.personal == "content"
    assert small_snapshot().personal == "personal"


def test_popular_first_keeps_the_order_of_ties() -> None:
    """By falling counts, then by row as given."""
    snapshot = Snapshot.build(UNTRAINED, None, catalogue(5), np.array([2, 9, 2, 0, 9]))
    assert popular_first(snapshot, [0, 1, 2, 3, 4]).tolist() == [1, 4, 0, 2, 3]
    assert popular_first(snapshot, np.array([2, 0])).tolist() == [2, 0]
    assert popular_first(snapshot, []).tolist() == []


def test_an_empty_service_has_a_snapshot() -> None:
    """No items, no model, and still something to answer from, with an index or without."""
    empty = Catalogue.empty(DIMENSION)
    nothing = np.zeros(0, np.int64)
    for index_from in (0, 10):
        snapshot = Snapshot.build(UNTRAINED, None, empty, nothing, index_from=index_from)
        user = remember(snapshot, past([-1], [0]), 0)
        allowed = snapshot.catalogue.listed
        ranked = recommend(snapshot, user, limit=3, allowed=allowed, excluded=nothing)
        assert len(ranked.rows) == 0
        assert len(search(snapshot, encode(["x"])[0], limit=3, allowed=allowed).rows) == 0


def test_a_model_of_another_text_space_is_refused(made: Trained) -> None:
    """Naming both dimensions."""
    with pytest.raises(ValueError, match=f"dimension {DIMENSION}, the catalogue's have 3"):
        Snapshot.build("v", made, Catalogue.empty(3), np.zeros(0, np.int64))


# ---------------------------------------------------------------------------- indexes


def test_items_newer_than_the_index_are_recommended(
    made: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is of the items that were there; what came later stands beside it."""
    monkeypatch.setattr("models.ranking.EXACT_WORK", 0)
    snapshot = small_snapshot(40, made.model, index_from=20)
    assert snapshot.indexed == 40
    later = snapshot.catalogue.updated(entries(5, first=40), ["i3"], encode)
    now = snapshot.refreshed(later, snapshot.counts)
    assert now.index is snapshot.index
    assert now.indexed == 40
    user = remember(now, past([1, 5, 30], [0, 1, 2]), 3)
    nothing = np.zeros(0, np.int64)
    ranked = recommend(now, user, limit=100, allowed=later.listed, excluded=nothing)
    assert sorted(ranked.rows.tolist()) == [row for row in range(45) if row != 3]


def test_small_catalogues_have_no_index(made: Trained) -> None:
    """Fields are counted apart from items: there are two keys an item here."""
    bare = small_snapshot(15, made.model, index_from=31)
    assert bare.index is None
    assert bare.key_index is None
    assert (bare.indexed, bare.indexed_keys) == (0, 0)
    keys_only = small_snapshot(15, made.model, index_from=30)
    assert keys_only.index is None
    assert keys_only.indexed_keys == 30


def test_the_key_index_stays_while_its_keys_do(made: Trained) -> None:
    """New items come after its rows; a change before its end makes its rows mean something else."""
    snapshot = small_snapshot(40, made.model, index_from=20)
    assert snapshot.indexed_keys == 80
    catalogue_ = snapshot.catalogue

    more = snapshot.refreshed(catalogue_.updated(entries(5, 40), [], encode), snapshot.counts)
    assert more.key_index is snapshot.key_index
    changes: list[tuple[list[Entry], list[str]]] = [
        ([Entry("i2", "new", {"title": "new"})], []),
        ([], ["i2"]),
        # The last item's keys stay where they were, and are others.
        ([Entry("i39", "", {"title": "new", "description": "new too"})], []),
    ]
    for changed, removed in changes:
        other = catalogue_.updated(changed, removed, encode)
        now = snapshot.refreshed(other, snapshot.counts)
        assert now.key_index is None
        assert now.indexed_keys == 0


def test_the_default_shape_is_one_that_can_be_packed() -> None:
    """A model of the shape that training gives by default makes the round trip."""
    model = random_model(5, **RecommenderConfig(items=3).as_dict())
    assert Trained.unpack(trained(model).pack()).model.config == RecommenderConfig(items=3)
