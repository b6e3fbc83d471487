"""Effects: what scores lose without a row of the memory, the whole model included.

Without an event, attention, transitions and similarity lose a row, and older events move one place
nearer to the present: that is computed in closed form. Later events would also have had other
states, and with them other keys, values and queries. To first order that is the derivative of a
score by a gate on the event, ∂s/∂g at g = 1: a gate of 0 leaves the event out of the encoder. The
newest events change the query itself, where first order fails: contributions know the scores
without them. Where the encoder reads few events, the history is scored without each of them.

Of more events than its window the encoder reads the newest, from a first one that their number
decides. Without an event before the window it begins one event later, and every state changes,
whichever event that is. Just after the window has moved it begins a step earlier without any one
event, whether that was read or not, and the newest are scored too. The history without one event
before the window is scored: what the score loses beyond the closed form is taken to be lost without
each of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions, attend, logits
from models.attention.partial_softmax import PartialSoftmax
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint
from models.encoder.event_bias import FARTHEST
from models.history.encoder_window import EncoderWindow
from models.history.user_memory import NEWEST_LEFT_OUT, UserMemory, target_queries
from models.ranking.contributions import Contributions
from models.ranking.encoder_slopes import encoder_slopes
from models.ranking.leave_one_out import scores_without
from models.ranking.scoring import score

# Events that the encoder reads, up to which no effect is estimated: the derivative fails most for
# few events, and to encode these anew takes little.
EXACT_EVENTS = 64
_BLOCK = 1 << 23  # floats of [J, H, m] held at once: 32 MiB

Named = Sequence[NDArray[np.int64]]  # memory rows [≤ top] of each target [T]


class _TargetRows(NamedTuple):
    """Rows of a memory whose effects on one target are computed."""

    found: Contributions
    at: int  # place of the target in `found`
    target: int  # its item row
    rows: NDArray[np.int64]  # memory rows [J]

    @property
    def sources(self) -> list[int]:
        """Sources of the rows, as in `UserMemory.source`."""
        sources: list[int] = self.found.user.source[self.rows].tolist()
        return sources

    @property
    def are_items(self) -> list[bool]:
        """Report whether the rows are items: the encoder reads events on these alone."""
        are_items: list[bool] = (self.found.user.rows.numpy()[self.rows] >= 0).tolist()
        return are_items


@torch.inference_mode()
def effects_of(
    snapshot: Snapshot,
    user: UserMemory,
    found: Sequence[Contributions],
    named: Sequence[Named],
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    exact: bool = False,
    partial: PartialSoftmax | None = None,
) -> list[list[list[tuple[float, bool]]]]:
    """Compute the effects of rows on scores: how much each target's score loses without them.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
        found: contributions to all targets; of a long history, each over a memory of its own.
        named: for each of these, the rows whose effects to compute.
        options: as in `score`.
        exact: score histories without each of the events, instead of estimating. Of a long
            history the collapsed events are estimated all the same.
        partial: of a long history, the attention of all targets as `score` returned it.

    Returns:
        list: effects and whether they are exact, in the order of `named`.
    """
    each = [
        _TargetRows(memory, at, target, rows)
        for memory, rows_of in zip(found, named, strict=True)
        for at, (target, rows) in enumerate(zip(memory.targets.tolist(), rows_of, strict=True))
    ]
    window = EncoderWindow.of(snapshot, user)
    places = window.places
    count = EXACT_EVENTS if len(places) <= EXACT_EVENTS else NEWEST_LEFT_OUT
    newest = set(list(places)[-count:])
    collapsed = 0 if user.collapsed is None else user.collapsed.items.count
    known = {} if window.earlier else _known_of_newest(found)
    left_out: dict[int, list[int]] = {}
    for one in each:
        needs_move = False
        for source, is_item in zip(one.sources, one.are_items, strict=True):
            if (source, one.target) in known:
                continue
            # First order says nothing of the hard attention.
            is_scored = exact or source in newest or (options.hard and source in places)
            if is_scored and not 0 <= source < collapsed:
                left_out.setdefault(source, []).append(one.target)
            else:
                needs_move |= window.moves_without(source, is_item)
        if needs_move and window.unread is not None:
            scored = left_out.setdefault(window.unread, [])
            if one.target not in scored:
                scored.append(one.target)
    targets = torch.tensor([one.target for one in each])
    scores = scores_without(snapshot, user, left_out, options)
    if scores:
        totals = score(snapshot, user, targets.numpy(), options).total.tolist()
        total_of = dict(zip(targets.tolist(), totals, strict=True))
        known |= {key: total_of[key[1]] - without for key, without in scores.items()}
    sloped = [
        number
        for number, one in enumerate(each)
        if any(source in places and (source, one.target) not in known for source in one.sources)
    ]
    slopes: dict[int, list[float]] = {}
    if sloped:
        if partial is not None:
            partial = PartialSoftmax(*(part[:, sloped] for part in partial))
        gradients = encoder_slopes(snapshot, user, targets[sloped], options, partial=partial)
        slopes = dict(zip(sloped, gradients.tolist(), strict=True))
    # Rows of a long history that were not retrieved are hidden, and stay so.
    is_fixed = user.collapsed is not None and options.mode == "coarse"
    own = replace(options, mode="exact") if is_fixed else options
    effects = (
        _effects(snapshot, one, own, known, window, slopes.get(number, []), is_fixed=is_fixed)
        for number, one in enumerate(each)
    )
    return [list(islice(effects, len(memory.targets))) for memory in found]


def _known_of_newest(found: Sequence[Contributions]) -> dict[tuple[int, int], float]:
    """Return the effects of the newest events by (source, target), which contributions contain.

    They are those of a window that stays where it is.
    """
    known: dict[tuple[int, int], float] = {}
    for one in found:
        sources = one.user.source[one.newest_rows.numpy()].tolist()
        lost = (one.each.sum(1) - one.without_newest).tolist()
        for source, of_targets in zip(sources, lost, strict=True):
            pairs = zip(one.targets.tolist(), of_targets, strict=True)
            known |= {(source, target): effect for target, effect in pairs}
    return known


def _effects(
    snapshot: Snapshot,
    named: _TargetRows,
    options: AttentionOptions,
    known: dict[tuple[int, int], float],
    window: EncoderWindow,
    slopes: list[float],
    *,
    is_fixed: bool,
) -> list[tuple[float, bool]]:
    """Compute the effects on one target.

    Args:
        snapshot: the model and the catalogue.
        named: the target and the rows.
        options: as in `score`.
        known: exact effects, by (source, target); the unread event's too where the window moves.
        window: what the encoder has read.
        slopes: [n] derivatives of the score; needed where the effect of an event that was read is
            not known.
        is_fixed: whether no other row is retrieved in place of a missing one, as it would be.
    """
    checkpoint()
    sources, target = named.sources, named.target
    is_left = np.array([(source, target) not in known for source in sources], dtype=bool)
    rows = named.rows[is_left]
    example = None if window.unread is None else known.get((window.unread, target))
    if example is not None:
        rows = np.append(rows, np.flatnonzero(named.found.user.source == window.unread))
    closed = closed_form(snapshot, named.found, named.at, rows, options).tolist()
    move = 0.0 if example is None else example - closed.pop()
    estimates = iter(closed)
    out: list[tuple[float, bool]] = []
    for source, is_item in zip(sources, named.are_items, strict=True):
        if (source, target) in known:
            out.append((known[source, target], True))
            continue
        effect = next(estimates)
        moves = window.moves_without(source, is_item)
        if moves:
            effect += move
        if source in window.places:
            effect += slopes[window.places[source]]
        out.append((effect, not (moves or is_fixed or source in window.places)))
    return out


@torch.inference_mode()
def closed_form(
    snapshot: Snapshot,
    found: Contributions,
    at: int,
    rows: NDArray[np.int64],
    options: AttentionOptions,
) -> Tensor:
    """Compute what a target's parts but the prior lose without each of some rows, [J].

    The states of other events stay as they are.

    Args:
        snapshot: the model and the catalogue.
        found: contributions to T targets.
        at: the place of the target among them.
        rows: memory rows [J].
        options: as in `score`.
    """
    if not len(rows):
        return torch.zeros(0)
    heads, _, size = found.weights.shape
    step = max(1, _BLOCK // max(1, size * heads))
    chosen = torch.from_numpy(rows)
    less = [
        _attention_without(snapshot, found, at, block, options)
        for block in torch.split(chosen, step)
    ]
    whole: Tensor = torch.linalg.vecdot(found.weights[:, at], found.gains[:, at]).sum()
    return found.counted[at, chosen] + whole - torch.cat(less)


def _attention_without(
    snapshot: Snapshot, found: Contributions, at: int, rows: Tensor, options: AttentionOptions
) -> Tensor:
    """Return the attention part [J] of a target without each of the rows [J]."""
    user, target, model = found.user, found.targets[at : at + 1], snapshot.model
    # Deleting event j moves the events before it one place nearer to the present: their biases
    # change, so that the closed form (o - α_j v_j) / (1 - α_j) would be wrong.
    older = user.distance[rows, None] < user.distance  # (J, m)
    nearer = user.distance - (older & (user.distance < FARTHEST)).long()
    was = model.memory_bias(user.distance, user.age, user.log_weights, user.types)  # (H, m)
    shifted = model.memory_bias(nearer, user.age, user.log_weights, user.types)  # (H, J, m)
    # The bias of a row that stands for many is not its own: what moves is the difference.
    moves = (shifted - was[:, None]).nan_to_num_(0.0)  # of what is hidden nothing
    shifted = (user.bias[:, None] + moves).transpose(0, 1)[:, :, None]  # (J, H, 1, m)
    left = (torch.arange(len(user.bias[0])) != rows[:, None])[:, None, None]  # (J, 1, 1, m)
    if options.exclude_self:
        left = left & (user.rows != target)
    query, keys = target_queries(snapshot, user, target), user.memory.keys.transpose(0, 1)
    if options.mode == "coarse" and options.rows_kept < left.shape[-1]:
        # Another row is retrieved in place of the one that is missing.
        scores = logits(query, keys, bias=shifted, visible=left)  # (J, H, 1, m)
        left = left & (scores >= scores.topk(options.rows_kept, -1).values[..., -1:])
    return attend(
        query,
        keys,
        found.gains[:, at, :, None],
        bias=shifted,
        visible=left,
        temperature=options.temperature,
        hard=options.hard,
    ).context.sum((1, 2, 3))
