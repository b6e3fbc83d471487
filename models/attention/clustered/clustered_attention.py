"""Attention over very many rows of which few matter, to an error that the caller states.

A query is answered by the expansion of few large cells
(`models.attention.clustered.moment_expansion`), at a cost that does not depend on the number of
rows. Where the error so estimated is larger than asked for, the query goes on to smaller cells, to
cells opened, that is attended row by row, and at last to every row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.attention.clustered.cluster_tree import Cells
from models.attention.clustered.moment_expansion import Tail, expanded
from models.attention.partial_softmax import Partial, attended, merged

MAX_ERROR = 0.01
_GAIN = 1.75  # by which twice as many cells lessen the error, about
_HOPE = 10.0  # times the error that is wanted: what opening cells of the last level may still mend
_SMALL = 200  # rows of a cell, of which so few are attended in less time than cells are opened in
_HOPELESS = 1e6  # times the error that is wanted: as far off as matters
_GROUPS = 4  # times as many cells are opened for the next group of targets
_WORTH = 64  # gathering the rows of one cell in so many takes as long as attending to every row


@torch.inference_mode()
def attend_cells(
    cells: Cells,
    query: Tensor,
    *,
    beside: Partial | None = None,
    max_error: float = MAX_ERROR,
    order: int = 2,
) -> Tail:
    """Attend over all rows.

    Args:
        cells: the rows.
        query: [H, T, d].
        beside: attention over other rows of the same memory, put together with this one.
        max_error: that the stated error of any head and target may have; 0 attends every row.
        order: 2; or 1 as a reference, which states its error and looks no closer.
    """
    heads, targets, width = query.shape
    if beside is None:
        beside = Partial.nothing(heads, targets, cells.table.values.shape[2])
    if max_error <= 0:
        return _every(cells, slice(None), query, beside)
    asked = query / math.sqrt(width)
    tail = expanded(cells, 0, slice(None), asked, beside, order=order)
    if order == 2:
        for head in range(heads):
            _look_closer(cells, head, query[head], asked[head], beside, max_error, tail)
    return tail


def attend_every(cells: Cells, query: Tensor, beside: Partial | None = None) -> Partial:
    """The same over every row, one by one: the reference."""
    found = attended(query, cells.blocks(slice(None)))
    return found if beside is None else merged(beside, found)


def _look_closer(
    cells: Cells,
    head: int,
    query: Tensor,
    asked: Tensor,
    beside: Partial,
    max_error: float,
    tail: Tail,
) -> None:
    """Answer anew, into `tail`, the targets of one head whose error is too large."""
    only = slice(head, head + 1)

    def wanting() -> Tensor:
        return (tail.error[head] > max_error).nonzero().flatten()

    def near(left: Tensor) -> Partial:
        return Partial(*(part[only, left] for part in beside))

    def keep(left: Tensor, found: Tail) -> None:
        for kept, new in zip((*tail.partial, *tail[1:]), (*found.partial, *found[1:]), strict=True):
            kept[head, left] = new[0]

    last, number = len(cells.levels) - 1, 0
    hope = _HOPE if cells.levels[last].size > _SMALL else 1.0
    while number < last and len(left := wanting()):
        off = (tail.error[head, left] / max_error).clamp(max=_HOPELESS)
        lost = left[off > hope * _GAIN ** (last - number)]
        if len(lost):
            keep(lost, _every(cells, only, query[None, lost], near(lost)))
            continue
        # Over as many levels at once as the error says.
        number = min(last, number + max(1, math.ceil(math.log(float(off.median()), _GAIN))))
        aim = max_error if number == last else None
        keep(left, expanded(cells, number, only, asked[None, left], near(left), aim=aim))
    if not last and len(left := wanting()):  # so few rows are soon attended
        keep(left, _every(cells, only, query[None, left], near(left)))
    most, opened = cells.levels[-1].log_mass.shape[1] // _WORTH, _GROUPS
    while len(left := wanting()):
        some = left[tail.toward[head, left] <= opened] if opened <= most else left
        if opened > most:
            keep(some, _every(cells, only, query[None, some], near(some)))
        elif len(some):
            found = expanded(cells, last, only, asked[None, some], near(some), opened=opened)
            keep(some, found)
            tail.toward[head, some] = math.inf  # were that not enough, then every row
        opened *= _GROUPS


def _every(cells: Cells, heads: slice, query: Tensor, beside: Partial) -> Tail:
    partial = merged(beside, attended(query, cells.blocks(heads)))
    zero = torch.zeros_like(partial.log_mass)
    return Tail(partial, zero, zero + len(cells), partial.log_mass.clone(), zero)
