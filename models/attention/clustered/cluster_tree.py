"""Very many rows of one memory in cells of equal size, at several sizes, with their moments.

Rows may get other weights as time goes on; the moments follow, at a cost that depends on how many
rows these are and not on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.attention.clustered.kd_partition import balanced_partition
from models.attention.clustered.moments import (
    Moments,
    merge_neighbours,
    moments_from_sums,
    sums_from_moments,
    sums_from_rows,
)
from models.attention.partial_softmax import KVBlock

MIN_CLUSTER_SIZE = (
    64  # rows of the smallest cells, at least: smaller ones cost as much as their rows
)
_COARSEST = 256  # cells of the first level, at most
_FINEST = 4_096  # cells of the last, at most
_SAMPLES = 4  # rows of each cell that are sampled
_BLOCK = 65_536  # rows gathered at once


class KVTable(NamedTuple):
    """Where keys [H, N, d] and values [H, N, d_v] lie; a memory's rows are some of the N."""

    keys: Tensor
    values: Tensor


class ClusterSample(NamedTuple):
    """S rows of each cell: places int64 [H, S, C] (-1 = none), keys, values and a 1 after them."""

    rows: Tensor
    keys: Tensor  # [H, S, C, d]
    values: Tensor  # [H, S, C, d_v + 1]


@dataclass(frozen=True, slots=True, eq=False)
class ClusterLevel:
    """C cells of `size` rows for each of H heads, and S rows sampled of each cell."""

    size: int
    moments: Moments  # leading dimensions [H, C]
    log_weight: Tensor  # [H, C] with what was taken from all log weights
    uneven: Tensor  # [H, C] ≥ 1, what unequal weights do to the variance of a sampled row
    keys: Tensor  # [H, S, C, d] of the sampled rows
    values: Tensor  # [H, S, C, d_v + 1] likewise, and a 1
    shares: Tensor  # [H, S, C] of the cell's mass that a sampled row stands for; about 1

    def of(self, heads: slice) -> ClusterLevel:
        """The same of some heads."""
        found = Moments(*(part[heads] for part in self.moments))
        rest = (self.log_weight, self.uneven, self.keys, self.values, self.shares)
        return ClusterLevel(self.size, found, *(part[heads] for part in rest))


class ClusterTree:
    """m rows with weights, H heads, C cells each. Not for several threads at once."""

    def __init__(
        self,
        table: KVTable,
        log_weights: Tensor,
        *,
        table_rows: Tensor | None = None,
        metric: Tensor | None = None,
    ) -> None:
        """Cut into cells and take their moments.

        Args:
            table: where the keys and values are.
            log_weights: [H, m] added to each row's scores; -inf hides the row.
            at: int64 [m] the place of each row in the table; None = all N, in order.
            metric: [H, d, d] the mean of qqᵀ over the queries to come.

        Raises:
            ValueError: for fewer rows than one cell has.
        """
        heads, rows = log_weights.shape
        if rows < MIN_CLUSTER_SIZE:
            raise ValueError(
                f"log_weights: must be of at least {MIN_CLUSTER_SIZE} rows, got {rows}"
            )
        self.table = table
        self._at = table_rows
        self._shift = log_weights.amax(1, keepdim=True).clamp(min=-1e30)  # (H, 1)
        self._weights = (log_weights - self._shift).exp()
        self._cut(1 << ((rows // MIN_CLUSTER_SIZE).bit_length() - 1), metric)
        self._about = torch.stack(
            [self.keys(head, torch.arange(min(rows, _BLOCK))).mean(0) for head in range(heads)]
        )
        self._moments = self._summarised()
        self._samples = [self._sampled(each.weight.shape[1]) for each in self._moments]
        self._levels: list[ClusterLevel] | None = None

    def __len__(self) -> int:
        return self._weights.shape[1]

    @property
    def heads(self) -> int:
        """The number of heads H."""
        return self._weights.shape[0]

    @property
    def levels(self) -> Sequence[ClusterLevel]:
        """From the fewest cells to the most."""
        if self._levels is None:
            self._levels = [
                self._level(found, sample)
                for found, sample in zip(self._moments, self._samples, strict=True)
            ]
        return self._levels

    @property
    def nbytes(self) -> int:
        """Bytes held, without the table."""
        parts = [self._weights, self._members, self._cell]
        parts += [part for sample in self._samples for part in sample]
        parts += [part for found in self._moments for part in found]
        shares = sum(sample.rows.nbytes // 2 for sample in self._samples)
        return sum(part.nbytes for part in parts) + shares

    def keys(self, head: int, rows: Tensor) -> Tensor:
        """Keys [..., d] of rows [...]."""
        return self.table.keys[head, rows if self._at is None else self._at[rows]]

    def values(self, head: int, rows: Tensor) -> Tensor:
        """Values [..., d_v] of rows [...]."""
        return self.table.values[head, rows if self._at is None else self._at[rows]]

    def log_weights(self, head: int, rows: Tensor) -> Tensor:
        """Log weights [...] of rows [...]."""
        return self._weights[head, rows].log() + self._shift[head]

    def cluster_rows(self, head: int, cells: Tensor) -> Tensor:
        """Rows int64 [..., B] of cells [...] of the last level; -1 = none."""
        return self._members[head, cells].long()

    def blocks(self, heads: slice) -> Iterator[KVBlock]:
        """All rows of some heads, block by block."""
        log_weights = self._weights[heads].log() + self._shift[heads]
        for start in range(0, len(self), _BLOCK):
            part = slice(start, start + _BLOCK)
            places = part if self._at is None else self._at[part]
            yield KVBlock(
                self.table.keys[heads, places],
                self.table.values[heads, places],
                log_weights[:, part],
            )

    def update_log_weights(self, rows: Tensor, log_weights: Tensor) -> None:
        """Give rows int64 [k], each named once, other log weights [H, k]."""
        new = (log_weights - self._shift).exp()
        for head in range(self.heads):
            old, about = self._weights[head, rows], self._about[head]
            # As cells of one row each; those in the same cell are then added up.
            each = sums_from_rows(
                self.keys(head, rows)[:, None],
                self.values(head, rows)[:, None],
                (new[head] - old)[:, None],
                about,
            )._replace(squares=new[head].square() - old.square())
            cells, finest = self._cell[head, rows].long(), self._members.shape[1]
            for found in self._moments:
                own = cells * found.weight.shape[1] // finest
                touched, place = torch.unique(own, return_inverse=True)
                sums = sums_from_moments(Moments(*(part[head, touched] for part in found)), about)
                for total, more in zip(sums, each, strict=True):
                    total.index_add_(0, place, more)
                for kept, part in zip(found, moments_from_sums(sums, about), strict=True):
                    kept[head, touched] = part
        self._weights[:, rows] = new
        self._levels = None

    # ------------------------------------------------------------------ the parts

    def _cut(self, cells: int, metric: Tensor | None) -> None:
        """The rows of each cell int32 [H, C, B], and the cell of each row int32 [H, m]."""
        members = []
        for head in range(self.heads):
            points = self.keys(head, torch.arange(len(self)))
            under = None if metric is None else metric[head]
            members.append(
                torch.from_numpy(balanced_partition(points, min(_FINEST, cells), under)).int()
            )
        self._members = torch.stack(members)
        self._cell = torch.empty(self.heads, len(self), dtype=torch.int32)
        count, size = self._members.shape[1:]
        cell = torch.arange(count, dtype=torch.int32).repeat_interleave(size)
        for head, flat in enumerate(self._members.flatten(1).long()):
            self._cell[head, flat[flat >= 0]] = cell[flat >= 0]

    def _summarised(self) -> list[Moments]:
        """The moments of each level, fewest cells first."""
        found = [_stacked([self._of_members(head) for head in range(self.heads)])]
        while found[0].weight.shape[1] > _COARSEST:
            heads = (Moments(*parts) for parts in zip(*found[0], strict=True))
            found.insert(
                0, _stacked([merge_neighbours(*of) for of in zip(heads, self._about, strict=True)])
            )
        return found

    def _of_members(self, head: int) -> Moments:
        """Of the cells [C] of the last level."""
        found, about = [], self._about[head]
        for block in torch.split(self._members[head], max(1, _BLOCK // self._members.shape[2])):
            rows, held = block.long().clamp(min=0), block >= 0
            keys, values = self.keys(head, rows), self.values(head, rows)
            sums = sums_from_rows(keys, values, self._weights[head, rows] * held, about)
            found.append(moments_from_sums(sums, about))
        return Moments(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    def _sampled(self, cells: int) -> ClusterSample:
        """Rows of each of some cells, others for each level."""
        wide = self._members.view(self.heads, cells, -1)
        generator = torch.Generator().manual_seed(cells)
        size = wide.shape[2]
        # One of each quarter of a cell, in which neighbours lie together; which quarter is first
        # differs, so that the first rows of all cells are a sample too.
        drawn = torch.randint(size, (self.heads, cells, _SAMPLES), generator=generator)
        drawn = (torch.arange(_SAMPLES) * size + drawn) // _SAMPLES
        turned = torch.rand(drawn.shape, generator=generator).argsort(-1)
        rows = wide.gather(2, drawn.gather(2, turned)).mT.long().contiguous()  # (H, S, C)
        places = rows.clamp(min=0)
        keys = torch.stack([self.keys(head, places[head]) for head in range(self.heads)])
        values = torch.stack([self.values(head, places[head]) for head in range(self.heads)])
        return ClusterSample(rows, keys, torch.cat([values, torch.ones_like(values[..., :1])], -1))

    def _level(self, found: Moments, sample: ClusterSample) -> ClusterLevel:
        count = self._members[0].numel() // found.weight.shape[1]
        held = found.weight.clamp(min=1e-30)
        rows = sample.rows.clamp(min=0)
        weights = self._weights.gather(1, rows.flatten(1)).view(rows.shape) * (sample.rows >= 0)
        return ClusterLevel(
            count,
            found,
            found.weight.log() + self._shift,
            count * found.squares / held.square(),
            sample.keys,
            sample.values,
            weights * count / held[:, None],
        )


def _stacked(heads: list[Moments]) -> Moments:
    return Moments(*(torch.stack(parts) for parts in zip(*heads, strict=True)))
