"""Gathering rows from item tables."""

from __future__ import annotations

import torch

from models.attention.kv_memory import gather_rows


def test_gather_rows_copies_the_given_rows() -> None:
    """Gathered rows are a contiguous copy, in order, with repeats."""
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
