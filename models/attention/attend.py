"""The attention operator: a query attends over rows of (key, value).

For target t and row j, with `b` a bias on the score (never inside the value) and τ the temperature:

    s_tj = score(q_t, k_j) + b_tj    α_tj = exp(s_tj / τ) / Σ_i exp(s_ti / τ)    c_t = Σ_j α_tj v_j

summed over the rows that t may see. A mask is called `visible`, True = may be attended. A target
that sees nothing gets zero weights and a zero context, never NaN and never uniform.

Inputs are finite, except that a bias of -inf hides its row.

A new scorer also gets a name in `service.questions.attend.ScorerName` and a case in
`service.engine.attend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

Mode = Literal["auto", "exact", "coarse"]
Retrieved = Literal["exact", "coarse", "lists"]
"""How a memory was attended: every row; the rows that FAISS named; lists of rows by summaries."""

# Field keys of a search up to which `auto` compares every one.
EXACT_UP_TO = 100_000
DEFAULT_K = 256  # rows that coarse retrieval keeps for each head and target
MAX_ERROR = 0.01


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of attention over a memory.

    `exact` attends over every row. `coarse` attends over the `k` rows of largest score that FAISS
    names for each head and target. `auto` attends over every row, or over a long history by the
    summaries of FAISS's lists, with as many rows beside them as `max_error` takes; a search is
    exact up to `exact_up_to` field keys, and coarse beyond.
    """

    temperature: float = 1.0  # of the softmax
    hard: bool = False  # the best row of each head instead of the softmax
    exclude_self: bool = False  # a target that is itself in the memory does not see itself
    mode: Mode = "auto"
    k: int | None = None  # None = DEFAULT_K
    # FAISS's lists that are opened; None = all rows are compared, but in a catalogue's index.
    probes: int | None = None
    exact_up_to: int = EXACT_UP_TO
    max_error: float = MAX_ERROR  # of contexts, relative, at 99 % confidence

    @property
    def rows_kept(self) -> int:
        return DEFAULT_K if self.k is None else self.k

    def resolve_mode(self, rows: int) -> Literal["exact", "coarse"]:
        if self.mode == "auto":
            return "exact" if rows <= self.exact_up_to else "coarse"
        return self.mode


DEFAULT_OPTIONS = AttentionOptions()


Scorer = Callable[[Tensor, Tensor], Tensor]
"""Query [..., Q, d_q] and keys [..., K, d_k] give [..., Q, K]: a new tensor, to be written over."""

_LENGTHS = 1e-15, 1e15  # between which no square of a float32 overflows or vanishes
_BLOCK = 1 << 22  # floats of tanh(...) that `additive` holds at once: 16 MiB


def scaled_dot(query: Tensor, keys: Tensor) -> Tensor:
    """Q · k / √d (Vaswani et al. 2017): [..., Q, d] and [..., K, d] -> [..., Q, K]."""
    check_width(query, keys)
    # The product first, then the scale: scaling q first rounds each term, and exact ties drift.
    return (query @ keys.mT).div_(math.sqrt(query.shape[-1]))


def cosine(query: Tensor, keys: Tensor) -> Tensor:
    """Cosine of q and k in [-1, 1]: [..., Q, d] and [..., K, d] -> [..., Q, K].

    A zero vector has cosine 0 with everything, and no gradient.
    """
    check_width(query, keys)
    # q·k over the length of k reads the keys twice; unit keys would be another copy of them.
    lengths = torch.linalg.vector_norm(keys, dim=-1)
    least, most = _LENGTHS
    if bool(((lengths > least) & (lengths < most)).all()):
        return (normalize(query) @ keys.mT).div_(lengths.unsqueeze(-2))
    return normalize(query) @ normalize(keys).mT


def normalize(vectors: Tensor) -> Tensor:
    """Each vector [..., d] divided by its length; a zero vector stays zero, with zero gradient."""
    # x/|x| does not change when x is scaled, so a constant scale may be divided out first:
    # squares then neither overflow nor vanish, and the gradient is still exact.
    scale = vectors.detach().abs().amax(-1, keepdim=True)
    zero = scale == 0
    scaled = vectors / scale.masked_fill(zero, 1)
    length = scaled.square().sum(-1, keepdim=True).masked_fill(zero, 1).sqrt()
    return scaled.masked_fill(zero, 0) / length


def additive(query: Tensor, keys: Tensor) -> Tensor:
    """Σ tanh(q + k), the untrained wᵀ tanh(W q + U k) of Bahdanau et al. 2015: as `scaled_dot`.

    It has no inner-product structure, so it costs Q·K·d and no index can order it.
    """
    check_width(query, keys)
    query, keys = query.unsqueeze(-2), keys.unsqueeze(-3)  # (..., Q, 1, d), (..., 1, K, d)
    weight = query.new_ones(query.shape[-1])
    one_row = math.prod(np.broadcast_shapes(query.shape, keys[..., :1, :].shape))
    parts = torch.split(keys, max(1, _BLOCK // max(1, one_row)), -2)
    return torch.cat([torch.tanh(query + part) @ weight for part in parts], -1)


def check_width(query: Tensor, keys: Tensor) -> None:
    if query.shape[-1] != keys.shape[-1]:
        raise ValueError(
            f"query: dimension {query.shape[-1]}, keys have {keys.shape[-1]}: they must agree"
        )


class Attention(NamedTuple):
    """Weights [..., Q, K] of Q queries, whose rows sum to 1 or are all zero where nothing is
    visible, and contexts [..., Q, V], the weighted means of the values.
    """

    weights: Tensor
    context: Tensor


def logits(
    query: Tensor,
    keys: Tensor,
    *,
    bias: Tensor | None = None,
    visible: Tensor | None = None,
    score: Scorer = scaled_dot,
) -> Tensor:
    """Scores plus bias [..., Q, K], -inf where not visible; arguments as for `attend`."""
    scores = score(query, keys)
    if bias is not None:
        scores = _plus(scores, bias)
    if visible is not None:
        if visible.dtype != torch.bool:
            raise ValueError(f"visible: must be bool (True = may be attended), got {visible.dtype}")
        # Adding -inf where hidden is faster than a broadcast masked_fill.
        hidden = torch.full(visible.shape, -math.inf, dtype=scores.dtype, device=visible.device)
        scores = _plus(scores, hidden.masked_fill_(visible, 0.0))
    return scores


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    bias: Tensor | None = None,
    visible: Tensor | None = None,
    score: Scorer = scaled_dot,
    temperature: float = 1.0,
    hard: bool = False,
) -> Attention:
    """Attend over every row.

    query [..., Q, d], keys [..., K, d], values [..., K, V]; `bias` (float) and `visible` (bool)
    broadcast to [..., Q, K]. Leading dimensions broadcast; heads are one of them.

    `hard` is the limit of temperature → 0: one-hot weights, the context is that row's value, ties
    go to the lowest row, and no gradient reaches the scores.

    Raises ValueError when a temperature is not finite and positive, or shapes do not fit.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"temperature: must be finite and greater than 0, got {temperature}; "
            "for the limit of 0 use hard=True"
        )
    rows = keys.shape[-2]
    if values.shape[-2] != rows:
        raise ValueError(f"values: {values.shape[-2]} rows, keys have {rows}: they must agree")
    scores = logits(query, keys, bias=bias, visible=visible, score=score)
    if rows == 0:
        return Attention(scores, scores @ values)

    peak = dead = None  # (..., Q, 1)
    if bias is not None or visible is not None:
        peak = scores.detach().amax(-1, keepdim=True)
        dead = peak == -math.inf
        if not bool(dead.any()):
            dead = None
    if hard:
        winner = _lowest_winner(scores, keys, bias)
        weights = torch.zeros_like(scores).scatter(-1, winner, 1.0)
        batch = np.broadcast_shapes(scores.shape[:-2], values.shape[:-2])
        context = torch.take_along_dim(
            values.expand(*batch, *values.shape[-2:]), winner.expand(*batch, -1, 1), dim=-2
        )  # a gather, not one-hot @ values: the row itself, bit for bit
    else:
        if temperature != 1.0:
            # Softmax does not see the peak subtracted; a tiny temperature then cannot overflow.
            top = scores.detach().amax(-1, keepdim=True) if peak is None else peak
            top = top if dead is None else top.masked_fill(dead, 0.0)
            scores = (scores - top).div_(temperature)
        if dead is not None:  # the softmax of -inf everywhere is NaN, and so is its gradient
            scores = scores.masked_fill(dead, 0.0)
        weights = torch.softmax(scores, dim=-1)
        context = weights @ values
    if dead is not None:
        weights, context = weights.masked_fill(dead, 0.0), context.masked_fill(dead, 0.0)
    return Attention(weights, context)


def _plus(scores: Tensor, extra: Tensor) -> Tensor:
    fits = np.broadcast_shapes(scores.shape, extra.shape) == scores.shape
    if fits and not (scores.requires_grad or extra.requires_grad):
        return scores.add_(extra)
    return scores + extra


def _lowest_winner(scores: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """Find the row with the largest score [..., Q, 1]; of equal rows the lowest."""
    best = scores.argmax(-1, keepdim=True)  # torch returns the first of equal maxima
    tied = scores == torch.take_along_dim(scores, best, dim=-1)
    # A matrix product rounds identical keys differently by their place in the matrix, so rows that
    # are equal must be found by what they are: same key bits and same bias.
    prints = _fingerprints(keys).unsqueeze(-2)  # (..., 1, K)
    same = prints == torch.take_along_dim(prints.expand_as(scores), best, dim=-1)
    if bias is not None:
        bias = bias.expand_as(scores)
        same &= bias == torch.take_along_dim(bias, best, dim=-1)
    tied |= same & (scores > -math.inf)
    return tied.to(torch.uint8).argmax(-1, keepdim=True)


def _fingerprints(keys: Tensor) -> Tensor:
    """Hash each key's bits: [..., K, d] -> [..., K]."""
    integers = torch.int16 if keys.element_size() == 2 else torch.int32
    bits = (keys.detach() + 0.0).contiguous().view(integers).long()  # + 0.0 turns -0.0 into 0.0
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (bits.shape[-1],), generator=generator) * 2 + 1
    return bits @ odd.to(keys.device)


def exclude_self(targets: Tensor, rows: Tensor) -> Tensor:
    """Mask [..., T, n] of items [..., T] over the items of rows [..., n]: False on itself."""
    return targets[..., :, None] != rows[..., None, :]


class KVTable(NamedTuple):
    """Keys [H, N, d] and values [H, N, d_v]; some of them are a memory's rows."""

    keys: Tensor
    values: Tensor


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Select rows [T] of a table [H, N, d] into a copy [H, T, d] contiguous by head.

    Selects along the first dimension of the transposed table, as it lies in memory: along its
    second, torch would copy all of it first, and fancy indexing takes several times as long.
    """
    if not table.shape[1]:
        return table.new_zeros(table.shape[0], len(rows), table.shape[2])
    return table.transpose(0, 1).index_select(0, rows).transpose(0, 1).contiguous()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., n, heads·d] -> [..., heads, n, d]; raises ValueError for another width."""
    if heads < 1 or x.shape[-1] % heads:
        raise ValueError(f"heads: {heads} does not divide the width {x.shape[-1]}")
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """[..., heads, n, d] -> [..., n, heads·d]."""
    return x.transpose(-3, -2).flatten(-2)


class HeadProjections(nn.Module):
    """The trained matrices around multi-head attention (Vaswani et al. 2017, section 3.2.2).

    W_Q, W_K and W_V project into independent heads, W_O out of them.

    `tied` makes W_V the same matrix as W_K (values are keys).
    """

    def __init__(self, dim: int, heads: int, size: int, *, tied: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.w_q = nn.Linear(dim, heads * size, bias=False)
        self.w_k = nn.Linear(dim, heads * size, bias=False)
        # None, not a second name for w_k: a shared tensor would be saved twice.
        self.w_v = None if tied else nn.Linear(dim, heads * size, bias=False)
        self.w_o = nn.Linear(heads * size, dim, bias=False)

    @property
    def tied(self) -> bool:
        return self.w_v is None

    def queries(self, targets: Tensor) -> Tensor:
        """Project targets [..., T, dim] to [..., heads, T, d]."""
        return split_heads(self.w_q(targets), self.heads)

    def keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Project rows [..., n, dim] to keys and values [..., heads, n, d], one tensor if tied."""
        keys = split_heads(self.w_k(rows), self.heads)
        return keys, keys if self.w_v is None else split_heads(self.w_v(rows), self.heads)
