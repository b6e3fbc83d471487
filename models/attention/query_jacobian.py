"""Derivative of contexts by the query: the first-order term of softmax attention.

With the weights α of a query q and the mean key k̄ = Σ α_j k_j,

    c(q + δ) ≈ c(q) + δ J,    J = Σ_j α_j (k_j - k̄) v_jᵀ / √d,

the covariance of keys and values under α. One J serves all queries near q.
"""

from __future__ import annotations

import torch
from torch import Tensor


def query_jacobian(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Compute J [..., d, d_v] of scaled dot product attention over n rows.

    Args:
        query: [..., d].
        keys: [..., n, d].
        values: [..., n, d_v].
        bias: of the scores, [..., n]; -inf hides a row. Without a visible row J is zero.
    """
    scale = keys.shape[-1] ** -0.5
    scores = (keys @ query[..., None])[..., 0] * scale + bias
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., None]  # (..., n, 1)
    centred = keys - (weights * keys).sum(-2, keepdim=True)
    jacobian: Tensor = (centred * (weights * scale)).mT @ values
    return jacobian
