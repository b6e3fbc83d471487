"""Why a target scored as it did: contributions that add up, and the score without a row.

After the softmax everything is linear. With α the weights, v the values, and o what a value must
point at to raise the score, the attention part of a score is Σ_h Σ_j α^h_j ⟨v^h_j, o^h⟩: row j
contributes Σ_h α^h_j g^h_j with the gain g^h_j = ⟨v^h_j, o^h⟩. Contributions are signed and exact.
A large weight on a value that does not matter explains nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gains(values: Tensor, outputs: Tensor) -> Tensor:
    """What each row would add to the score at weight 1: ⟨v^h_j, o^h⟩.

    values [..., H, n, V], outputs [..., H, V] -> [..., H, n].
    """
    return (values @ outputs[..., None])[..., 0]


def contributions(weights: Tensor, gains: Tensor) -> Tensor:
    """What each row did add, summed over heads: [..., H, n] and [..., H, n] -> [..., n].

    Signed; they sum to the attention part of the score.
    """
    return (weights * gains).sum(-2)


def leave_one_out(
    weights: Tensor,
    values: Tensor,
    *,
    logits: Tensor | None = None,
    hard: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """The context without a row, for every row: what attending gives had it never been there.

    In closed form o' = (o - α_j v_j) / (1 - α_j). Where α_j is more than a half, at most one row,
    that divides small differences, so the softmax over the other rows is taken anew.

    Args:
        weights: [..., n], rows of a softmax, or all zero where nothing was visible.
        values: [..., n, V].
        logits: [..., n], what the weights are the softmax of (the temperature applied), -inf where
            hidden. Needed only where the other rows' weights have vanished: where one row is ahead
            by about 80, and when `hard`. None = the logarithm of the weights.
        hard: the weights are one-hot; without its row, the next best takes all.
        rows: int64 [m], only these rows; None = all.

    Returns:
        Tensor: [..., m, V]; zero where no other row is visible.

    Raises:
        ValueError: for `hard` without logits.
    """
    if hard and logits is None:
        raise ValueError("logits: hard attention keeps no trace of the next best row; give them")
    left = weights if rows is None else weights[..., rows]
    own = values if rows is None else values[..., rows, :]
    whole = weights[..., None, :] @ values  # (..., 1, V)
    top = weights.argmax(-1, keepdim=True)  # (..., 1)
    index = torch.arange(weights.shape[-1], device=weights.device) if rows is None else rows
    heavy = (index == top) & (left > 0.5)  # (..., m)
    rest = (1 - left).masked_fill(heavy, 1.0)[..., None]
    closed = (whole - left[..., None] * own) / rest

    others = (weights.log() if logits is None else logits).scatter(-1, top, -math.inf)
    alone = others.amax(-1, keepdim=True) == -math.inf
    if hard:
        anew = torch.zeros_like(weights).scatter(-1, others.argmax(-1, keepdim=True), 1.0)
    else:
        anew = torch.softmax(others.masked_fill(alone, 0.0), -1)
    anew = anew.masked_fill(alone, 0.0)
    without_top = anew[..., None, :] @ values  # (..., 1, V)
    return torch.where(heavy[..., None], without_top, closed)


def score_without(
    weights: Tensor,
    gains: Tensor,
    *,
    logits: Tensor | None = None,
    hard: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """What the attention part of the score would be without a row, for every row.

    weights, gains [..., H, n] -> [..., m]. Other arguments and errors as for `leave_one_out`.
    """
    each = leave_one_out(weights, gains[..., None], logits=logits, hard=hard, rows=rows)
    return each[..., 0].sum(-2)  # (..., H, m, 1) -> (..., m)
