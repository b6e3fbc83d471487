"""Target attention of all items, and the coarse step to first order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.attention.attend import gather_rows
from models.history.user_memory import build_memory
from models.ranking.recommend import candidates
from models.ranking.scoring import score
from models.recommender.target_attention import ItemTables, nearest_items
from tests.support.small import random_model, random_past
from tests.support.small import snapshot as small_snapshot


def test_gather_rows_copies_the_given_rows() -> None:
    wide = torch.randn(9, 3 * 8)
    table = wide[:, 8:16].view(9, 2, 4).transpose(0, 1)  # (H, N, d)
    rows = torch.tensor([5, 0, 5, 8])
    before = wide.clone()
    taken = gather_rows(table, rows)
    assert taken.is_contiguous()
    for head in range(2):
        for place, row in enumerate([5, 0, 5, 8]):
            assert torch.equal(taken[head, place], wide[row, 8 + 4 * head : 12 + 4 * head])
    taken += 1
    assert torch.equal(wide, before)
    assert gather_rows(table, rows[:0]).shape == (2, 0, 4)
    assert gather_rows(table[:, :0], torch.tensor([0])).tolist() == [[[0.0] * 4]] * 2


def test_item_tables_read_only_the_requested_rows() -> None:
    """Rows are gathered from a 256 GB view without copying the table."""
    table = torch.ones(1, 1, 16).expand(4, 1_000_000_000, 16)
    assert float(gather_rows(table, torch.tensor([0, 999_999_999])).sum()) == 128


ITEMS = 400


def drawn_tables(items: int) -> ItemTables:
    generator = torch.Generator().manual_seed(1)
    queries, outputs = (torch.randn(2, items, 3, generator=generator) for _ in range(2))
    none = torch.zeros(2, items, 3)
    return ItemTables(torch.zeros(items, 6), queries, none, none, outputs, torch.zeros(items))


@pytest.mark.parametrize("size", [30, 22])
@pytest.mark.parametrize("most", [4_096, 12])
def test_items_are_ranked_to_first_order(size: int, most: int) -> None:
    tables, generator = drawn_tables(30), torch.Generator().manual_seed(2)
    near = 3 * torch.randn(size, generator=generator)
    jacobian = torch.randn(2, 3, 3, generator=generator)
    near[4] = -torch.inf
    first = 30 - size
    kept = np.argsort(-near.numpy())[:most]
    refined = {}
    for place in kept.tolist():
        total = float(near[place])
        for head in range(2):
            query, output = (part[head, first + place] for part in (tables.queries, tables.outputs))
            total += float(query.double() @ jacobian[head].double() @ output.double())
        refined[first + place] = total
    expected = sorted(refined, key=lambda row: -refined[row])[:3]
    found = nearest_items(tables, torch.arange(first, 30), near, jacobian, 3, most).tolist()
    assert sorted(found) == sorted(expected)
    assert first + 4 not in found


def test_the_best_items_are_among_few_candidates() -> None:
    model = random_model(5, n_items=ITEMS, window=30)
    snapshot = small_snapshot(ITEMS, model)
    allowed = np.ones(ITEMS, bool)
    missed = {True: 0, False: 0}
    for seed in range(20):
        for first_order in missed:
            user = build_memory(snapshot, random_past(seed, 60, ITEMS), 10**15)
            best = np.argsort(-score(snapshot, user, np.arange(ITEMS)).total.numpy())[:10]
            with pytest.MonkeyPatch.context() as patch:
                if not first_order:
                    patch.setattr("models.ranking.recommend.query_jacobian", lambda *_: None)
                found = candidates(snapshot, user, allowed, 40)
            missed[first_order] += len(np.setdiff1d(best, found))
    assert missed[True] < missed[False] / 2
