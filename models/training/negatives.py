"""Which items stand in a softmax: all of a small catalogue, a sample of a large one."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MASKED_LOGIT = -1e9  # a logit no softmax sees


class SoftmaxItems(NamedTuple):
    """The items in the softmax's denominator."""

    rows: Tensor  # int64 [C] item rows
    column: Tensor | None  # int64 [N + 1] their columns, C where an item has none; None = the rows
    correction: Tensor  # [C] log of how many items each stands for

    def columns(self, items: Tensor) -> Tensor:
        """The column of each item, C where it has none."""
        return items if self.column is None else self.column[items]


def softmax_items(items: int, targets: Tensor, full: int, negatives: int) -> SoftmaxItems:
    """All items up to `full` of them, else the targets and a sample of the rest.

    Args:
        items: how many there are.
        targets: int64 [any] item rows.
        full: as many are all taken.
        negatives: to draw otherwise, at most.
    """
    if items <= full:
        return SoftmaxItems(torch.arange(items), None, torch.zeros(items))
    # Two strata: the batch's targets, all of them; the rest, a uniform sample that is
    # weighted by its share. The estimate of the partition function is unbiased.
    targets = torch.unique(targets)
    others = np.ones(items, dtype=np.bool_)
    others[targets.cpu().numpy()] = False
    rest = np.flatnonzero(others)
    generator = np.random.default_rng(int(torch.randint(2**62, ())))
    drawn = generator.choice(rest, min(negatives, len(rest)), replace=False)
    each = math.log(len(rest) / len(drawn)) if len(drawn) else 0.0
    rows = torch.cat([targets, torch.from_numpy(drawn).to(targets.device)])
    column = torch.full((items + 1,), len(rows), dtype=torch.int64)
    column[rows] = torch.arange(len(rows))
    correction = torch.zeros(len(rows))
    correction[len(targets) :] = each
    return SoftmaxItems(rows, column, correction)


def sample_columns(logits: Tensor, own: Tensor, real: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Columns for each window, all its targets among them, and what they stand for.

    The others are drawn by their mean probability in the window, each with its own chance, and
    weighted by one over it: the estimate of the partition function is unbiased (Horvitz and
    Thompson 1952), and of little variance because the likely are nearly always there.

    Args:
        logits: [B, L, C].
        own: int64 [B, L], the targets' columns.
        real: bool [B, L].
        count: how many others to draw for each window, about.

    Returns:
        tuple: columns int64 [B, P] and the logarithm of their weights [B, P], no softmax's
        business in the padding.
    """
    share = torch.softmax(logits, -1).mul_(real[:, :, None]).sum(1)
    share /= real.sum(1)[:, None].clamp(min=1)
    size = logits.shape[2]
    chance = (count * (0.9 * share + 0.1 / size)).clamp(max=1)
    chance.scatter_(1, torch.where(real, own, own[:, :1]), 1.0)
    taken = torch.rand(chance.shape) < chance
    width = int(taken.sum(1).max())
    order = torch.argsort(taken.int(), dim=1, descending=True, stable=True)[:, :width]
    weight = -torch.log(chance.gather(1, order))
    return order, weight.masked_fill(~taken.gather(1, order), MASKED_LOGIT)
