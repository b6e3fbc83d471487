"""Cluster tree: very many rows of one memory in clusters of equal size, at several levels.

The weights of rows may change over time: the moments of their clusters follow, at a cost that
depends on how many rows change and not on how many there are.
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

MIN_CLUSTER_SIZE = 64  # rows: smaller clusters cost as much as their rows
_COARSEST = 256  # clusters of the first level, at most
_FINEST = 4_096  # clusters of the last level, at most
_SAMPLES = 4  # rows sampled of each cluster
_BLOCK = 65_536  # rows gathered at once


class KVTable(NamedTuple):
    """Keys [H, N, d] and values [H, N, d_v] of which some are a memory's rows."""

    keys: Tensor
    values: Tensor


class ClusterSample(NamedTuple):
    """S rows drawn from each of C clusters."""

    rows: Tensor  # int64 [H, S, C], -1 = none
    keys: Tensor  # [H, S, C, d]
    values: Tensor  # [H, S, C, d_v + 1], the last of them 1


@dataclass(frozen=True, slots=True, eq=False)
class ClusterLevel:
    """C clusters of `size` rows for each of H heads, and S rows sampled from each cluster."""

    size: int
    moments: Moments  # leading dimensions [H, C]
    log_weight: Tensor  # [H, C] log Σ w
    inflation: Tensor  # [H, C] ≥ 1, by which unequal weights inflate the variance of a sampled row
    sample: ClusterSample
    shares: Tensor  # [H, S, C] of the cluster's weight that a sampled row stands for; about 1

    def select_heads(self, heads: slice) -> ClusterLevel:
        """Return the level of some heads alone."""
        return ClusterLevel(
            self.size,
            Moments(*(part[heads] for part in self.moments)),
            self.log_weight[heads],
            self.inflation[heads],
            ClusterSample(*(part[heads] for part in self.sample)),
            self.shares[heads],
        )


class ClusterTree:
    """m weighted rows in clusters, for each of H heads. Not for several threads at once."""

    def __init__(
        self,
        table: KVTable,
        log_weights: Tensor,
        *,
        table_rows: Tensor | None = None,
        metric: Tensor | None = None,
    ) -> None:
        """Partition the rows into clusters and compute their moments.

        Args:
            table: keys and values.
            log_weights: [H, m] added to each row's scores; -inf hides the row.
            table_rows: int64 [m] each row's place in the table; None = all N, in order.
            metric: [H, d, d] the mean of qqᵀ over the expected queries.

        Raises:
            ValueError: for fewer rows than `MIN_CLUSTER_SIZE`.
        """
        heads, rows = log_weights.shape
        if rows < MIN_CLUSTER_SIZE:
            raise ValueError(
                f"log_weights: must be of at least {MIN_CLUSTER_SIZE} rows, got {rows}"
            )
        self.table = table
        self._table_rows = table_rows
        self._shift = log_weights.amax(1, keepdim=True).clamp(min=-1e30)  # (H, 1)
        self._weights = (log_weights - self._shift).exp()
        self._partition(1 << ((rows // MIN_CLUSTER_SIZE).bit_length() - 1), metric)
        self._origin = torch.stack(
            [self.keys(head, torch.arange(min(rows, _BLOCK))).mean(0) for head in range(heads)]
        )
        self._moments = self._compute_moments()
        self._samples = [self._sample(each.weight.shape[1]) for each in self._moments]
        self._levels: list[ClusterLevel] | None = None

    def __len__(self) -> int:
        return self._weights.shape[1]

    @property
    def heads(self) -> int:
        """The number of heads H."""
        return self._weights.shape[0]

    @property
    def levels(self) -> Sequence[ClusterLevel]:
        """Levels from the fewest clusters to the most."""
        if self._levels is None:
            self._levels = [
                self._level(moments, sample)
                for moments, sample in zip(self._moments, self._samples, strict=True)
            ]
        return self._levels

    @property
    def nbytes(self) -> int:
        """Bytes held, without the table."""
        parts = [self._weights, self._cluster_rows, self._cluster_of]
        parts += [part for sample in self._samples for part in sample]
        parts += [part for moments in self._moments for part in moments]
        shares = sum(sample.rows.nbytes // 2 for sample in self._samples)
        return sum(part.nbytes for part in parts) + shares

    def keys(self, head: int, rows: Tensor) -> Tensor:
        """Gather keys [..., d] of rows [...]."""
        return self.table.keys[head, rows if self._table_rows is None else self._table_rows[rows]]

    def values(self, head: int, rows: Tensor) -> Tensor:
        """Gather values [..., d_v] of rows [...]."""
        return self.table.values[head, rows if self._table_rows is None else self._table_rows[rows]]

    def log_weights(self, head: int, rows: Tensor) -> Tensor:
        """Gather log weights [...] of rows [...]."""
        return self._weights[head, rows].log() + self._shift[head]

    def cluster_rows(self, head: int, clusters: Tensor) -> Tensor:
        """Gather rows int64 [..., B] of clusters [...] of the last level; -1 = none."""
        return self._cluster_rows[head, clusters].long()

    def blocks(self, heads: slice) -> Iterator[KVBlock]:
        """Iterate over all rows of some heads, block by block."""
        log_weights = self._weights[heads].log() + self._shift[heads]
        for start in range(0, len(self), _BLOCK):
            part = slice(start, start + _BLOCK)
            places = part if self._table_rows is None else self._table_rows[part]
            yield KVBlock(
                self.table.keys[heads, places],
                self.table.values[heads, places],
                log_weights[:, part],
            )

    def update_log_weights(self, rows: Tensor, log_weights: Tensor) -> None:
        """Set the log weights [H, k] of rows int64 [k], each named once."""
        new = (log_weights - self._shift).exp()
        for head in range(self.heads):
            old, origin = self._weights[head, rows], self._origin[head]
            # As clusters of one row each; those in the same cluster are then added up.
            change = sums_from_rows(
                self.keys(head, rows)[:, None],
                self.values(head, rows)[:, None],
                (new[head] - old)[:, None],
                origin,
            )._replace(squares=new[head].square() - old.square())
            clusters, finest = self._cluster_of[head, rows].long(), self._cluster_rows.shape[1]
            for moments in self._moments:
                own = clusters * moments.weight.shape[1] // finest
                touched, place = torch.unique(own, return_inverse=True)
                before = Moments(*(part[head, touched] for part in moments))
                sums = sums_from_moments(before, origin)
                for total, more in zip(sums, change, strict=True):
                    total.index_add_(0, place, more)
                for stored, part in zip(moments, moments_from_sums(sums, origin), strict=True):
                    stored[head, touched] = part
        self._weights[:, rows] = new
        self._levels = None

    def _partition(self, clusters: int, metric: Tensor | None) -> None:
        """Find the rows of each cluster int32 [H, C, B], and the cluster of each row [H, m]."""
        each = []
        for head in range(self.heads):
            points = self.keys(head, torch.arange(len(self)))
            own_metric = None if metric is None else metric[head]
            rows = balanced_partition(points, min(_FINEST, clusters), own_metric)
            each.append(torch.from_numpy(rows).int())
        self._cluster_rows = torch.stack(each)
        self._cluster_of = torch.empty(self.heads, len(self), dtype=torch.int32)
        count, size = self._cluster_rows.shape[1:]
        numbers = torch.arange(count, dtype=torch.int32).repeat_interleave(size)
        for head, flat in enumerate(self._cluster_rows.flatten(1).long()):
            self._cluster_of[head, flat[flat >= 0]] = numbers[flat >= 0]

    def _compute_moments(self) -> list[Moments]:
        """Compute the moments of each level, fewest clusters first."""
        levels = [_stack([self._finest_moments(head) for head in range(self.heads)])]
        while levels[0].weight.shape[1] > _COARSEST:
            heads = (Moments(*parts) for parts in zip(*levels[0], strict=True))
            pairs = zip(heads, self._origin, strict=True)
            levels.insert(0, _stack([merge_neighbours(*pair) for pair in pairs]))
        return levels

    def _finest_moments(self, head: int) -> Moments:
        """Compute the moments of the clusters [C] of the last level."""
        parts, origin = [], self._origin[head]
        step = max(1, _BLOCK // self._cluster_rows.shape[2])
        for block in torch.split(self._cluster_rows[head], step):
            rows, present = block.long().clamp(min=0), block >= 0
            keys, values = self.keys(head, rows), self.values(head, rows)
            sums = sums_from_rows(keys, values, self._weights[head, rows] * present, origin)
            parts.append(moments_from_sums(sums, origin))
        return Moments(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def _sample(self, clusters: int) -> ClusterSample:
        """Draw rows of each of so many clusters; every level has its own."""
        wide = self._cluster_rows.view(self.heads, clusters, -1)
        generator = torch.Generator().manual_seed(clusters)
        size = wide.shape[2]
        # One of each quarter of a cluster, in which neighbours lie together; which quarter is first
        # differs, so that the first rows of all clusters are a sample too.
        drawn = torch.randint(size, (self.heads, clusters, _SAMPLES), generator=generator)
        drawn = (torch.arange(_SAMPLES) * size + drawn) // _SAMPLES
        turned = torch.rand(drawn.shape, generator=generator).argsort(-1)
        rows = wide.gather(2, drawn.gather(2, turned)).mT.long().contiguous()  # (H, S, C)
        places = rows.clamp(min=0)
        keys = torch.stack([self.keys(head, places[head]) for head in range(self.heads)])
        values = torch.stack([self.values(head, places[head]) for head in range(self.heads)])
        return ClusterSample(rows, keys, torch.cat([values, torch.ones_like(values[..., :1])], -1))

    def _level(self, moments: Moments, sample: ClusterSample) -> ClusterLevel:
        size = self._cluster_rows[0].numel() // moments.weight.shape[1]
        total = moments.weight.clamp(min=1e-30)
        rows = sample.rows.clamp(min=0)
        weights = self._weights.gather(1, rows.flatten(1)).view(rows.shape) * (sample.rows >= 0)
        return ClusterLevel(
            size,
            moments,
            moments.weight.log() + self._shift,
            size * (moments.squares / total) / total,  # its square is 0 for an empty cluster
            sample,
            weights * size / total[:, None],
        )


def _stack(heads: list[Moments]) -> Moments:
    return Moments(*(torch.stack(parts) for parts in zip(*heads, strict=True)))
