"""Projections of the encoder's states into the target attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.attention.multihead import HeadProjections


class StateProjections(nn.Module):
    """Projects the encoder's states into the target attention, beside the items' projections.

    A user state, of the newest event, gives an addend to the query of every target; the state of
    each event an addend to its key and its value.
    """

    def __init__(self, dim: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, heads * size)
        self.key = nn.Linear(dim, heads * size, bias=False)
        self.value = nn.Linear(dim, heads * size, bias=False)
        for layer in (self.query, self.key):
            nn.init.normal_(layer.weight, std=0.5 / dim**0.5)
        nn.init.zeros_(self.query.bias)
        nn.init.normal_(self.value.weight, std=0.2 / dim**0.5)
        with torch.no_grad():
            self.value.weight += identity_copies(dim, heads * size)

    def queries(self, states: Tensor) -> Tensor:
        """Project user states [..., dim] to queries [..., H, d]."""
        return self._split(self.query(states))

    def keys(self, states: Tensor) -> Tensor:
        """Project states of events [..., dim] to keys [..., H, d]."""
        return self._split(self.key(states))

    def values(self, states: Tensor) -> Tensor:
        """Project states of events [..., dim] to values [..., H, d]."""
        return self._split(self.value(states))

    def query_moment(self) -> Tensor:
        """Return an estimate of the mean of q qᵀ over user queries q, [H, d, d].

        User states are layer-normed, so that about the identity is the mean of m mᵀ.
        """
        dim = self.query.weight.shape[1]
        weight = self.query.weight.view(self.heads, -1, dim)
        bias = self.query.bias.view(self.heads, -1)
        return weight @ weight.mT + bias[:, :, None] * bias[:, None]

    def _split(self, projected: Tensor) -> Tensor:
        size = projected.shape[-1] // self.heads
        return projected.reshape(*projected.shape[:-1], self.heads, size)


def initialise_readout(attention: HeadProjections, states: StateProjections | None) -> None:
    """Let a target attention start with the mean of the newest states, whatever the target.

    Without an encoder, and so without states, it adds nothing before it is trained.
    """
    if states is None:
        nn.init.zeros_(attention.w_o.weight)
        return
    for projection in (attention.w_q, attention.w_k, attention.w_v):
        if projection is not None:
            nn.init.zeros_(projection.weight)
    dim, width = attention.w_o.weight.shape
    with torch.no_grad():
        attention.w_o.weight.copy_(identity_copies(dim, width).T / (width / dim))


def identity_copies(dim: int, width: int) -> Tensor:
    """Return as many identities of `dim` below one another as fill `width` rows, [width, dim]."""
    return torch.eye(dim).repeat(-(-width // dim), 1)[:width]
