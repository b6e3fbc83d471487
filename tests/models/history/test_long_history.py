"""Collapsed histories: scores, reasons and errors equal those of attending every event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.attention.attend import AttentionOptions
from models.attention.partial_softmax import PartialSoftmax
from models.catalogue.snapshot import Snapshot
from models.history.long_history import CollapsedHistory, collapsible_events, collapsible_prefix
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, build_memory, expand_top_events, target_queries
from models.ranking.contributions import contributions
from models.ranking.explanation import explain, scores_without
from models.ranking.scoring import Scores, score
from tests.support.pasts import (
    EVERY,
    ITEMS,
    WINDOW,
    basket_snapshot,
    drawn_snapshot,
    told_snapshot,
    without_event,
)
from tests.support.small import DAY, entries, past, random_model, random_past
from tests.support.small import encode as encode_texts
from tests.support.small import snapshot as small_snapshot

MANY = 4_000  # items of a catalogue that is worth lists
LENGTH = 4_000
SNAPSHOTS = {"plain": drawn_snapshot, "told": told_snapshot, "next_basket": basket_snapshot}


def a_past(events: int = LENGTH, items: int = ITEMS, seed: int = 3) -> UserHistory:
    """A history with unknown items and types, weights and a profile."""
    made = random_past(seed, events, items)
    generator = np.random.default_rng(seed)
    rows = made.rows.copy()
    rows[generator.random(events) < 0.05] = -1
    rows[generator.random(events) < 0.02] = items + 5
    types = generator.integers(-2, 3, events).astype(np.int32)
    return replace(made, rows=rows, types=types, profile_rows=np.array([1, 2], np.int32))


def both(snapshot: Snapshot, whole: UserHistory, at: int) -> tuple[UserMemory, UserMemory]:
    """Build the memory event by event, and with its older events collapsed."""
    older = CollapsedHistory(snapshot, whole, collapsible_prefix(snapshot, whole), at)
    return build_memory(snapshot, whole, at), build_memory(snapshot, whole, at, collapsed=older)


def same(found: Scores, wanted: Scores, tolerance: float = 2e-5) -> None:
    """Assert that every part of two scores is close."""
    for part in ("total", "attention", "transitions", "prior"):
        one, other = getattr(found, part), getattr(wanted, part)
        torch.testing.assert_close(one, other, atol=tolerance, rtol=1e-4, msg=part)


@pytest.mark.parametrize("kind", SNAPSHOTS)
@pytest.mark.parametrize("exclude_self", [False, True])
def test_scores_are_those_of_every_event(kind: str, exclude_self: bool) -> None:
    snapshot, whole = SNAPSHOTS[kind](), a_past()
    at = int(whole.timestamps[-1]) + DAY
    each, together = both(snapshot, whole, at)
    assert len(together.keys) < LENGTH / 2
    options = AttentionOptions(exclude_self=exclude_self)
    found = score(snapshot, together, EVERY, options)
    same(found, score(snapshot, each, EVERY, options))
    assert found.mode == "exact"
    assert found.relative_error is None
    assert found.rows_scanned < LENGTH / 2


@pytest.mark.parametrize("later", [0, DAY // 7, 40 * DAY, -30 * DAY])
def test_time_moves_events_to_other_buckets(later: int) -> None:
    """As ages change buckets, forward or back, the collapsed weights follow."""
    snapshot, whole = told_snapshot(), a_past()
    at = int(whole.timestamps[-1]) + DAY
    older = CollapsedHistory(snapshot, whole, collapsible_prefix(snapshot, whole), at)
    for asked in (at + later // 2, at + later):
        found = score(snapshot, build_memory(snapshot, whole, asked, collapsed=older), EVERY)
        same(found, score(snapshot, build_memory(snapshot, whole, asked), EVERY))


def test_a_history_grows() -> None:
    """`extend` collapses further events, new items among them, without changing scores."""
    snapshot, whole = told_snapshot(), a_past()
    early = replace(
        whole.newest(0, 0),
        rows=np.where(whole.rows[:2000] < 8, whole.rows[:2000], -1),
        timestamps=whole.timestamps[:2000],
        weights=whole.weights[:2000],
        types=whole.types[:2000],
    )
    whole = replace(whole, rows=np.concatenate([early.rows, whole.rows[2000:]]))
    at = int(whole.timestamps[-1])
    older = CollapsedHistory(snapshot, early, collapsible_events(2000, WINDOW), at - DAY)
    before = len(older)
    older.extend(snapshot, whole, collapsible_prefix(snapshot, whole), at)
    assert len(older) > before
    found = score(snapshot, build_memory(snapshot, whole, at, collapsed=older), EVERY)
    same(found, score(snapshot, build_memory(snapshot, whole, at), EVERY))


@pytest.mark.parametrize("kind", SNAPSHOTS)
@pytest.mark.parametrize("exclude_self", [False, True])
def test_reasons_are_those_of_every_event(kind: str, exclude_self: bool) -> None:
    snapshot, whole = SNAPSHOTS[kind](), a_past()
    # Loud old events, so that some of them are among the foremost.
    weights = whole.weights.copy()
    weights[[5, 40, 900, 3990]] = [900.0, 750.0, 1200.0, 300.0]
    whole = replace(whole, weights=weights)
    at = int(whole.timestamps[-1]) + DAY
    each, together = both(snapshot, whole, at)
    options = AttentionOptions(exclude_self=exclude_self)
    scores = score(snapshot, together, EVERY, options)
    old = 0
    targets = [2, 5, 13]
    assert scores.partial is not None
    partial = PartialSoftmax(*(part[:, targets] for part in scores.partial))
    rows = np.array(targets)
    estimates = explain(snapshot, together, rows, 6, options, partial=partial, effects="estimate")
    for found, every in zip(
        estimates, explain(snapshot, each, rows, 8, options, effects="estimate"), strict=True
    ):
        assert [reason.contribution for reason in found] == pytest.approx(
            [reason.contribution for reason in every[:6]], abs=2e-5
        )
        wanted = {reason.source: reason for reason in every}
        for reason in found:
            other = wanted[reason.source]
            assert reason.weight == pytest.approx(other.weight, abs=1e-5)
            assert reason.contribution == pytest.approx(other.contribution, abs=2e-5)
            assert reason.effect == pytest.approx(other.effect, abs=5e-5)
            assert reason.effect_is_exact == other.effect_is_exact
            old += 0 <= reason.source < collapsible_prefix(snapshot, whole)
    assert old >= 2


def test_newer_events_are_left_out_of_the_whole_model() -> None:
    """`scores_without` of a recent event equals the score of a history without it."""
    snapshot, whole = drawn_snapshot(), a_past()
    at = int(whole.timestamps[-1]) + DAY
    _, together = both(snapshot, whole, at)
    for source in (LENGTH - 2, LENGTH - 400, -1):
        found = scores_without(snapshot, together, {source: [0, 3]})
        left = without_event(whole, source) if source >= 0 else whole.without(source)
        wanted = score(snapshot, build_memory(snapshot, left, at), np.array([0, 3])).total.tolist()
        for row, total in zip((0, 3), wanted, strict=True):
            assert found[source, row] == pytest.approx(total, abs=5e-5)


def test_lists_meet_the_error_after_time_and_growth() -> None:
    snapshot = small_snapshot(MANY, random_model(5, n_items=MANY, window=WINDOW))
    whole, every = a_past(20_000, MANY), np.arange(0, MANY, 9)
    at = int(whole.timestamps[-1]) + DAY
    older = CollapsedHistory(snapshot, whole, collapsible_events(18_000, WINDOW), at)
    older.build_lists(snapshot)
    older.advance_to(at + 20 * DAY)
    older.extend(snapshot, whole, collapsible_prefix(snapshot, whole), at + 20 * DAY)
    at += 30 * DAY
    user = build_memory(snapshot, whole, at, collapsed=older)
    wanted = score(snapshot, build_memory(snapshot, whole, at), every)
    for max_error in (0.6, 0.3):
        found = score(snapshot, user, every, AttentionOptions(max_error=max_error))
        assert found.mode == "lists"
        assert found.relative_error is not None
        assert 0 < float(found.relative_error.max()) <= max_error
        away = (found.attention - wanted.attention).abs() / wanted.attention.std()
        assert float(away.median()) < 2 * max_error
    exact = score(snapshot, user, every, AttentionOptions(mode="exact"))
    same(exact, wanted)
    alone = score(snapshot, user, every, AttentionOptions(exclude_self=True))
    other = score(
        snapshot, build_memory(snapshot, whole, at), every, AttentionOptions(exclude_self=True)
    )
    assert float((alone.attention - other.attention).abs().max()) < 0.02 * float(
        other.attention.std()
    )


@pytest.mark.parametrize("exclude_self", [False, True])
def test_rows_are_retrieved_from_newer_events_and_older_items(exclude_self: bool) -> None:
    snapshot, whole = told_snapshot(), a_past()
    at = int(whole.timestamps[-1]) + DAY
    older = CollapsedHistory(snapshot, whole, collapsible_events(3_000, WINDOW), at)
    options = AttentionOptions(mode="coarse", k=9, exclude_self=exclude_self)
    early = build_memory(snapshot, whole, at, collapsed=older)
    for probes in (1, None):  # an index of inverted lists is kept beside the other
        score(snapshot, early, EVERY, replace(options, probes=probes))
    # Some weights change after the items were indexed, and some items are new.
    at += 9 * DAY
    older.extend(snapshot, whole, collapsible_prefix(snapshot, whole), at)
    user = build_memory(snapshot, whole, at, collapsed=older)
    found = score(snapshot, user, EVERY, options)
    assert (found.mode, found.rows_scanned) == ("coarse", 9.0)
    targets = torch.from_numpy(EVERY)
    query = target_queries(snapshot, user, targets).double()
    items = torch.from_numpy(older.item_rows)
    keys, values = (
        torch.cat([near.transpose(0, 1), table[:, items]], 1).double()
        for near, table in (
            (user.keys, snapshot.tables.keys),
            (user.values, snapshot.tables.values),
        )
    )
    bias = torch.cat([user.bias.double(), torch.from_numpy(older.weights).log()], 1)
    scores = query @ keys.mT / keys.shape[2] ** 0.5 + bias[:, None]
    if exclude_self:
        own = torch.cat([user.rows, items]) == targets[:, None]
        scores = scores.masked_fill(own, -torch.inf)
    best = scores.topk(9, -1)
    weights = torch.softmax(torch.full_like(scores, -torch.inf).scatter(2, *best[::-1]), -1)
    outputs = snapshot.tables.outputs[:, targets].double()
    wanted = ((weights @ values) * outputs).sum((0, 2))
    torch.testing.assert_close(found.attention.double(), wanted, atol=2e-5, rtol=1e-4)
    mass = (best.values.logsumexp(-1) - scores.logsumexp(-1)).exp().amin(0)
    torch.testing.assert_close(found.mass.double(), mass, atol=1e-4, rtol=0)
    assert found.partial is not None
    # The rows that are named, and one that stands for the others, make up the score.
    for target in (2, 5):
        place = found.partial.target(target)
        more = expand_top_events(snapshot, user, target, 4, place, options)
        each = contributions(
            snapshot,
            more,
            targets[target : target + 1],
            replace(options, mode="exact"),
            without=None,
        )
        assert float(each.each.sum()) == pytest.approx(float(found.personal[target]), abs=1e-3)


def test_rebind_accepts_unchanged_items() -> None:
    snapshot = drawn_snapshot()
    whole = past(np.arange(3_000) % 10, np.arange(3_000))
    older = CollapsedHistory(snapshot, whole, collapsible_events(3_000, WINDOW), 3_000)

    def changed(item: int) -> Snapshot:
        catalogue = snapshot.catalogue.updated(entries(1, item), [], encode_texts)
        return snapshot.refreshed(catalogue, np.zeros(0, np.int64))

    assert older.rebind(snapshot)
    assert older.rebind(changed(12))
    assert not CollapsedHistory(snapshot, whole, 2_000, 3_000).rebind(changed(3))
    assert not older.rebind(drawn_snapshot())


def test_another_softmax_is_refused() -> None:
    """A collapsed history refuses hard attention and any temperature but 1."""
    snapshot, whole = drawn_snapshot(), a_past()
    _, together = both(snapshot, whole, int(whole.timestamps[-1]))
    for options in (AttentionOptions(temperature=0.5), AttentionOptions(hard=True)):
        with pytest.raises(ValueError, match="at temperature 1"):
            score(snapshot, together, EVERY, options)


def test_the_error_is_met_where_a_target_does_not_see_itself() -> None:
    snapshot = small_snapshot(MANY, random_model(5, n_items=MANY, window=WINDOW))
    whole = a_past(20_000, MANY)
    weights = whole.weights.copy()
    weights[whole.rows == 7] *= 3_000
    whole = replace(whole, weights=weights)
    at = int(whole.timestamps[-1]) + DAY
    older = CollapsedHistory(snapshot, whole, collapsible_prefix(snapshot, whole), at)
    older.build_lists(snapshot)
    user, targets = build_memory(snapshot, whole, at, collapsed=older), np.array([7, 8, 9])
    options = AttentionOptions(max_error=0.2, exclude_self=True)
    found = score(snapshot, user, targets, options)
    assert found.relative_error is not None
    assert float(found.relative_error.max()) <= 0.2
    wanted = score(
        snapshot, build_memory(snapshot, whole, at), targets, AttentionOptions(exclude_self=True)
    )
    torch.testing.assert_close(found.attention, wanted.attention, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("kind", [0, 1])
def test_a_head_that_sees_none_of_a_long_history_adds_nothing(kind: int) -> None:
    snapshot, whole = told_snapshot(), a_past()
    whole = replace(
        whole,
        types=np.full(LENGTH, kind, np.int32),
        profile_rows=np.zeros(0, np.int32),
    )
    each, together = both(snapshot, whole, int(whole.timestamps[-1]) + DAY)
    assert (each.bias == -torch.inf).all(1).any()
    same(score(snapshot, together, EVERY), score(snapshot, each, EVERY))
