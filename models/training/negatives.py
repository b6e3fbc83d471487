"""Selects the items of a training softmax: all of a small catalogue, a sample of a large one."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.training.chunked_cross_entropy import MASKED_LOGIT
from models.training.window_batch import WindowBatch


class SoftmaxItems(NamedTuple):
    """The items in the softmax's denominator, one per column."""

    rows: Tensor  # int64 [C] item rows
    column: Tensor | None  # int64 [N + 1] column of each item, C if it has none; None = the rows
    correction: Tensor  # [C] log of how many items each stands for

    def columns(self, items: Tensor) -> Tensor:
        """Return the column of each item, C if it has none."""
        return items if self.column is None else self.column[items]


def softmax_items(items: int, targets: Tensor, full: int, negatives: int) -> SoftmaxItems:
    """Select all items of a catalogue up to `full`, else the targets and sampled negatives.

    Args:
        items: size of the catalogue.
        targets: int64 [any] item rows.
        full: largest catalogue that is taken whole.
        negatives: number of items to sample otherwise, at most.
    """
    if items <= full:
        return SoftmaxItems(torch.arange(items), None, torch.zeros(items))
    # Two strata: all of the batch's targets, and a uniform sample of the rest weighted by its
    # sampling rate. The estimate of the partition function is unbiased.
    targets = torch.unique(targets)
    others = np.ones(items, dtype=np.bool_)
    others[targets.cpu().numpy()] = False
    rest = np.flatnonzero(others)
    generator = np.random.default_rng(int(torch.randint(2**62, ())))
    drawn = generator.choice(rest, min(negatives, len(rest)), replace=False)
    rows = torch.cat([targets, torch.from_numpy(drawn).to(targets.device)])
    column = torch.full((items + 1,), len(rows), dtype=torch.int64)
    column[rows] = torch.arange(len(rows))
    correction = torch.zeros(len(rows))
    correction[len(targets) :] = math.log(len(rest) / len(drawn)) if len(drawn) else 0.0
    return SoftmaxItems(rows, column, correction)


def sample_columns(logits: Tensor, own: Tensor, valid: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sample columns for each window in proportion to their probability, all its targets included.

    Each column is drawn independently with a chance near its mean probability in the window, and
    weighted by the inverse: the estimate of the partition function is unbiased (Horvitz and
    Thompson 1952), and of low variance since likely items are nearly always drawn.

    Args:
        logits: [B, L, C].
        own: int64 [B, L], the targets' columns; C may stand where it is not valid.
        valid: bool [B, L].
        count: expected number of other columns per window, about.

    Returns:
        tuple: columns int64 [B, P] and the logarithm of their weights [B, P], `MASKED_LOGIT` in
        the padding.
    """
    size = logits.shape[2]
    share = torch.softmax(logits, -1).mul_(valid[:, :, None]).sum(1)
    share /= valid.sum(1)[:, None].clamp(min=1)
    chance = (count * (0.9 * share + 0.1 / size)).clamp(max=1)
    # Any column may be certain beside the targets: its weight is then 1.
    certain = torch.where(valid, own, own[:, :1]).clamp(max=size - 1)
    chance.scatter_(1, certain, 1.0)
    taken = torch.rand(chance.shape) < chance
    width = int(taken.sum(1).max())
    order = torch.argsort(taken.int(), dim=1, descending=True, stable=True)[:, :width]
    weight = -torch.log(chance.gather(1, order))
    return order, weight.masked_fill(~taken.gather(1, order), MASKED_LOGIT)


def seen_columns(batch: WindowBatch, items: SoftmaxItems, own: Tensor) -> Tensor:
    """Mark the columns that a user has seen by each position, bool [B, L, C], targets aside.

    Args:
        batch: B windows of L inputs.
        items: C items of the softmax.
        own: int64 [B, L], the targets' columns.
    """
    width, (count, length) = len(items.rows), batch.inputs.shape
    first = torch.full((count, width + 1), length)  # the position that first saw a column
    position = torch.arange(length).expand(count, -1)
    first.scatter_reduce_(1, items.columns(batch.inputs), position, "amin")
    seen = first[:, None] <= batch.newest_inputs()[..., None]  # (B, L, C + 1)
    return seen.scatter_(2, own[:, :, None], False)[:, :, :width]
