"""Key lists: very many weighted rows of a memory in FAISS's lists, each of which has a summary.

A list has rows of weights w, keys k and values v. With n = Σ w, the weighted means k̄ and v̄, the
covariance Σ of its keys and the cross-covariance C = Cov(v, k), a query gives, by q' = q / √d,

    Σ w e^(q'·k) [1, v]  ≈  n e^(q'·k̄ + q'ᵀΣq'/2) [1, v̄ + C q'],

which is exact for keys and values that are jointly normal within the list, and else up to third
order in the spread of the scores. A few rows drawn from each list tell how far this is off. Rows
that are far from all lists are in none, and are always attended one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.attention.attend import KVTable, gather_rows
from models.attention.partial_softmax import (
    Attended,
    KVBlock,
    PartialSoftmax,
    attend_blocks,
    merge_partials,
)
from models.index.ann_index import one_thread

import faiss  # isort: skip

LISTS = 64  # of each head: the cost of lists does not grow with their rows
LEAST_ROWS = 4_096  # take as long as their lists, for 100 targets
_LEAST_IN_LIST = 32
_APART, _APART_SHARE = 256, 16  # rows of each head in no list: at most 256, and at most 1 in 16
_ROUNDS, _POINTS_PER_LIST, _SEED = 6, 256, 0  # of k-means
_DRAWN = 2  # rows of each list
_CONFIDENCE = 1.3  # times the error that the drawn rows tell: 99 of 100 contexts are within it
_FAR_ABOVE = 4.0  # standard deviations of the scores in a list that one of its rows may be above
_MAX_VARIANCE = 20.0  # of the scores in a list, beyond which a summary is worthless
_MAX_EXPONENT = 60.0  # of a row's score above its list's, beyond which e^ of it is cut
_OPENED_SHARE = 0.15  # of the rows: more of them are attended no sooner than all
_TARGETS = 256  # at once: their scores with all lists stay in a core's cache
_BLOCK = 4_096  # rows gathered at once: they stay in a core's cache
_TINY = 1e-30


class _Summaries(NamedTuple):
    """C lists with R rows drawn from each, as attention reads them; H comes first."""

    log_weight: Tensor  # [H, C] log n
    keys: Tensor  # [H, C, d] means
    covariance: Tensor  # [H, C, d (d + 1) / 2] upper triangles
    values: Tensor  # [H, C, d_v + d_v · d] means, then cross-covariances row by row
    moments: Tensor  # [H, C, d_v + 2] means of v, 1 and |v|²
    away: Tensor  # [H, R·C, d] keys of the drawn rows less the mean key of their list
    drawn: Tensor  # [H, R·C, d_v + 2] their v, 1 and |v|²
    shares: Tensor  # [H, R·C] the share of its list's weight that a drawn row stands for


class KeyLists:
    """m weighted rows of a table in lists, for each of H heads. Not for several threads at once.

    Weights may change: the summaries follow, at a cost by the number of rows that change.
    """

    def __init__(
        self, table: KVTable, rows: Tensor, log_weights: Tensor, *, metric: Tensor | None = None
    ) -> None:
        """Put rows, places [m] in a table of keys and values, in lists by FAISS's k-means.

        Args:
            log_weights: [H, m] added to the scores of each row; -inf hides it.
            metric: [H, d, d] mean of qqᵀ over the expected queries: k-means then looks at the
                variance of their scores. None = the identity.
        """
        self.table, self.rows = table, rows
        self._shift = log_weights.amax(1, keepdim=True).clamp(min=-1 / _TINY)  # (H, 1)
        self._weights = (log_weights - self._shift).exp()
        heads, apart = len(log_weights), min(_APART, len(rows) // _APART_SHARE)
        count = max(1, min(LISTS, len(rows) // _LEAST_IN_LIST))
        identity = torch.eye(table.keys.shape[2]).expand(heads, -1, -1)
        listed = [
            _list_of(self._gather(head, rows)[0] @ root, count, self._weights[head], apart)
            for head, root in enumerate(_roots(identity if metric is None else metric))
        ]
        self._list_of = torch.stack(listed)  # [H, m] list, or C for rows that are in none
        self._order = self._list_of.argsort(dim=1, stable=True).int()  # rows, list by list
        self._sizes = torch.stack([torch.bincount(each, minlength=count + 1) for each in listed])
        # Σ w [1, k] [1, k, v, |v|²]ᵀ of each list, [H, C + 1, 1 + d, …].
        self._sums = torch.stack([torch.stack(list(self._sum_up(head))) for head in range(heads)])
        self._drawn, self._chances = self._draw(count)  # [H, R·C]
        head, self._far = torch.arange(heads)[:, None], self._order[:, len(rows) - apart :].long()
        self._far_keys, self._far_values = (each[head, rows[self._far]] for each in table)
        self._summaries: _Summaries | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes held, without the table."""
        parts = self.rows, self._weights, self._list_of, self._order, self._sums, self._chances
        more = self._drawn, self._far, self._far_keys, self._far_values, *(self._summaries or ())
        return sum(part.nbytes for part in (*parts, *more))

    def update(self, places: Tensor, log_weights: Tensor) -> None:
        """Set the log weights [H, k] of rows at some places int64 [k], each named once."""
        new = (log_weights - self._shift).exp()
        for head, weights in enumerate(self._weights):
            left, right = self._features(head, places)
            change = new[head].double() - weights[places]
            change = (left * change[:, None])[:, :, None] * right[:, None]
            self._sums[head].index_add_(0, self._list_of[head, places], change)
        self._weights[:, places] = new
        self._summaries = None

    def blocks(self, heads: slice = slice(None), lists: Tensor | None = None) -> Iterator[KVBlock]:
        """Iterate over all rows, or over those of some lists of one head, block by block."""
        places = torch.arange(len(self))
        if lists is not None:
            parts = torch.split(self._order[heads.start].long(), self._sizes[heads.start].tolist())
            places = torch.cat([parts[at] for at in lists.tolist()])
        for part in torch.split(places, _BLOCK):
            keys, values = (gather_rows(each[heads], self.rows[part]) for each in self.table)
            yield KVBlock(keys, values, self._weights[heads, part].log() + self._shift[heads])

    def attend(self, query: Tensor, near: PartialSoftmax, *, max_error: float) -> Attended:
        """Attend by queries [H, T, d] over the lists and the rows of `near`.

        Every list is attended by its summary. If the error of a target is too large, the lists
        that cause it are attended row by row, and at last every row.
        """
        blocks = zip(*(torch.split(part, _TARGETS, 1) for part in (query, *near)), strict=True)
        return Attended.concat(
            [self._attend(q, PartialSoftmax(*others), max_error) for q, *others in blocks]
        )

    def _attend(self, query: Tensor, others: PartialSoftmax, max_error: float) -> Attended:
        near = merge_partials(others, attend_blocks(query, [self._rows_apart()]))
        found, doubts = self._expand(slice(None), query, near)
        inexact = found.error > max_error
        for head in inexact.any(1).nonzero().flatten().tolist():
            which, only = inexact[head].nonzero().flatten(), slice(head, head + 1)
            opened = self._to_open(head, doubts[head, which] / max_error**2)
            if opened is not None:
                asked, beside = query[only, which], PartialSoftmax(*(x[only, which] for x in near))
                rows = attend_blocks(asked, self.blocks(only, opened))
                better, _ = self._expand(only, asked, merge_partials(beside, rows), opened)
                found.put(only, which, better)
        inexact = found.error > max_error
        groups = [(slice(head, head + 1), of_head) for head, of_head in enumerate(inexact)]
        if float(inexact.float().mean()) > 0.5:  # rows are gathered once for all heads
            groups = [(slice(None), inexact.any(0))]
        for heads, which in groups:
            at = which.nonzero().flatten()
            if len(at):
                rows = attend_blocks(query[heads, at], self.blocks(heads))
                whole = merge_partials(PartialSoftmax(*(x[heads, at] for x in others)), rows)
                found.put(heads, at, Attended.exact(whole, len(self)))
        return found

    def _rows_apart(self) -> KVBlock:
        weights = self._weights.gather(1, self._far)
        return KVBlock(self._far_keys, self._far_values, weights.log() + self._shift)

    def _to_open(self, head: int, doubts: Tensor) -> Tensor | None:
        """Choose lists [p] without which the doubts [T, C] sum to less than 1; None = all."""
        order = doubts.clamp(max=1).sum(0).argsort(descending=True)
        left = doubts[:, order].flip(1).cumsum(1).flip(1).amax(0)  # of the first list and after
        chosen = order[left > 0.5]  # true errors differ from those that normal scores would have
        few = len(chosen) and int(self._sizes[head, chosen].sum()) <= _OPENED_SHARE * len(self)
        return chosen if few else None

    def _expand(
        self, heads: slice, query: Tensor, near: PartialSoftmax, opened: Tensor | None = None
    ) -> tuple[Attended, Tensor]:
        """Attend by the summaries of all lists but the opened ones, whose rows are in `near`.

        Returns also the squared error that each list is expected to add, [G, T, C], relative.
        """
        if self._summaries is None:
            self._summaries = self._summarise()
        lists = _Summaries(*(part[heads] for part in self._summaries))
        width, log_weight = near.context.shape[-1], lists.log_weight
        scaled = query * query.shape[-1] ** -0.5
        if opened is not None:
            log_weight = log_weight.index_fill(1, opened, -torch.inf)
        spread = (_products(scaled) @ lists.covariance.mT).clamp_(min=0)  # variance of the scores
        variance = spread.clamp(max=_MAX_VARIANCE)
        logits = torch.baddbmm(variance, scaled, lists.keys.mT, beta=0.5) + log_weight[:, None]
        peak = torch.maximum(logits.amax(-1), near.logsumexp)[..., None]
        weights = logits.sub_(peak).exp_()  # (G, T, C)
        exact = (near.logsumexp[..., None] - peak).exp()
        total = exact + weights.sum(-1, keepdim=True)
        weights /= total
        gathered = weights @ lists.values
        context = near.context * (exact / total) + gathered[..., :width]
        slopes = gathered[..., width:].reshape(*context.shape, -1)
        context += (slopes @ scaled[..., None])[..., 0]
        length = context.square().sum(-1, keepdim=True).clamp_(min=_TINY)

        def far(moments: Tensor) -> Tensor:
            """Return Σ x |v - context|² of sums Σ x [v, 1, |v|²]."""
            one, squares = moments[..., width : width + 1], moments[..., width + 1 :]
            away = (moments[..., :width] * context).sum(-1, keepdim=True)
            return (squares - 2 * away + one * length)[..., 0].clamp_(min=0)

        # A drawn row adds e^a instead of e^(σ²/2) (1 + a) by its score a above the mean of its
        # list's; what they add together moves the context.
        scores = (scaled @ lists.away.mT).view(*context.shape[:2], _DRAWN, -1)  # (G, T, R, C)
        terms = (scores - variance[:, :, None] / 2).clamp_(max=_MAX_EXPONENT)
        terms = terms.exp_().sub_(1).sub_(scores).mul_(weights[:, :, None])
        terms = terms.flatten(2).mul_(lists.shares[:, None])
        moved = terms @ lists.drawn[..., : width + 1]
        moved = (moved[..., :width] - moved[..., width:] * context).square().sum(-1)
        moved += far(terms.square_() @ lists.drawn)
        # The same of normal scores, and of one row far above the mean: the drawn rows may miss it.
        means, centre = lists.moments.mT, torch.cat([-2 * context, length, length / length], -1)
        single = torch.add(spread.sqrt_().mul_(_FAR_ABOVE), variance, alpha=-0.5)
        single = single.clamp_(max=_MAX_EXPONENT).exp_().div_(self._sizes[heads, None, :-1] + 1)
        doubts = (torch.expm1(variance) - variance).mul_(_CONFIDENCE**2 / _DRAWN)
        doubts.add_(single.square_()).mul_(weights.square_())
        doubts.mul_((centre @ means).clamp_(min=0)).div_(length)
        error = torch.maximum(_CONFIDENCE**2 * moved / length[..., 0], doubts.sum(-1)).sqrt_()
        error = error.nan_to_num_(nan=math.inf)
        partial = PartialSoftmax(context, (total.log() + peak)[..., 0])
        scanned = 0 if opened is None else int(self._sizes[heads.start, opened].sum())
        rows = torch.full_like(error, scanned + self._far.shape[1])
        return Attended(partial, (exact / total)[..., 0], error, rows), doubts

    def _gather(self, head: int, rows: Tensor) -> list[Tensor]:
        return [gather_rows(each[head : head + 1], rows)[0] for each in self.table]

    def _features(self, head: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return [1, k] and [1, k, v, |v|²] of rows [n]: float64, since sums are updated."""
        keys, values = (each.double() for each in self._gather(head, self.rows[places]))
        left = torch.cat([torch.ones_like(keys[:, :1]), keys], 1)
        return left, torch.cat([left, values, values.square().sum(1, keepdim=True)], 1)

    def _sum_up(self, head: int) -> Iterator[Tensor]:
        for places in torch.split(self._order[head].long(), self._sizes[head].tolist()):
            left, right = self._features(head, places)
            yield (left * self._weights[head, places, None]).T @ right

    def _draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw rows of each list in proportion to their weights, [H, R·C], and their chances."""
        generator = torch.Generator().manual_seed(_SEED)
        weights = self._weights.double().gather(1, self._order.long())
        sums, last = weights.cumsum(1), self._sizes.cumsum(1) - 1
        ends = sums.gather(1, last.clamp(min=0))[:, :count]
        starts = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
        part = torch.rand(len(ends), _DRAWN, count, generator=generator, dtype=torch.float64)
        part = (torch.arange(_DRAWN)[:, None] + part) / _DRAWN
        wanted = starts[:, None] + part * (ends - starts)[:, None]  # (H, R, C)
        at = torch.searchsorted(sums, wanted.flatten(1))
        at = torch.minimum(at, last[:, :count].clamp(min=0).repeat(1, _DRAWN))
        chances = weights.gather(1, at) / (ends - starts).clamp(min=_TINY).repeat(1, _DRAWN)
        return self._order.gather(1, at).long(), chances

    def _summarise(self) -> _Summaries:
        dim, listed = self.table.keys.shape[2], self._sums[:, :-1]
        weight = listed[:, :, :1, :1].clamp(min=0)  # (H, C, 1, 1)
        is_present = weight > _TINY  # a list whose rows are hidden may keep rounding errors
        means = listed / weight.clamp(min=_TINY) * is_present
        key, value = means[:, :, 0, 1 : 1 + dim], means[:, :, 0, 1 + dim : -1]
        covariance = means[:, :, 1:, 1 : 1 + dim] - key[..., :, None] * key[..., None, :]
        cross = means[:, :, 1:, 1 + dim : -1].mT - value[..., :, None] * key[..., None, :]
        first, second = torch.triu_indices(dim, dim)
        drawn = [self._features(head, places)[1] for head, places in enumerate(self._drawn)]
        features, one = torch.stack(drawn), torch.ones_like(value[..., :1])
        shares = self._weights.gather(1, self._drawn) / self._chances.clamp(min=_TINY)
        weights, has = (each.flatten(1).repeat(1, _DRAWN) for each in (weight, is_present))
        shares = torch.where(has, shares / weights.clamp(min=_TINY) / _DRAWN, 0.0)
        parts = (
            weight.flatten(1).log() + self._shift,
            key,
            covariance[..., first, second],
            torch.cat([value, cross.flatten(2)], 2),
            torch.cat([value, one, means[:, :, 0, -1:]], 2),
            features[..., 1 : 1 + dim] - key.repeat(1, _DRAWN, 1),
            torch.cat([features[..., 1 + dim : -1], features[..., :1], features[..., -1:]], 2),
            shares,
        )
        return _Summaries(*(part.float() for part in parts))


def _products(query: Tensor) -> Tensor:
    """Multiply out q so that its product with a triangle of Σ is qᵀΣq: [..., d (d + 1) / 2]."""
    first, second = torch.triu_indices(query.shape[-1], query.shape[-1])
    both = query.index_select(-1, first).mul_(query.index_select(-1, second))
    return both.mul_(torch.where(first == second, 1.0, 2.0))


def _roots(metric: Tensor) -> Tensor:
    values, axes = torch.linalg.eigh(metric)
    return torch.matmul(axes * values.clamp(min=0).sqrt()[:, None], axes.mT)


def _list_of(keys: Tensor, count: int, weights: Tensor, apart: int) -> Tensor:
    """Return the list of each of the keys [m, d], int32 [m], by k-means.

    Some keys are in no list, which is C then: `apart` of those that are far from the mean of their
    list, and of the heavy ones, that add most to its variance.
    """
    points = np.ascontiguousarray(keys.numpy(), np.float32)
    few = {"min_points_per_centroid": 1, "max_points_per_centroid": _POINTS_PER_LIST}
    with one_thread():
        means = faiss.Kmeans(points.shape[1], count, niter=_ROUNDS, seed=_SEED, **few)
        means.train(points)
        distances, found = means.index.search(points, 1)
    lists = torch.from_numpy(found[:, 0].astype(np.int32))
    adds = torch.from_numpy(distances[:, 0]) * (weights + weights.mean())
    lists[adds.topk(apart).indices] = count
    return lists
