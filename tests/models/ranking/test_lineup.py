"""Steered recommendations compared with a ranking of the whole catalogue by a plain loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import models.index.ann_index
import models.ranking.recommend
from models.attention.attend import AttentionOptions
from models.catalogue.item_values import ItemEntry
from models.catalogue.snapshot import Snapshot
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, build_memory
from models.ranking.recommend import candidates, recommend
from models.ranking.scoring import score
from models.ranking.steering import FEW_EVENTS, ItemSteering, Pin, Quota
from tests.support.small import DAY, catalogue, encode, random_model, random_past, trained

ITEMS = 400
AT = 6 * DAY
NONE = np.zeros(0, np.int64)
ALL = np.ones(ITEMS, np.bool_)
EXACT = AttentionOptions(mode="exact")

quick = settings(max_examples=40, deadline=None, derandomize=True)


def shelves(row: int) -> list[str]:
    """The categories of an item: none, one or two of seven."""
    rng = np.random.default_rng(row)
    return [f"c{n}" for n in rng.choice(7, rng.integers(0, 3), replace=False)]


def decade(row: int) -> int | None:
    """A number that some items have."""
    return None if row % 11 == 0 else row % 5


def shop(index_from: int) -> Snapshot:
    """Four hundred items with categories and a number, most of them trained."""
    made = catalogue(ITEMS).updated(
        [
            ItemEntry(
                f"i{n}",
                f"title {n}",
                {"title": f"title {n}", "description": f"about {n}"},
                shelves(n),
                attributes={} if decade(n) is None else {"decade": decade(n)},
            )
            for n in range(ITEMS)
        ],
        [],
        encode,
    )
    counts = np.random.default_rng(4).integers(0, 60, ITEMS)
    model = random_model(22, n_items=380)
    return Snapshot.build("v", trained(model), made, counts, index_from=index_from)


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return shop(10_000)


@pytest.fixture(scope="module")
def indexed() -> Snapshot:
    return shop(100)


def somebody(snapshot: Snapshot, seed: int = 1) -> UserMemory:
    return build_memory(snapshot, random_past(seed, 6, ITEMS), AT)


def nobody(snapshot: Snapshot) -> UserMemory:
    return build_memory(snapshot, UserHistory.empty(), AT)


def values(row: int, field: str) -> list[object]:
    if field == "categories":
        return list(shelves(row))
    return [] if decade(row) is None else [decade(row)]


def plain(
    worth: NDArray[np.float64], steering: ItemSteering, limit: int, open_: NDArray[np.bool_]
) -> list[int]:
    """The answer by definition: the whole catalogue in order, quotas counted item by item."""
    pins = {pin.position: pin.row for pin in steering.pins if pin.position <= limit}
    taken = Counter[tuple[str, object]]()
    pairs = {
        row: [
            (quota.field, value) for quota in steering.quotas for value in values(row, quota.field)
        ]
        for row in range(ITEMS)
    }
    most = {quota.field: quota.most for quota in steering.quotas}
    for row in pins.values():
        taken.update(pairs[row])
    buried = steering.buried if steering.buried is not None else ~ALL
    order = sorted(range(ITEMS), key=lambda row: (bool(buried[row]), -worth[row], row))
    rest: list[int] = []
    for row in order:
        if not open_[row] or row in {pin.row for pin in steering.pins}:
            continue
        if len(rest) == limit - len(pins):
            break
        if all(taken[pair] < most[pair[0]] for pair in pairs[row]):
            taken.update(pairs[row])
            rest.append(row)
    size = len(rest) + len(pins)
    answer: list[int] = []
    late = sorted(pins)
    for position in range(1, size + 1):
        # As many pins as places are left stand last.
        if position in pins or len(late) == size - position + 1:
            answer.append(pins[late.pop(0)])
        else:
            answer.append(rest.pop(0))
    return answer


def drawn_steering(
    seed: int,
    boosts: list[float],
    bury: float,
    pins: list[tuple[int, int]],
    categories: int | None,
    decades: int | None,
) -> ItemSteering:
    rng = np.random.default_rng(seed)
    boost = np.zeros(ITEMS, np.float32)
    for each in boosts:
        boost[rng.random(ITEMS) < rng.choice([0.02, 0.5])] += each
    rows = {position: row for row, position in pins}
    distinct = {row: position for position, row in rows.items()}
    quotas = [("categories", categories), ("attributes.decade", decades)]
    return ItemSteering(
        boost if boosts else None,
        rng.random(ITEMS) < bury if bury else None,
        tuple(Pin(row, position) for row, position in distinct.items()),
        tuple(Quota(field, most) for field, most in quotas if most is not None),
    )


steerings = st.builds(
    drawn_steering,
    st.integers(0, 10_000),
    st.lists(st.floats(-4, 4, width=32), max_size=3),
    st.sampled_from([0.0, 0.1, 0.97]),
    st.lists(st.tuples(st.integers(0, ITEMS - 1), st.integers(1, 25)), max_size=4),
    st.sampled_from([None, 1, 2, 5]),
    st.sampled_from([None, 1, 4]),
)


@quick
@given(seed=st.integers(0, 100), steering=steerings, limit=st.integers(1, 30))
def test_a_steered_answer_is_that_of_a_plain_loop(
    snapshot: Snapshot, seed: int, steering: ItemSteering, limit: int
) -> None:
    """Boosts, buried items, pins and quotas give the items of a loop over the whole catalogue."""
    user = somebody(snapshot, seed)
    open_ = np.random.default_rng(seed).random(ITEMS) < 0.8
    ranked = recommend(
        snapshot, user, limit=limit, allowed=open_, excluded=NONE, options=EXACT, steering=steering
    )
    base = score(snapshot, user, np.arange(ITEMS)).total.numpy()
    boost = np.zeros(ITEMS, np.float32) if steering.boost is None else steering.boost
    assert ranked.rows.tolist() == plain(base + boost, steering, limit, open_)
    np.testing.assert_allclose(ranked.scores.total.numpy(), (base + boost)[ranked.rows], atol=1e-4)


@pytest.mark.parametrize("has_index", [True, False])
@quick
@given(seed=st.integers(0, 100), steering=steerings, size=st.integers(1, 12))
def test_candidates_hold_what_steering_lifts(
    snapshot: Snapshot, indexed: Snapshot, has_index: bool, seed: int, steering: ItemSteering,
    size: int,
) -> None:  # fmt: skip
    """Of candidates alone, an answer is as long, and its scores are hardly lower."""
    shop = indexed if has_index else snapshot
    user = somebody(shop, seed)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CANDIDATES", "INDEXED_CANDIDATES"):
            patch.setattr(models.ranking.recommend, name, 100)
        patch.setattr(models.ranking.recommend, "FIRST_ORDER_ITEMS", 1)
        patch.setattr(models.index.ann_index, "_NARROW_ROWS", 8)
        near = recommend(shop, user, limit=size, allowed=ALL, excluded=NONE, steering=steering)
    true = recommend(
        shop, user, limit=size, allowed=ALL, excluded=NONE, steering=steering, options=EXACT
    )
    assert len(near.rows) == len(true.rows)
    for quota in steering.quotas:
        pinned = {pin.row for pin in steering.pins}
        shared = Counter(v for row in near.rows.tolist() for v in values(row, quota.field))
        forced = Counter(v for row in pinned for v in values(row, quota.field))
        assert all(shared[value] <= max(quota.most, forced[value]) for value in shared)
    if steering.boost is not None and steering.buried is None and not steering.quotas:
        lifted = steering.boost[true.rows] > 3
        assert np.isin(true.rows[lifted], near.rows).mean() >= 0.8 if lifted.any() else True


@pytest.mark.parametrize("few", [8, 60, 10_000])
def test_candidates_of_an_index_are_the_best_with_their_boosts(indexed: Snapshot, few: int) -> None:
    """Boosts of few and of many items choose nearly the candidates of all items compared."""
    rng = np.random.default_rng(3)
    boost = np.zeros(ITEMS, np.float32)
    for share, by in ((0.02, 8.0), (0.1, 4.0), (0.4, 2.0)):
        boost[rng.random(ITEMS) < share] += by
    allowed = rng.random(ITEMS) < 0.8
    user = somebody(indexed)
    best = candidates(replace(indexed, index=None), user, allowed, 40, boost=boost)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.ranking.recommend, "_FEW", few)
        patch.setattr(models.ranking.recommend, "FIRST_ORDER_ITEMS", 80)
        patch.setattr(models.index.ann_index, "_NARROW_ROWS", 8)
        found = candidates(indexed, user, allowed, 40, boost=boost)
    assert allowed[found].all()
    assert np.isin(best, found).mean() >= 0.9


def test_a_boost_that_moves_nothing_leaves_the_popular_items(snapshot: Snapshot) -> None:
    """Without a memory popularity ranks, unless a boost moves an item; then the score does."""
    user, boost = nobody(snapshot), np.zeros(ITEMS, np.float32)
    before = recommend(snapshot, user, limit=10, allowed=ALL, excluded=NONE)
    same = recommend(
        snapshot, user, limit=10, allowed=ALL, excluded=NONE, steering=ItemSteering(boost)
    )
    assert same.rows.tolist() == before.rows.tolist()
    moved = boost.copy()
    moved[7] = 50
    steered = recommend(
        snapshot, user, limit=10, allowed=ALL, excluded=NONE, steering=ItemSteering(moved)
    )
    prior = snapshot.tables.prior.numpy() + moved
    assert steered.rows.tolist() == np.argsort(-prior, kind="stable")[:10].tolist()


def test_quotas_hold_for_varied_answers(snapshot: Snapshot) -> None:
    """Maximal marginal relevance chooses among what the quotas leave open, and fills the answer."""
    quotas = (Quota("categories", 1),)
    ranked = recommend(
        snapshot, somebody(snapshot), limit=30, allowed=ALL, excluded=NONE, diversity=0.6,
        steering=ItemSteering(quotas=quotas), options=EXACT,
    )  # fmt: skip
    shared = Counter(value for row in ranked.rows.tolist() for value in shelves(row))
    assert max(shared.values()) == 1
    assert len(ranked.rows) == 30
    assert len(set(ranked.rows.tolist())) == 30


# ---------------------------------------------------------------------------- exploration


@pytest.mark.parametrize("quotas", [(), (Quota("attributes.decade", 6),)])
def test_explored_items_have_few_events_and_a_propensity(
    snapshot: Snapshot, quotas: tuple[Quota, ...]
) -> None:
    """A third of the places goes to new items that the ranking alone would not show."""
    user, steering = somebody(snapshot), ItemSteering(quotas=quotas, explore=0.3, seed=5)
    ranked = recommend(
        snapshot, user, limit=10, allowed=ALL, excluded=NONE, options=EXACT, steering=steering
    )
    explored = [at for at, moved in enumerate(ranked.moved) if moved == "explored"]
    assert ranked.propensities is not None
    assert len(explored) == 3
    assert (snapshot.counts[ranked.rows[explored]] < FEW_EVENTS).all()
    others = np.delete(np.arange(10), explored)
    plainly = recommend(
        snapshot, user, limit=7, allowed=ALL, excluded=NONE, options=EXACT,
        steering=ItemSteering(quotas=quotas),
    )  # fmt: skip
    assert ranked.rows[others].tolist() == plainly.rows.tolist()
    assert (ranked.propensities[others] == 1).all()
    assert ((ranked.propensities[explored] > 0) & (ranked.propensities[explored] <= 1)).all()
    again = recommend(
        snapshot, user, limit=10, allowed=ALL, excluded=NONE, options=EXACT, steering=steering
    )
    assert again.rows.tolist() == ranked.rows.tolist()


def test_propensities_are_the_frequencies_of_many_answers(snapshot: Snapshot) -> None:
    """Over 400 seeds, an item is in as many answers as its propensity says."""
    user, shown, said = somebody(snapshot), Counter[int](), dict[int, list[float]]()
    for seed in range(400):
        ranked = recommend(
            snapshot, user, limit=5, allowed=ALL, excluded=NONE, options=EXACT,
            steering=ItemSteering(explore=0.4, seed=seed),
        )  # fmt: skip
        assert ranked.propensities is not None
        for row, propensity in zip(ranked.rows.tolist(), ranked.propensities.tolist(), strict=True):
            shown[row] += 1
            said.setdefault(row, []).append(propensity)
    assert sum(shown.values()) == 400 * 5
    for row, count in shown.most_common(8):
        # Five standard errors of a share of 400, and the error of the propensities themselves.
        assert abs(count / 400 - np.mean(said[row])) < 5 * 0.5 / 20 + 0.02


def test_without_new_items_the_ranking_fills_the_places(snapshot: Snapshot) -> None:
    """Where no item has few events, an answer that explores is the one that does not."""
    known = replace(snapshot, counts=np.full(ITEMS, FEW_EVENTS))
    user = somebody(known)
    explored = recommend(
        known, user, limit=10, allowed=ALL, excluded=NONE, steering=ItemSteering(explore=0.5)
    )
    before = recommend(known, user, limit=10, allowed=ALL, excluded=NONE)
    assert explored.rows.tolist() == before.rows.tolist()
    assert set(explored.moved) == {None}
    torch.testing.assert_close(explored.scores.total, before.scores.total)
