"""Softmax mass: the share of the full softmax that some rows hold, from a sample of the others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLE = 2048
"""Rows scored for an estimate; the mass of a memory with no more rows is exact."""


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
        hard: 1 where no sampled row beats the retrieved ones, else 0.
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
