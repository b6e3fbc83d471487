"""The model's tables of all items, of which the next version costs what changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.multihead import merge_heads, split_heads
from models.catalogue.cow_array import CowArray
from models.recommender.target_attention import ItemTables

MakeTables = Callable[[NDArray[np.int64]], ItemTables]  # item rows -> their tables

_BLOCK = 32_768  # items whose tables are made at once: making takes several times their memory


@dataclass(frozen=True, slots=True, eq=False)
class CowItemTables:
    """Item tables packed into two arrays, by what is read together.

    Everything is read by item but `candidate_keys`, which candidates are compared in.
    """

    heads: int
    tied: bool  # values are keys
    _candidate_keys: CowArray[np.float32]  # [N, dim + H·d] vectors, then outputs
    # [N, 2·H·d or 3·H·d] queries, keys, and values unless tied
    _attended_rows: CowArray[np.float32]
    prior: Tensor  # [N]

    @classmethod
    def build(cls, make: MakeTables, count: int, *, tied: bool) -> CowItemTables:
        """Compute the tables of `count` items."""
        first = make(np.arange(min(count, _BLOCK)))
        offered, attended = _packed(first, tied=tied)
        pages = cls(
            first.queries.shape[0], tied, CowArray(offered), CowArray(attended), first.prior.clone()
        )
        for begin in range(_BLOCK, count, _BLOCK):
            pages = pages.updated(make, np.arange(begin, min(count, begin + _BLOCK)))
        return pages

    def updated(self, make: MakeTables, rows: NDArray[np.int64]) -> CowItemTables:
        """Return the tables after some items changed or were added.

        `rows` are the items, rising; those that are new are all the next ones.
        """
        if not len(rows):
            return self
        old = len(self._candidate_keys)
        made = make(rows)
        before = rows < old
        at = rows[before]
        offered, attended = _packed(made, tied=self.tied)
        prior = torch.cat([self.prior, made.prior[torch.from_numpy(~before)]])
        prior[torch.from_numpy(at)] = made.prior[torch.from_numpy(before)]
        return CowItemTables(
            self.heads,
            self.tied,
            self._candidate_keys.updated(at, offered[before], offered[~before]),
            self._attended_rows.updated(at, attended[before], attended[~before]),
            prior,
        )

    @property
    def tables(self) -> ItemTables:
        """The tables, as views that may not be written to."""
        offered = torch.from_numpy(self._candidate_keys.array)
        attended = torch.from_numpy(self._attended_rows.array)
        width = attended.shape[1] // (2 if self.tied else 3)
        dim = offered.shape[1] - width
        parts = [attended[:, at : at + width] for at in range(0, attended.shape[1], width)]
        queries, keys, values = parts[0], parts[1], parts[-1]
        return ItemTables(
            offered[:, :dim],
            split_heads(queries, self.heads),
            split_heads(keys, self.heads),
            split_heads(values, self.heads),
            split_heads(offered[:, dim:], self.heads),
            self.prior,
        )

    def candidate_keys(self, rows: slice = slice(None)) -> Tensor:
        """The candidate keys of some items without the prior, [n, dim + H·d]."""
        return torch.from_numpy(self._candidate_keys.array[rows])


def _packed(tables: ItemTables, *, tied: bool) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    heads = [tables.queries, tables.keys] if tied else [tables.queries, tables.keys, tables.values]
    offered = torch.cat([tables.vectors, merge_heads(tables.outputs)], 1)
    attended = torch.cat([merge_heads(table) for table in heads], 1)
    return offered.detach().numpy(), attended.detach().numpy()
