"""Attention with its log-sum-exp: torch's fused CPU kernel, or plain matrix products.

Public `scaled_dot_product_attention` keeps to itself the log-sum-exp by which parts of one softmax
are merged, so the private operator behind it is called. torch is pinned by a range: where a release
lacks the operator, or declares it otherwise, `attention_with_logsumexp` is the plain path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

_OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
    "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
)


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend by the scaled dot product, holding all scores at once.

    query [H, T, d], keys [H, n, d], values [H, n, d_v] and a finite bias [H, 1 or T, n] give
    contexts [H, T, d_v] and the log-sum-exp of the scores [H, T].
    """
    scores = (query @ keys.mT).mul_(query.shape[-1] ** -0.5).add_(bias)
    logsumexp = scores.logsumexp(-1)
    return torch.softmax(scores, -1) @ values, logsumexp


def select_kernel(operators: Any) -> Kernel:
    """Return the fused kernel of a namespace as `torch.ops.aten`, or `plain_attention`."""
    operator = getattr(operators, _OPERATOR, None)
    schema = str(getattr(getattr(operator, "default", None), "_schema", ""))
    if operator is None or not schema.endswith(_SCHEMA):
        return plain_attention

    def fused_attention(
        query: Tensor, keys: Tensor, values: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        mask = bias[None].expand(1, *query.shape[:2], -1)
        found = operator(
            query[None], keys[None], values[None], attn_mask=mask, scale=query.shape[-1] ** -0.5
        )
        context, logsumexp = cast(tuple[Tensor, Tensor], found)
        return context[0], logsumexp[0]

    return fused_attention


attention_with_logsumexp = select_kernel(torch.ops.aten)
