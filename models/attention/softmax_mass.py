"""Softmax mass: the share of the full softmax that some rows hold, from a sample of the others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.attention.memory_query import MemoryQuery

SAMPLE = 2048
"""Rows scored for an estimate; the mass of a memory with no more rows is exact."""


@torch.no_grad()
def estimate_mass(
    lookup: MemoryQuery,
    rows: Tensor,
    *,
    temperature: float = 1.0,
    hard: bool = False,
) -> Tensor:
    """Estimate the share [T, H] of the full softmax that `rows` [T, H, k] (-1 = none) hold.

    Of the rows visible to some head, one in each of `SAMPLE` equal stretches is scored, always the
    same ones. The sampled rows outside `rows` stand for all rows outside. With no more than
    `SAMPLE` rows the result is exact. A head that sees nothing has lost nothing: 1. For `hard`, 1
    where no sampled row beats the retrieved ones, else 0.
    """
    visible, n = lookup.visible, len(lookup.memory)
    pool = torch.arange(n, device=rows.device)
    if visible is not None:
        pool = pool[visible.any(0)]
    chosen = pool[stratified_rows(len(pool)).to(pool.device)]

    inside = lookup.logits_of_each(rows)
    outside = lookup.logits_of_all(chosen)  # (T, H, m)
    if len(chosen):
        place = torch.searchsorted(chosen, rows.contiguous()).clamp(max=len(chosen) - 1)
        hits = (chosen[place] == rows).int()
        retrieved = torch.zeros_like(outside, dtype=torch.int32).scatter_add(2, place, hits)
        outside = outside.masked_fill(retrieved > 0, -math.inf)
    # How many rows each target may see outside of `rows`.
    rest = (n if visible is None else visible.sum(1)) - (inside > -math.inf).sum(2)
    return mass_from_sample(inside, outside, rest, temperature=temperature, hard=hard)


def mass_from_sample(
    inside: Tensor,
    outside: Tensor,
    rest: Tensor,
    *,
    temperature: float = 1.0,
    hard: bool = False,
) -> Tensor:
    """Estimate the mass [T, H] from the scores of a sample.

    Args:
        inside: scores of the rows whose share is wanted, [T, H, k]; -inf is no row.
        outside: scores of a sample of the others, [T, H, m]; -inf is no row.
        rest: how many others there are, [T, H].
        temperature: of the softmax.
        hard: as in `estimate_mass`.
    """
    lowest = inside.new_full((*inside.shape[:2], 1), -math.inf)
    best_in = torch.cat([inside, lowest], 2).amax(2, keepdim=True)
    best_out = torch.cat([outside, lowest], 2).amax(2, keepdim=True)
    if hard:
        return (best_in >= best_out).to(inside.dtype).squeeze(2)
    peak = torch.maximum(best_in, best_out)
    peak = peak.masked_fill(peak == -math.inf, 0.0)

    sampled = (outside > -math.inf).sum(2)
    held = ((inside - peak) / temperature).exp().sum(2)
    mean = ((outside - peak) / temperature).exp().sum(2) / sampled.clamp(min=1)
    # A target whose few other rows all escaped the sample: let each weigh as the least retrieved.
    blind = (sampled == 0) & (rest > 0)
    least = inside.masked_fill(inside == -math.inf, math.inf).amin(2, keepdim=True)
    mean = torch.where(blind, ((least - peak) / temperature).exp().squeeze(2), mean)
    return torch.where(rest == 0, 1.0, held / (held + rest * mean))


def stratified_rows(n: int) -> Tensor:
    """Draw one row from each of `SAMPLE` equal stretches of n rows, the same at every call.

    A seed draws the row of each stretch: a fixed stride would beat with periods in the data.
    """
    if n <= SAMPLE:
        return torch.arange(n)
    edges = torch.arange(SAMPLE + 1) * n // SAMPLE
    draw = torch.rand(SAMPLE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return edges[:-1] + (draw * (edges[1:] - edges[:-1])).long()
