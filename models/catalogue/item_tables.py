"""The model's tables of all items, of which the next version costs what changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count as count_from

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.multihead import merge_heads, split_heads
from models.catalogue.cow_columns import CowArray
from models.recommender.target_attention import ItemTables

MakeTables = Callable[[NDArray[np.int64]], ItemTables]  # item rows -> their tables

_BLOCK = 32_768  # items whose tables are made at once: making takes several times their memory
_STEPS = count_from(1)  # shared by all tables of this process


@dataclass(frozen=True, slots=True, eq=False)
class CowItemTables:
    """Item tables packed into two arrays, by what is read together.

    Everything is read by item but the vectors, which candidates are compared in.
    """

    heads: int
    tied: bool  # values are keys
    _vectors: CowArray[np.float32]  # [N, dim]
    # [N, 3·H·d or 4·H·d] queries, outputs, keys, and values unless tied
    _attended_rows: CowArray[np.float32]
    prior: Tensor  # [N]
    step: int  # number of the last change; they ascend
    written: NDArray[np.int64]  # [N] the step that wrote each row

    @classmethod
    def build(cls, make: MakeTables, count: int, *, tied: bool) -> CowItemTables:
        """Compute the tables of `count` items."""
        first = make(np.arange(min(count, _BLOCK)))
        vectors, attended = _packed(first, tied=tied)
        step = next(_STEPS)
        pages = cls(
            first.queries.shape[0],
            tied,
            CowArray(vectors),
            CowArray(attended),
            first.prior.clone(),
            step,
            np.full(len(vectors), step),
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
        old = len(self._vectors)
        made = make(rows)
        before = rows < old
        at = rows[before]
        vectors, attended = _packed(made, tied=self.tied)
        prior = torch.cat([self.prior, made.prior[torch.from_numpy(~before)]])
        prior[torch.from_numpy(at)] = made.prior[torch.from_numpy(before)]
        step = next(_STEPS)
        written = np.concatenate([self.written, np.zeros(len(rows) - len(at), np.int64)])
        written[rows] = step
        return CowItemTables(
            self.heads,
            self.tied,
            self._vectors.updated(at, vectors[before], vectors[~before]),
            self._attended_rows.updated(at, attended[before], attended[~before]),
            prior,
            step,
            written,
        )

    @property
    def tables(self) -> ItemTables:
        """The tables, as views that may not be written to."""
        vectors = torch.from_numpy(self._vectors.array)
        attended = torch.from_numpy(self._attended_rows.array)
        width = attended.shape[1] // (3 if self.tied else 4)
        parts = [attended[:, at : at + width] for at in range(0, attended.shape[1], width)]
        queries, outputs, keys, values = (
            split_heads(part, self.heads) for part in (*parts[:3], parts[-1])
        )
        return ItemTables(vectors, queries, keys, values, outputs, self.prior)


def _packed(tables: ItemTables, *, tied: bool) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    heads = [tables.queries, tables.outputs, tables.keys]
    if not tied:
        heads.append(tables.values)
    attended = torch.cat([merge_heads(table) for table in heads], 1)
    return tables.vectors.detach().numpy(), attended.detach().numpy()
