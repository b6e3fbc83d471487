"""Similar items compared with float64 loops over the content and trained spaces."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from models.attention.attend import AttentionOptions
from models.catalogue.item_values import ItemEntry
from models.catalogue.snapshot import Snapshot
from models.index import ann_index
from models.ranking.similar_items import SPACES, SimilarItems, Space, similar, spaces_of
from models.ranking.steering import ItemSteering, Pin
from models.recommender.co_occurrence import TransitionCounts
from models.recommender.recommender import Recommender
from tests.support.reference import cosine, softmax
from tests.support.small import DIMENSION, catalogue, encode, random_model, trained

ITEMS, TRAINED = 30, 24  # the last six are known by their text alone
MUTE = "i3"  # in training, and without any text


@pytest.fixture(scope="module")
def model() -> Recommender:
    return random_model(21, n_items=TRAINED)


@pytest.fixture(scope="module")
def snapshot(model: Recommender) -> Snapshot:
    made = catalogue(ITEMS).updated([ItemEntry(MUTE), ItemEntry("hidden", hidden=True)], [], encode)
    return Snapshot.build("v", trained(model), made, np.zeros(ITEMS + 1, np.int64))


def content_evidence(snapshot: Snapshot) -> float:
    """Return what content tells of the followers of items that have both keys, at most 500."""
    counted = snapshot.model.statistics.transition_counts
    place = {int(row): at for at, row in enumerate(snapshot.item_rows)}
    usable = snapshot.catalogue.has_content & snapshot.catalogue.visible
    known = [row for row in place if usable[row]]
    sums = []
    for vectors in (snapshot.catalogue.content, snapshot.tables.vectors.numpy()):
        total = 0.0
        for row in known:
            near = {
                other: cosine(vectors[row].tolist(), vectors[other].tolist()) for other in known
            }
            others = [near[other] for other in known if other != row]
            followers = counted.items[place[row]][counted.counts[place[row]] > 0][:10]
            rows = [int(snapshot.item_rows[follower]) for follower in followers.tolist()]
            total += math.fsum(
                (near[other] - np.mean(others)) / np.std(others) for other in rows if other in near
            )
        sums.append(max(0.0, total))
    return min(1.0, (20 + sums[0]) / (20 + sums[1]))


def loop(
    snapshot: Snapshot,
    row: int,
    allowed: NDArray[np.bool_],
    spaces: tuple[Space, ...] = SPACES,
    k: int | None = None,
) -> dict[int, tuple[float, float, dict[str, tuple[float, float]]]]:
    """Return score, weight, and cosine and share per space of each allowed item.

    With `k`, only the keys of the k largest cosines of each space are attended.
    """
    tables = {
        "content": (snapshot.catalogue.content, snapshot.catalogue.has_content),
        "trained": (snapshot.tables.vectors.numpy(), snapshot.trained_rows.numpy() >= 0),
    }
    assert snapshot.trained is not None
    events = [0] * len(snapshot.trained_rows)
    for other, place in enumerate(snapshot.trained_rows.tolist()):
        if place >= 0:
            events[other] = int(snapshot.trained.item_counts[place])
    mixed = all(space in spaces and there[row] for space, (_, there) in tables.items())
    evidence = content_evidence(snapshot)
    logits: dict[tuple[int, str], float] = {}
    cosines: dict[tuple[int, str], float] = {}
    for space in spaces:
        vectors, there = tables[space]
        if not there[row]:
            continue
        every = {
            other: cosine(vectors[row].tolist(), vectors[other].tolist())
            for other in range(len(vectors))
            if there[other] and snapshot.catalogue.visible[other] and other != row
        }
        mean = math.fsum(every.values()) / len(every)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in every.values()) / len(every))
        for other, value in every.items():
            if allowed[other] and snapshot.catalogue.is_named[other]:
                cosines[other, space] = value
                logits[other, space] = (value - mean) / std
                if mixed and space == "trained":
                    known = events[row] / (events[row] + 20) * events[other] / (events[other] + 20)
                    logits[other, space] *= math.sqrt(known)
                elif mixed:
                    logits[other, space] *= evidence
    for space in SPACES if k is not None else ():
        own_keys = sorted((key for key in logits if key[1] == space), key=lambda key: -cosines[key])
        for key in own_keys[k:]:
            del logits[key]
    weights = dict(zip(logits, softmax(list(logits.values())), strict=True))
    found = {}
    for other in {other for other, _ in logits}:
        own = {space: weights[other, space] for at, space in logits if at == other}
        gathered = math.fsum(own.values())
        score = math.log(math.fsum(math.exp(logits[other, space]) for space in own))
        parts = {space: (cosines[other, space], own[space] / gathered) for space in own}
        found[other] = (score, gathered, parts)
    return found


def everything(snapshot: Snapshot) -> NDArray[np.bool_]:
    return np.ones(len(snapshot.catalogue), dtype=np.bool_)


def check(found: SimilarItems, true: dict[int, tuple[float, float, dict[str, tuple[float, float]]]],
          limit: int) -> None:  # fmt: skip
    """Assert that the results are the loop's best items with the loop's numbers."""
    order = sorted(true, key=lambda row: -true[row][0])[:limit]
    assert found.rows.tolist() == order
    for at, row in enumerate(order):
        score, weight, parts = true[row]
        assert found.scores[at] == pytest.approx(score, abs=1e-4)
        assert found.weights[at] == pytest.approx(weight, abs=1e-5)
        told: dict[str, tuple[float, float]]
        told = {space: (one.cosine, one.share) for space, one in found.spaces[at].items()}
        assert told.keys() == parts.keys()
        for space, numbers in parts.items():
            assert told[space] == pytest.approx(numbers, abs=1e-4)


@pytest.mark.parametrize("spaces", [SPACES, ("content",), ("trained",)])
@pytest.mark.parametrize("row", [0, 3, 9, 23, 24, 29])
def test_similar_is_one_softmax_over_the_keys_of_both_spaces(
    snapshot: Snapshot, row: int, spaces: tuple[Space, ...]
) -> None:
    """Similar items equal the softmax of the loop for any item, spaces and filter."""
    some = everything(snapshot)
    some[[2, 9, 11, 26]] = False
    for allowed in (everything(snapshot), some):
        for limit in (7, 100):
            found = similar(snapshot, row, limit=limit, allowed=allowed, spaces=spaces)
            check(found, loop(snapshot, row, allowed, spaces), limit)


@pytest.mark.parametrize("k", [1, 4, 200])
@pytest.mark.parametrize("row", [0, 9, 29])
def test_coarse_similar_is_the_softmax_over_the_nearest_keys(
    snapshot: Snapshot, row: int, k: int
) -> None:
    """Coarse equals the loop over the k nearest keys of each space, and `mass` is their share."""
    some = everything(snapshot)
    some[[2, 9, 11, 26]] = False
    for allowed in (everything(snapshot), some):
        for probes in (None, 1_000):
            options = AttentionOptions(mode="coarse", k=k, probes=probes)
            found = similar(snapshot, row, limit=100, allowed=allowed, options=options)
            whole, kept = loop(snapshot, row, allowed), loop(snapshot, row, allowed, k=k)
            check(found, kept, 100)
            mass = math.fsum(
                whole[other][1] * whole[other][2][space][1]
                for other, (_, _, keys) in kept.items()
                for space in keys
            )
            assert found.mass == pytest.approx(mass, abs=1e-5)
            assert found.keys == sum(len(keys) for _, _, keys in kept.values())


def test_few_probes_find_fewer_keys_from_an_index_that_is_kept(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One list holds fewer keys than all do; it is built once, and its mass is of its keys."""
    options = AttentionOptions(mode="coarse", k=20)
    every = similar(snapshot, 0, limit=100, allowed=everything(snapshot), options=options)
    for _ in range(2):
        probed = replace(options, probes=1)
        few = similar(snapshot, 0, limit=100, allowed=everything(snapshot), options=probed)
        assert 0 < few.keys < every.keys
        assert few.mass < every.mass
        assert float(few.weights.sum()) == pytest.approx(1, abs=1e-5)
        monkeypatch.setattr(ann_index, "build_index", None)
    monkeypatch.undo()
    twin = ItemEntry("twin", fields={"title": "title 0", "description": "about 0"})
    later = snapshot.refreshed(snapshot.catalogue.updated([twin], [], encode), snapshot.counts)
    nearest = replace(options, k=1)
    found = similar(later, 0, limit=100, allowed=everything(later), options=nearest)
    assert later.catalogue.row("twin") in found.rows


def test_a_pinned_item_is_attended_wherever_it_is(snapshot: Snapshot) -> None:
    """With `coarse`, a pin stands at its place with its own score, near or not."""
    whole = similar(snapshot, 0, limit=100, allowed=everything(snapshot))
    steering = ItemSteering(pins=(Pin(int(whole.rows[-1]), 1),))
    options = AttentionOptions(mode="coarse", k=2)
    found = similar(
        snapshot, 0, limit=3, allowed=everything(snapshot), steering=steering, options=options
    )
    assert (found.rows[0], found.moved[0]) == (whole.rows[-1], "pinned")
    assert found.scores[0] == pytest.approx(whole.scores[-1], abs=1e-5)
    assert len(found.rows) == 3


def test_an_item_is_compared_where_it_has_a_key(snapshot: Snapshot) -> None:
    """Items are compared in each space in which both have a vector."""
    mute = snapshot.catalogue.row(MUTE)
    assert spaces_of(snapshot, 0) == ("content", "trained")
    assert spaces_of(snapshot, mute) == ("trained",)
    assert spaces_of(snapshot, 29) == ("content",)
    by_row = {
        row: dict(zip(found.rows.tolist(), found.spaces, strict=True))
        for row in (0, mute, 29)
        for found in [similar(snapshot, row, limit=100, allowed=everything(snapshot))]
    }
    assert {space for keys in by_row[29].values() for space in keys} == {"content"}
    assert mute not in by_row[29]
    assert {space for keys in by_row[mute].values() for space in keys} == {"trained"}
    assert sorted(by_row[mute]) == [row for row in range(TRAINED) if row != mute]
    assert set(by_row[0][29]) == {"content"}
    assert mute not in by_row[0]
    assert set(by_row[0][1]) == {"content", "trained"}


@pytest.mark.parametrize("told_by", [("content",), ("trained",), SPACES])
def test_spaces_that_tell_what_is_taken_together_find_sequels(told_by: tuple[Space, ...]) -> None:
    """Of twelve series of five, items find the other four, though another space is random."""
    series, rng = np.repeat(np.arange(12), 5), np.random.default_rng(3)
    items, told = len(series), {}
    for space, size in (("content", DIMENSION), ("trained", 12)):
        told[space] = 0.3 * rng.normal(size=(items, size))
        if space in told_by:
            told[space] += rng.normal(size=(12, size))[series]
    model = random_model(5, n_items=items)
    with torch.no_grad():
        model.content_projection.weight.zero_()
        model.id_embedding.weight.copy_(torch.from_numpy(told["trained"]))
    others = np.array([np.flatnonzero((series == series[row]) & (np.arange(items) != row))
                       for row in range(items)])  # fmt: skip
    followers = np.pad(others, ((0, 0), (0, 1)), constant_values=items).astype(np.int32)
    sums = (followers < items).astype(np.float32)
    model.statistics.load(TransitionCounts(torch.from_numpy(followers), torch.from_numpy(sums)), 1)
    made = catalogue(items).updated(
        [
            ItemEntry(f"i{row}", f"new {row}", embedding=vector)
            for row, vector in enumerate(told["content"].astype(np.float32))
        ],
        [],
        encode,
    )
    counts = 26 + rng.permutation(items) % 2
    before = Snapshot.build("v", trained(model, counts), catalogue(items), counts)
    similar(before, 0, limit=10, allowed=made.visible)  # with the texts that there were
    snapshot = before.refreshed(made, counts)
    found = [similar(snapshot, row, limit=10, allowed=made.visible).rows for row in range(items)]
    first = similar(snapshot, 0, limit=10, allowed=made.visible)
    check(first, loop(snapshot, 0, made.visible), 10)
    assert np.mean([np.isin(others[row], rows).sum() for row, rows in enumerate(found)]) > 3.8


def test_similar_leaves_out_what_has_no_key(model: Recommender) -> None:
    """Items without a vector are left out, and an empty filter returns nothing."""
    made = catalogue(ITEMS).updated([ItemEntry("blank")], [], encode)
    snapshot = Snapshot.build("v", trained(model), made, np.zeros(ITEMS, np.int64))
    found = similar(snapshot, 3, limit=100, allowed=made.visible)
    assert sorted(found.rows.tolist()) == [row for row in range(ITEMS) if row != 3]
    nothing = np.zeros(ITEMS + 1, dtype=np.bool_)
    none = similar(snapshot, 3, limit=5, allowed=nothing)
    assert (none.rows.tolist(), len(none.scores), none.spaces) == ([], 0, ())
    assert similar(snapshot, 29, limit=5, allowed=made.visible, spaces=("trained",)).spaces == ()


def test_similar_before_training_is_likeness_of_text() -> None:
    """Without a model, the item of equal text comes first, with cosine 1."""
    made = catalogue(5).updated(
        [ItemEntry("twin", fields={"title": "title 2", "description": "about 2"})], [], encode
    )
    snapshot = Snapshot.build("v", None, made, np.zeros(6, np.int64))
    found = similar(snapshot, 2, limit=2, allowed=made.visible)
    assert found.rows[0] == 5
    assert [set(keys) for keys in found.spaces] == [{"content"}, {"content"}]
    assert found.spaces[0]["content"].cosine == pytest.approx(1, abs=1e-6)
    assert found.spaces[1]["content"].cosine < 0.99


def test_items_that_are_all_alike_share_the_weight() -> None:
    """Items of equal cosine share the weight equally, without division by zero."""
    same = [ItemEntry(f"i{n}", fields={"title": "one title"}) for n in range(4)]
    made = catalogue(0).updated(same, [], encode)
    snapshot = Snapshot.build("v", None, made, np.zeros(4, np.int64))
    found = similar(snapshot, 1, limit=9, allowed=made.visible)
    assert found.rows.tolist() == [0, 2, 3]
    assert found.scores.tolist() == [0, 0, 0]
    assert found.weights.tolist() == pytest.approx([1 / 3] * 3)


def test_labels_name_no_item() -> None:
    """Items with tags and categories alone are answered only in a catalogue that names none."""
    labels = {"tags": "red, small", "categories": "home"}
    bare = [ItemEntry(f"i{n}", fields=labels, categories=("home",)) for n in range(3)]
    for named in (
        [],
        [ItemEntry("x", "Cup", {"title": "Cup"})],
        [ItemEntry("x", fields={"description": "a cup"})],
    ):
        made = catalogue(0).updated([*bare, *named], [], encode)
        snapshot = Snapshot.build("v", None, made, np.zeros(3 + len(named), np.int64))
        found = similar(snapshot, 0, limit=100, allowed=made.visible)
        assert found.rows.tolist() == ([3] if named else [1, 2])
