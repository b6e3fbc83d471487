"""Effects: what scores lose without a row of the memory, the whole model included.

Without an event, attention, transitions and similarity lose a row, and older events move one place
nearer to the present: that is computed in closed form. Later events would also have had other
states, and with them other keys, values and queries. To first order that is the derivative of a
score by a gate on the event: log g is added to the scores of the event in all blocks of the
encoder, and ∂s/∂g is taken at g = 1. The newest events change the query itself, where first order
fails: the histories without them are scored, so far as contributions have not done so already,
and so are those without each of few events.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import attend
from models.attention.partial_softmax import PartialSoftmax
from models.catalogue.snapshot import Snapshot
from models.data.windows import window_start
from models.encoder.recency_bias import FARTHEST
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.user_memory import UserMemory, target_queries
from models.ranking.contributions import Contributions
from models.ranking.encoder_slopes import encoder_slopes
from models.ranking.leave_one_out import scores_without
from models.ranking.scoring import score

EXACT_NEWEST = 16  # newest events, whose effects are never estimated; contributions know eight
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
    places = _encoded_places(user)
    newest = set(list(places)[-(EXACT_NEWEST if len(places) > EXACT_EVENTS else EXACT_EVENTS) :])
    collapsed = 0 if user.collapsed is None else user.collapsed.count
    known = _known_of_newest(snapshot, user, found)
    left_out: dict[int, list[int]] = {}
    for one in each:
        for source in one.sources:
            # First order says nothing of the hard attention.
            is_scored = exact or source in newest or (options.hard and source in places)
            is_scored &= (source, one.target) not in known
            if is_scored and not 0 <= source < collapsed:
                left_out.setdefault(source, []).append(one.target)
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
    effects = (
        _effects(snapshot, one, options, known, places, slopes.get(number, []))
        for number, one in enumerate(each)
    )
    return [list(islice(effects, len(memory.targets))) for memory in found]


def _known_of_newest(
    snapshot: Snapshot, user: UserMemory, found: Sequence[Contributions]
) -> dict[tuple[int, int], float]:
    """Return the effects of the newest events by (source, target), which contributions contain.

    None are contained where the encoder's window would begin earlier without an event.
    """
    if user.encoded is None:
        return {}
    first, count = user.encoded.first_item, len(user.encoded.cache)
    if window_start(first + count - 1, snapshot.model.config.window) != first:
        return {}
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
    places: dict[int, int],
    slopes: list[float],
) -> list[tuple[float, bool]]:
    """Compute the effects on one target.

    Args:
        snapshot: the model and the catalogue.
        named: the target and the rows.
        options: as in `score`.
        known: exact effects, by (source, target).
        places: of sources in `slopes`.
        slopes: [n] derivatives of the score; needed where the effect of a place is not known.
    """
    sources, target = named.sources, named.target
    is_left = np.array([(source, target) not in known for source in sources], dtype=bool)
    estimates = iter(
        closed_form(snapshot, named.found, named.at, named.rows[is_left], options).tolist()
    )
    out: list[tuple[float, bool]] = []
    for source in sources:
        if (source, target) in known:
            out.append((known[source, target], True))
        elif source in places:
            out.append((next(estimates) + slopes[places[source]], False))
        else:
            # Without an older event the encoder may read one more: its window moves in steps.
            out.append((next(estimates), source < 0 or not places))
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
    left = torch.arange(len(user.bias[0])) != rows[:, None]  # (J, m)
    if options.exclude_self:
        left &= user.rows != target
    return attend(
        target_queries(snapshot, user, target),
        user.memory.keys.transpose(0, 1),
        found.gains[:, at, :, None],
        bias=shifted,
        visible=left[:, None, None],
        temperature=options.temperature,
        hard=options.hard,
    ).context.sum((1, 2, 3))


def _encoded_places(user: UserMemory) -> dict[int, int]:
    """Return the place among the encoder's events of each source that it has read."""
    sources = user.source[user.encoded_rows.numpy()].tolist()
    return {source: place for place, source in enumerate(sources)}
