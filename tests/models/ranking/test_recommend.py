"""Recommendations compared with scoring every item and with brute-force diversity."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import models.index.ann_index
import models.ranking.recommend
from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions, attend
from models.catalogue.catalogue import Catalogue
from models.catalogue.item_values import ItemEntry
from models.catalogue.snapshot import Snapshot
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, build_memory
from models.ranking.recommend import (
    EXACT_WORK,
    INDEXED_CANDIDATES,
    candidate_count,
    candidates,
    coarse_query,
    gathered_count,
    recommend,
)
from models.ranking.scoring import score
from models.recommender import target_attention
from models.recommender.recommender import Recommender
from tests.support.pasts import (
    Loop,
    basket_snapshot,
    drawn_snapshot,
    similar_snapshot,
    told_snapshot,
)
from tests.support.small import (
    DAY,
    DIMENSION,
    catalogue,
    encode,
    past,
    random_model,
    random_past,
    trained,
)
from tests.support.small import snapshot as small_snapshot

ITEMS = 30
AT = 6 * DAY
NONE = np.zeros(0, np.int64)

quick = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def model() -> Recommender:
    return random_model(21, n_items=24)


@pytest.fixture(scope="module")
def snapshot(model: Recommender) -> Snapshot:
    counts = np.random.default_rng(0).integers(0, 6, ITEMS)
    return small_snapshot(ITEMS, model, counts)


def somebody(snapshot: Snapshot, seed: int = 1, events: int = 8) -> UserMemory:
    return build_memory(snapshot, random_past(seed, events, len(snapshot.catalogue)), AT)


def nobody(snapshot: Snapshot) -> UserMemory:
    return build_memory(snapshot, UserHistory.empty(), AT)


def ranking(snapshot: Snapshot, user: UserMemory) -> NDArray[np.int64]:
    """All items by falling score, ties by row."""
    total = score(snapshot, user, np.arange(len(snapshot.catalogue))).total.numpy()
    return np.argsort(-total, kind="stable")


# ---------------------------------------------------------------------------- order


@quick
@given(
    seed=st.integers(0, 1000),
    limit=st.integers(1, 40),
    barred=st.sets(st.integers(0, ITEMS - 1), max_size=30),
    excluded=st.lists(st.integers(0, ITEMS - 1), max_size=8),
)
def test_recommendations_are_the_order_of_all_scores(
    snapshot: Snapshot, seed: int, limit: int, barred: set[int], excluded: list[int]
) -> None:
    user = somebody(snapshot, seed)
    allowed = np.ones(ITEMS, dtype=np.bool_)
    allowed[list(barred)] = False
    before = allowed.copy()
    out = np.array(excluded, dtype=np.int64)
    ranked = recommend(snapshot, user, limit=limit, allowed=allowed, excluded=out)
    gone = barred | set(excluded)
    expected = [row for row in ranking(snapshot, user).tolist() if row not in gone][:limit]
    assert ranked.rows.tolist() == expected
    assert ranked.personal
    np.testing.assert_array_equal(allowed, before)
    again = score(snapshot, user, ranked.rows)
    for part in ("total", "attention", "transitions", "prior"):
        np.testing.assert_allclose(getattr(ranked.scores, part), getattr(again, part), atol=1e-5)


@pytest.mark.parametrize("diversity", [0.0, 0.5])
@pytest.mark.parametrize("known", [True, False])
def test_empty_filter_recommends_nothing(snapshot: Snapshot, diversity: float, known: bool) -> None:
    """With no item allowed there are no recommendations, with or without a history."""
    user = somebody(snapshot) if known else nobody(snapshot)
    ranked = recommend(snapshot, user, limit=5, allowed=np.zeros(ITEMS, np.bool_), excluded=NONE,
                       diversity=diversity)  # fmt: skip
    assert ranked.rows.tolist() == []
    assert ranked.scores.total.shape == (0,)


# ---------------------------------------------------------------------------- without a memory


def test_without_a_memory_it_is_popularity(snapshot: Snapshot) -> None:
    """An empty memory gets items by popularity, ties by row, marked as not personal."""
    allowed = np.ones(ITEMS, dtype=np.bool_)
    allowed[5] = False
    ranked = recommend(
        snapshot, nobody(snapshot), limit=12, allowed=allowed, excluded=np.array([7])
    )
    counts = snapshot.counts.tolist()
    expected = sorted((row for row in range(ITEMS) if row not in {5, 7}),
                      key=lambda row: (-counts[row], row))  # fmt: skip
    assert ranked.rows.tolist() == expected[:12]
    assert not ranked.personal
    np.testing.assert_allclose(ranked.scores.total, snapshot.tables.prior[ranked.rows], atol=1e-6)


# ---------------------------------------------------------------------------- diversity


def marginal_relevance(
    worth: list[float], vectors: NDArray[np.float64], limit: int, diversity: float
) -> list[int]:
    """MMR by definition: each step looks at every open item and everything taken."""
    low, high = min(worth), max(worth)
    relevance = [(w - low) / (high - low) for w in worth]
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    taken: list[int] = []
    while len(taken) < min(limit, len(worth)):
        values = {
            place: (1 - diversity) * relevance[place]
            - diversity * max((float(unit[place] @ unit[other]) for other in taken), default=0.0)
            for place in range(len(worth))
            if place not in taken
        }
        best = max(values.values())
        taken.append(next(place for place, value in values.items() if value > best - 1e-9))
    return taken


@pytest.mark.parametrize("diversity", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("known", [True, False])
def test_diversity_is_marginal_relevance(snapshot: Snapshot, diversity: float, known: bool) -> None:
    """Against the definition in float64; 0 is the order of scores alone."""
    user = somebody(snapshot) if known else nobody(snapshot)
    allowed = np.ones(ITEMS, dtype=np.bool_)
    pure = recommend(snapshot, user, limit=ITEMS, allowed=allowed, excluded=NONE)
    ranked = recommend(snapshot, user, limit=8, allowed=allowed, excluded=NONE, diversity=diversity)
    worth = pure.scores.total.double().tolist() if known else [-float(n) for n in range(ITEMS)]
    vectors = snapshot.tables.vectors[torch.from_numpy(pure.rows)].double().numpy()
    expected = pure.rows[marginal_relevance(worth, vectors, 8, diversity)]
    assert ranked.rows.tolist() == expected.tolist()
    if diversity == 0:
        assert ranked.rows.tolist() == pure.rows[:8].tolist()


def test_equal_scores_and_missing_vectors_can_be_spread() -> None:
    """Diversity over equal scores and missing vectors returns distinct items of finite score."""
    made = catalogue(0).updated([ItemEntry(f"i{n}") for n in range(4)], [], encode)
    snapshot = Snapshot.build("v", None, made, np.zeros(4, np.int64))
    user = build_memory(snapshot, past([], [], profile_rows=np.array([-1], np.int32),
                                   profile_content=encode(["x"])), AT)  # fmt: skip
    ranked = recommend(snapshot, user, limit=3, allowed=np.ones(4, np.bool_), excluded=NONE,
                       diversity=0.7)  # fmt: skip
    assert sorted(set(ranked.rows.tolist())) == sorted(ranked.rows.tolist())
    assert len(ranked.rows) == 3
    assert torch.isfinite(ranked.scores.total).all()


# ---------------------------------------------------------------------------- candidates


@pytest.fixture(scope="module")
def large() -> Snapshot:
    """Four hundred items, with an index over all of them."""
    return small_snapshot(400, random_model(22, n_items=380), index_from=100)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index finds no more than twice as many items as become candidates, by their codes."""
    monkeypatch.setattr(models.ranking.recommend, "FIRST_ORDER_ITEMS", 1)
    monkeypatch.setattr(models.index.ann_index, "_NARROW_ROWS", 8)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("indexed", [True, False])
def test_candidates_hold_what_ranks_first(
    large: Snapshot, indexed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ten best of 100 candidates contain more than 80 % of the true ten best."""
    snapshot = large if indexed else small_snapshot(400, large.model)
    assert (snapshot.index is not None) == indexed
    for name in ("CANDIDATES", "INDEXED_CANDIDATES"):
        monkeypatch.setattr(models.ranking.recommend, name, 100)
    allowed = np.ones(400, dtype=np.bool_)
    hits = 0
    every = AttentionOptions(mode="exact")
    for seed in range(20):
        user = somebody(snapshot, seed, events=5)
        near = recommend(snapshot, user, limit=10, allowed=allowed, excluded=NONE)
        true = recommend(snapshot, user, limit=10, allowed=allowed, excluded=NONE, options=every)
        assert near.compared < true.compared == 400
        hits += len(set(near.rows.tolist()) & set(true.rows.tolist()))
        order = {row: place for place, row in enumerate(ranking(snapshot, user).tolist())}
        places = [order[row] for row in near.rows.tolist()]
        assert places == sorted(places)
    assert hits / 200 > 0.8


def test_the_answer_says_whether_every_item_was_scored(
    large: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = somebody(large, 1)
    allowed = np.ones(len(large.catalogue), dtype=np.bool_)
    monkeypatch.setattr(models.ranking.recommend, "INDEXED_CANDIDATES", 400)
    true = recommend(large, user, limit=10, allowed=allowed, excluded=NONE)
    monkeypatch.setattr(models.ranking.recommend, "EXACT_WORK", 0)
    monkeypatch.setattr(models.ranking.recommend, "INDEXED_CANDIDATES", 40)
    near = recommend(large, user, limit=10, allowed=allowed, excluded=NONE)
    asked = recommend(
        large,
        user,
        limit=10,
        allowed=allowed,
        excluded=NONE,
        options=AttentionOptions(mode="exact"),
    )
    assert near.compared < true.compared == asked.compared == len(allowed)
    assert asked.rows.tolist() == true.rows.tolist()


@pytest.mark.usefixtures("narrow")
def test_candidates_keep_to_what_is_allowed(
    large: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates are distinct and allowed, and a narrow filter keeps all of its items."""
    later = large.catalogue.updated(
        [ItemEntry(f"new{n}", fields={"title": f"new {n}"}) for n in range(60)], [], encode
    )
    snapshot = large.refreshed(later, large.counts)
    user = somebody(large, 3)
    rng = np.random.default_rng(0)
    for share in (0.02, 0.3, 0.9):
        allowed = rng.random(460) < share
        found = candidates(snapshot, user, allowed, 40)
        assert len(set(found.tolist())) == len(found)
        assert allowed[found].all()
        assert len(found) >= min(40, int(allowed.sum()))
    few = np.zeros(460, dtype=np.bool_)
    few[[5, 300, 401, 459]] = True
    assert sorted(candidates(snapshot, user, few, 40).tolist()) == [5, 300, 401, 459]
    monkeypatch.setattr(models.ranking.recommend, "EXACT_WORK", 0)
    ranked = recommend(snapshot, user, limit=3, allowed=few, excluded=np.array([300]))
    assert set(ranked.rows.tolist()) == {5, 401, 459}


def follow(snapshot: Snapshot, user: UserMemory) -> dict[int, float]:
    """Return F of every trained item that followed one of the last eight.

    Rows are the model's; they are the catalogue's too where that was made of i0, i1, … in order.
    """
    items, weights, _ = snapshot.model.statistics.transition_counts
    columns, counts = items.tolist(), weights.tolist()
    total: dict[int, float] = {}
    for k, item in enumerate(user.recent_items.tolist()[:8]):
        pairs = zip(columns[item], counts[item], strict=True) if item >= 0 else ()
        for column, count in pairs:
            if count > 0:
                total[column] = total.get(column, 0.0) + 0.3**k * count
    return total


def first_items(values: Sequence[float], count: int) -> list[int]:
    """Return the `count` items of the largest values above 0, without those near the next one."""
    order = sorted(range(len(values)), key=lambda item: -values[item])
    least = max(0.0, 1.01 * values[order[count]])
    return [item for item in order[:count] if values[item] > least]


def test_candidate_count_by_hand(snapshot: Snapshot, large: Snapshot) -> None:
    """With an encoder, candidates are as many as are compared well; an index has errors.

    Without one, their number grows with the catalogue and shrinks with the memory.
    """
    few, many = somebody(large, events=8), somebody(large, events=800)
    assert candidate_count(snapshot, few, 20, 3_000) == target_attention.CANDIDATES
    assert candidate_count(large, few, 20, 1_000_000) == INDEXED_CANDIDATES
    assert candidate_count(large, few, 400, 1_000_000) == 1_600  # some to choose from
    assert gathered_count(100_000, 300) == target_attention.FIRST_ORDER_ITEMS
    assert gathered_count(100_000, 1_600) == 3_200
    assert gathered_count(1_000_000, 300) == 5_000
    plain = Snapshot.build("v", None, large.catalogue, large.counts, index_from=100)
    few, many = somebody(plain, events=8), somebody(plain, events=800)
    assert candidate_count(plain, few, 20, 100_000) == INDEXED_CANDIDATES
    assert candidate_count(plain, few, 20, 1_000_000) == 2_500
    assert candidate_count(plain, few, 20, 10_000_000) == 25_000
    assert candidate_count(plain, many, 20, 10_000_000) == EXACT_WORK // 4 // len(many)
    assert candidate_count(plain, many, 400, 1_000_000) == 1_600


def to_first_order(loop: Loop, target: int) -> float:
    """The attention part of a target to first order in its part of the query, by differences."""
    step = 1e-4
    parts = {}
    for factor in (-step, 0.0, step):
        alpha, gain = loop.attention(target, DEFAULT_OPTIONS, target_in_query=factor)
        parts[factor] = float((alpha * gain).sum())
    return parts[0.0] + (parts[step] - parts[-step]) / (2 * step)


@pytest.mark.parametrize("make", [drawn_snapshot, told_snapshot, basket_snapshot, similar_snapshot])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_without_an_index_candidates_are_the_best_to_first_order(
    make: Callable[[], Snapshot], exclude_self: bool
) -> None:
    """Candidates are the best by all parts, the target's query to first order.

    These are the float64 loop's.
    """
    snapshot, options = make(), AttentionOptions(exclude_self=exclude_self)
    every = len(snapshot.catalogue)
    for seed in range(5):
        made = random_past(seed, 9, every)
        loop, approximate = Loop(snapshot, made, AT), snapshot.tables.prior.double().numpy()
        for target in range(every):
            approximate[target] += to_first_order(loop, target)
            approximate[target] += loop.transitions(target, options) + loop.similarity(target)
        user = build_memory(snapshot, made, AT)
        allowed = np.ones(every, dtype=np.bool_)
        allowed[seed] = False
        found = candidates(snapshot, user, allowed, 5, options)
        order = [row for row in np.argsort(-approximate).tolist() if row != seed]
        assert found.tolist() == sorted(order[:5])


@pytest.mark.parametrize("most", [60, 24])
@pytest.mark.parametrize("is_boosted", [False, True])
def test_items_newer_than_the_index_are_compared_by_themselves(
    monkeypatch: pytest.MonkeyPatch, large: Snapshot, is_boosted: bool, most: int
) -> None:
    """Of the items that the index lacks, the best by the readout are compared to first order."""
    later = large.catalogue.updated(
        [ItemEntry(f"new{n}", fields={"title": f"new {n}"}) for n in range(60)], [], encode
    )
    snapshot = large.refreshed(later, large.counts)
    assert snapshot.indexed_items == 400
    newer, bare, among = np.arange(460) >= 400, replace(snapshot, index=None), 0
    boost = None
    if is_boosted:
        boost = np.random.default_rng(1).normal(0, 0.5, 460).astype(np.float32)
    for seed in range(5):
        user = somebody(snapshot, seed)
        every = [candidates(each, user, newer | ~newer, 40) for each in (snapshot, bare)]
        assert every[0].tolist() == every[1].tolist()
        among += int(np.count_nonzero(newer[every[0]]))
        tables = snapshot.tables
        with torch.inference_mode():
            readout = coarse_query(snapshot, user).readout.double()
            near = tables.vectors[400:].double() @ readout + tables.prior[400:]
            if boost is not None:
                near += torch.from_numpy(boost[400:])
            keys, values, bias, own = (part.double() for part in (*user.block[:3], user.query))
            steps = []
            for step in (1e-5, -1e-5):
                query = tables.queries[:, 400:].double() * step + own[:, None]
                context = attend(query, keys, values, bias=bias[:, None]).context
                steps.append((context * tables.outputs[:, 400:]).sum((0, 2)))
        compared = torch.topk(near, most).indices
        refined = (near + (steps[0] - steps[1]) / 2e-5)[compared]
        best = 400 + compared[torch.topk(refined, 7).indices]
        with monkeypatch.context() as patch:
            patch.setattr(models.ranking.recommend, "FIRST_ORDER_ITEMS", most)
            found = candidates(snapshot, user, newer, 7, boost=boost)
        assert found.tolist() == sorted(best.tolist())
    assert among > 5


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("part", ["transitions", "similarity", "repeats"])
def test_what_other_parts_rank_first_is_compared(part: str) -> None:
    """What followed the newest events, is similar or repeated joins what an index finds.

    That part decides here, so that its first items are candidates, where they are allowed.
    """
    shape: dict[str, dict[str, Any]] = {
        "transitions": {},
        "similarity": {"similar_items": 5, "transitions_per_item": 0},
        "repeats": {"next_basket": True, "repeat_consumption": True},
    }
    model = random_model(22, n_items=380, **shape[part])
    with torch.no_grad():
        if model.has_transitions:
            model.transition_scale.weight.zero_()
            model.transition_scale.bias.fill_(0.0)
            model.transition_scale.bias[1 if part == "repeats" else 0] = 1e6
    if model.statistics.similarity is not None:
        model.set_similarity(model.statistics.similarity.scaled(1e6))
    snapshot = small_snapshot(400, model, index_from=100)
    compared = 0
    for seed in range(10):
        user = somebody(snapshot, seed)
        allowed = np.random.default_rng(seed).random(400) < 0.8
        for count in (3, 12):
            found = candidates(snapshot, user, allowed, count)
            assert len(set(found.tolist())) == count
            assert allowed[found].all()
            own = score(snapshot, user, np.arange(400))
            values = own.similarity if part == "similarity" else own.transitions
            assert values is not None
            first = [row for row in first_items(values.tolist(), count) if allowed[row]]
            assert set(first) <= set(found.tolist())
            compared += len(first)
    assert compared > 20


@pytest.mark.parametrize("shape", [{"transitions_per_item": 0}, {"blocks": 0}, None])
def test_models_without_transitions_have_candidates(shape: dict[str, int] | None) -> None:
    model = None if shape is None else random_model(22, n_items=30, **shape)
    snapshot = Snapshot.build(
        "v", None if model is None else trained(model), catalogue(40), np.zeros(40, np.int64)
    )
    assert len(candidates(snapshot, somebody(snapshot), np.ones(40, dtype=np.bool_), 5)) == 5


def test_followers_map_to_catalogue_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers are mapped from the model's rows to the catalogue's, removed items left out."""
    monkeypatch.setattr(models.ranking.recommend, "FIRST_ORDER_ITEMS", 1)
    model = random_model(22, n_items=30)
    with torch.no_grad():  # only what followed decides
        model.transition_scale.weight.zero_()
        model.transition_scale.bias.fill_(1e6)
    made = trained(model)
    other = [f"i{n}" for n in np.random.default_rng(0).permutation(40)]
    whole = Catalogue.empty(DIMENSION).updated(
        [ItemEntry(id_, id_, {"title": id_}) for id_ in other], [], encode
    ).updated([], ["i3", "i8"], encode)  # fmt: skip
    snapshot = Snapshot.build("v", made, whole, np.zeros(0, np.int64), index_from=20)
    assert snapshot.index is not None
    compared = 0
    for seed in range(8):
        user = somebody(snapshot, seed)
        total = follow(snapshot, user)
        found = candidates(snapshot, user, whole.servable, 8)
        names = {whole.vocabulary.id(row) for row in found.tolist()}
        most = first_items([total.get(item, 0.0) for item in range(30)], 8)
        expected = {made.item_ids[item] for item in most} - {"i3", "i8"}
        assert expected <= names
        assert not names & {"i3", "i8"}
        compared += len(expected)
        scores = score(snapshot, user, np.arange(len(whole)))
        for row, name in enumerate(whole.vocabulary.ids):
            followed = name in made.item_ids and made.item_ids.index(name) in total
            assert bool(scores.transitions[row] != 0) == followed
    assert compared > 20
