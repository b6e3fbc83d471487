"""What is taken out of the tables of items."""

from __future__ import annotations

import torch

from models.recommender.target_attention import gather_rows


def test_item_tables_of_a_slice_equal_rows_of_the_full_tables() -> None:
    """In their order, as often as they come, each head's together; a table that is part of a
    wider one, as those of items are, stays as it is."""
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
    """A table of which a copy would take 256 GB has its rows taken all the same."""
    table = torch.ones(1, 1, 16).expand(4, 1_000_000_000, 16)
    assert float(gather_rows(table, torch.tensor([0, 999_999_999])).sum()) == 128
