"""Explanation of scores: the rows of a memory that a score is due to, and their effects.

An effect is what a score loses without a row of the memory, the whole model included. Without an
event, attention, transitions and similarity lose a row, and older events move one place nearer to
the present: that is computed in closed form. Later events would also have had other states, and
with them other keys, values and queries. To first order that is the derivative of a score by a gate
on the event, ∂s/∂g at g = 1: a gate of 0 leaves the event out of the encoder. The newest events
change the query itself, for which first order fails: contributions know the scores without them. If
the encoder reads few events, the history is scored without each of them: made into a memory and
scored as any other, while the encoder reuses its cache.

If there are more events than its window, the encoder reads the newest, from a first one that their
number decides. Without an event before the window it begins one event later, and every state
changes, whichever event that is. Just after the window has moved it begins a step earlier without
any one event, whether that was read or not, and the newest are scored too. The history without one
event before the window is scored: what the score loses beyond the closed form is taken to be lost
without each of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import (
    DEFAULT_OPTIONS,
    AttentionOptions,
    attend,
    exclude_self,
    gather_rows,
    logits,
)
from models.attention.partial_softmax import PartialSoftmax, remove_partial
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint
from models.data.windows import window_start
from models.history.long_history import rank_contributions
from models.history.user_history import attendable_events
from models.history.user_memory import (
    NEWEST_LEFT_OUT,
    REMAINDER,
    EncodedHistory,
    UserMemory,
    at_request,
    build_memory,
    encoder_inputs,
    expand_top_events,
    is_known,
    known_rows,
    retrieve_user,
    target_queries,
    without_each,
)
from models.index.memory_attention import as_mask, attend_near
from models.ranking.contributions import (
    Contributions,
    attention_without_newest,
    contributions,
    distance_without,
)
from models.ranking.scoring import score, target_counts

_CANDIDATES = 64  # unread events among which one of little weight is found


class EncoderWindow(NamedTuple):
    """The events that the encoder has read of a history, and how its window moves without one."""

    places: dict[int, int]  # of the events read, by source
    earlier: int  # how many events earlier it would begin if the history were one event shorter
    unread: int | None  # source of one event on an item before the window, if any

    @classmethod
    def of(cls, snapshot: Snapshot, user: UserMemory) -> EncoderWindow:
        if user.encoded is None or not len(user.encoded.cache):
            return cls({}, 0, None)
        read = user.encoded_rows
        sources = user.source[read.numpy()].tolist()
        places = {source: place for place, source in enumerate(sources)}
        first, count = user.encoded.first_item, len(sources)
        earlier = first - window_start(first + count - 1, snapshot.model.config.window)
        unread = np.flatnonzero(user.rows[: int(read[0])].numpy() >= 0)
        # Events that an earlier window would not read either, or else the first event.
        unread = unread[: max(1, len(unread) - earlier)][-_CANDIDATES:]
        if not len(unread):
            return cls(places, earlier, None)
        light = unread[int(user.log_weights.numpy()[unread].argmin())]
        return cls(places, earlier, int(user.source[light]))

    def moves_without(self, source: int, is_item: bool) -> bool:
        """Return whether the encoder, which reads items only, begins elsewhere without an event."""
        if source < 0 or not is_item or not self.places:
            return False
        # One place earlier among one event fewer before it is the same event.
        return self.earlier > 0 if source in self.places else self.earlier != 1


def encoder_slopes(
    snapshot: Snapshot,
    user: UserMemory,
    targets: Tensor,
    options: AttentionOptions,
    *,
    partial: PartialSoftmax | None = None,
) -> Tensor:
    """Differentiate the scores of targets, int64 [L], by gates on the encoder's n events: [L, n].

    Row j of the attention itself is not gated: without it the score is known in closed form.
    A history of very many items needs `partial`, the targets' attention as `score` returned it.
    """
    encoded, model = user.encoded, snapshot.model
    if encoded is None or model.encoder is None or model.state_attention is None:
        raise ValueError("user: has no encoded history")
    older = None
    with at_request(user):
        block, items = known_rows(user), user.rows
        if user.collapsed is not None and block.bias.shape[1] > len(items):
            items = torch.cat([items, torch.from_numpy(user.collapsed.item_rows)])
        seen = exclude_self(targets, items) if options.exclude_self else None
        retrieved = retrieve_user(snapshot, user, targets, options)
        if retrieved is not None:
            seen = as_mask(retrieved, len(items))
        if not is_known(user):
            if partial is None:
                raise ValueError("partial: must be given for a history of very many items")
            # To first order this is one row, whose context and mass do not depend on the query.
            query = target_queries(snapshot, user, targets)
            near = attend_near(query, block._replace(visible=seen), options)
            older = remove_partial(partial, near)
    attention = model.state_attention
    counts = target_counts(snapshot, user, targets, again=not options.exclude_self)
    # Tensors of requests cannot be differentiated through; copies can.
    with torch.inference_mode(mode=False), torch.enable_grad():
        gates = torch.ones(len(encoded.cache), requires_grad=True)
        times = encoded.cache.timestamps.clone()
        states = model.encoder.forward_gated(encoded.events.clone(), times, gates)
        change = states - states.detach()  # 0: only its derivative counts
        read = user.encoded_rows.clone()
        keys, values = (
            part.clone().index_add(1, read, projected.transpose(0, 1))
            for part, projected in (
                (block.keys, attention.keys(change)),
                (block.values, attention.values(change)),
            )
        )  # (H, m, d)
        query = attention.queries(change[-1]) - attention.queries(change[-1].detach())
        queries = target_queries(snapshot, user, targets).clone() + query[:, None]
        bias = block.bias.clone()[:, None].expand(-1, len(targets), -1)  # (H, L, m)
        if seen is not None:
            bias = bias.masked_fill(~seen.clone(), -torch.inf)
        if older is not None:  # one more row, with a score and a value of each target's own
            nothing = keys.new_zeros(len(keys), 1, keys.shape[2])
            keys, values = torch.cat([keys, nothing], 1), torch.cat([values, nothing], 1)
            bias = torch.cat([bias, older.logsumexp[..., None].clone()], 2)
        attended = attend(queries, keys, values, bias=bias, temperature=options.temperature)
        context = attended.context
        if older is not None:
            context = context + attended.weights[..., -1:] * older.context.clone()
        totals = (context * gather_rows(snapshot.tables.outputs, targets).clone()).sum((0, 2))
        user_state = user.user_state.clone() + change[-1]
        totals = totals + model.transition_scores(user_state, counts.clone())
        slopes = list[Tensor]()
        for total in totals:
            checkpoint()
            slopes += torch.autograd.grad(total, gates, retain_graph=True)
    return torch.stack(slopes)


# Histories without events so near to each other are encoded in one pass. Measured: a pass costs as
# much as 35 events in it, and what some of them need not have read again is less than that.
_NEAR = 32


@torch.inference_mode()
def scores_without(
    snapshot: Snapshot,
    user: UserMemory,
    targets: Mapping[int, Sequence[int]],
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> dict[tuple[int, int], float]:
    """Score targets without one event of the history, or one profile entry, by (source, item row).

    `targets` are item rows for each source, which is an event of the history, or -1 - i for profile
    entry i; in a long history none of the older events.
    """
    scores: dict[tuple[int, int], float] = {}
    for source, encoded in _encoded_without(snapshot, user, list(targets)):
        rows = targets[source]
        history = user.history.without(_place(user, source))
        less = build_memory(snapshot, history, user.at, encoded=encoded)
        less = replace(less, collapsed=user.collapsed)
        totals = score(snapshot, less, np.asarray(rows, dtype=np.int64), options).total.tolist()
        scores |= {(source, row): total for row, total in zip(rows, totals, strict=True)}
    return scores


def _encoded_without(
    snapshot: Snapshot, user: UserMemory, sources: Sequence[int]
) -> Iterator[tuple[int, EncodedHistory | None]]:
    """Yield each of the sources, and the encoded history without it; None = to be encoded."""
    encoder, encoded = snapshot.model.encoder, user.encoded
    if encoder is None or encoded is None:
        yield from ((source, None) for source in sources)
        return
    before = user.history.before
    places = np.array([_place(user, source) for source in sources])
    source, rows = attendable_events(snapshot, user.history)
    source, rows = source[(rows >= 0).numpy()], rows[rows >= 0]  # what the encoder may read
    is_read = np.isin(places, source)  # it knows nothing of the others
    yield from ((each, encoded) for each, read in zip(sources, is_read, strict=True) if not read)
    rest = len(source) - 1
    if rest < 1 or not is_read.any():
        yield from ((each, None) for each, read in zip(sources, is_read, strict=True) if read)
        return
    start = window_start(before + rest, snapshot.model.config.window) - before
    if start != encoded.first_item - before:
        events = encoder_inputs(snapshot, user.history, source[start:], rows[start:])
        times = torch.from_numpy(user.history.timestamps[source[start:]])
        cache = encoder.append(encoder.empty_cache(), events, times)
        encoded = EncodedHistory(start + before, events, cache)
    # One event more than the window: without any earlier event, its first one is past.
    gone = np.maximum(np.searchsorted(source, places[is_read]) - start, 0)
    distinct = np.unique(gone)
    read = np.asarray(sources)[is_read]
    for part in np.split(distinct, np.flatnonzero(np.diff(distinct // _NEAR)) + 1):
        less = dict(zip(part.tolist(), without_each(encoder, encoded, part), strict=True))
        inside = np.isin(gone, part)
        for each, place in zip(read[inside].tolist(), gone[inside].tolist(), strict=True):
            yield each, less[place]


def _place(user: UserMemory, source: int) -> int:
    """Return the place of a source in `user.history`, which has a long history's newest events."""
    return source if source < 0 or user.collapsed is None else source - user.collapsed.count


# Events that the encoder reads, up to which no effect is estimated: the derivative fails most for
# few events, and to encode these again takes little.
EXACT_EVENTS = 64
_BLOCK = 1 << 23  # floats of [J, H, m] held at once: 32 MiB


class TargetRows(NamedTuple):
    """Rows of a memory whose effects on one target are computed."""

    found: Contributions
    at: int  # place of the target in `found`
    target: int  # its item row
    rows: NDArray[np.int64]  # memory rows [J]

    @property
    def events(self) -> list[tuple[int, bool]]:
        """The source of each row, as in `UserMemory.source`, and whether it is an item."""
        user = self.found.user
        is_item = user.rows.numpy()[self.rows] >= 0
        return list(zip(user.source[self.rows].tolist(), is_item.tolist(), strict=True))


@torch.inference_mode()
def effects_of(
    snapshot: Snapshot,
    user: UserMemory,
    named: Sequence[TargetRows],
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    exact: bool = False,
    partial: PartialSoftmax | None = None,
) -> list[list[tuple[float, bool]]]:
    """Compute what each target's score loses without its rows, and whether that is exact.

    With `exact`, histories without each of the events are scored; only the collapsed events of a
    long history are estimated. `partial` is the attention of all targets over a long history, as
    `score` returned it.
    """
    window = EncoderWindow.of(snapshot, user)
    places = window.places
    count = EXACT_EVENTS if len(places) <= EXACT_EVENTS else NEWEST_LEFT_OUT
    newest = set(list(places)[-count:])
    collapsed = 0 if user.collapsed is None else user.collapsed.count
    known = {} if window.earlier else _known_of_newest(named)
    left_out: dict[int, list[int]] = {}
    for one in named:
        needs_move = False
        for source, is_item in one.events:
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
    targets = torch.tensor([one.target for one in named])
    scores = scores_without(snapshot, user, left_out, options)
    if scores:
        totals = score(snapshot, user, targets.numpy(), options).total.tolist()
        total_of = dict(zip(targets.tolist(), totals, strict=True))
        known |= {key: total_of[key[1]] - without for key, without in scores.items()}
    sloped = [
        number
        for number, one in enumerate(named)
        if any(source in places and (source, one.target) not in known for source, _ in one.events)
    ]
    slopes: dict[int, list[float]] = {}
    if sloped:
        if partial is not None:
            partial = PartialSoftmax(*(part[:, sloped] for part in partial))
        gradients = encoder_slopes(snapshot, user, targets[sloped], options, partial=partial)
        slopes = dict(zip(sloped, gradients.tolist(), strict=True))
    # Rows of a long history that were not retrieved are hidden, and stay so.
    is_fixed = user.collapsed is not None and options.mode == "coarse"
    attended = replace(options, mode="exact") if is_fixed else options
    return [
        _effects(
            snapshot,
            one,
            attended,
            known=known,
            window=window,
            slopes=slopes.get(number, []),
            is_fixed=is_fixed,
        )
        for number, one in enumerate(named)
    ]


def _known_of_newest(named: Sequence[TargetRows]) -> dict[tuple[int, int], float]:
    """Return the effects of the newest events, for a window that stays, by (source, target)."""
    known: dict[tuple[int, int], float] = {}
    for one in {id(target.found): target.found for target in named}.values():
        sources = one.user.source[one.newest_rows.numpy()].tolist()
        lost = (one.each.sum(1) - one.without_newest).tolist()
        for source, of_targets in zip(sources, lost, strict=True):
            pairs = zip(one.targets.tolist(), of_targets, strict=True)
            known |= {(source, target): effect for target, effect in pairs}
    return known


def _effects(
    snapshot: Snapshot,
    named: TargetRows,
    options: AttentionOptions,
    *,
    known: dict[tuple[int, int], float],  # exact effects; with a moving window the unread event's
    window: EncoderWindow,
    slopes: list[float],  # [n] of the score, if an event that was read has no known effect
    is_fixed: bool,  # no other row is retrieved in place of a missing one, as it would be
) -> list[tuple[float, bool]]:
    checkpoint()
    events, target = named.events, named.target
    is_unknown = np.array([(source, target) not in known for source, _ in events], dtype=bool)
    rows = named.rows[is_unknown]
    example = None if window.unread is None else known.get((window.unread, target))
    if example is not None:
        rows = np.append(rows, np.flatnonzero(named.found.user.source == window.unread))
    closed = closed_form(snapshot, named.found, named.at, rows, options).tolist()
    move = 0.0 if example is None else example - closed.pop()
    estimates = iter(closed)
    out: list[tuple[float, bool]] = []
    for source, is_item in events:
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
    """Compute the loss of one target, at a place of `found`, without each memory row [J]: [J].

    The prior is left out, and the states of other events stay as they are.
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
    user, target, model = found.user, found.targets[at : at + 1], snapshot.model
    # Deleting event j moves the events before it one place nearer to the present: their biases
    # change, so that the closed form (o - α_j v_j) / (1 - α_j) would be wrong.
    nearer = distance_without(user, rows)  # (J, m)
    was = model.memory_bias(user.distance, user.age, user.log_weights, user.types)  # (H, m)
    shifted = model.memory_bias(nearer, user.age, user.log_weights, user.types)  # (H, J, m)
    # The bias of a row that stands for many is not its own: what moves is the difference.
    moves = (shifted - was[:, None]).nan_to_num_(0.0)  # hidden rows do not move
    shifted = (user.bias[:, None] + moves).transpose(0, 1)[:, :, None]  # (J, H, 1, m)
    left = (torch.arange(len(user.bias[0])) != rows[:, None])[:, None, None]  # (J, 1, 1, m)
    if options.exclude_self:
        left = left & (user.rows != target)
    query, keys = target_queries(snapshot, user, target), user.keys.transpose(0, 1)
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


Effects = Literal["none", "estimate", "exact"]


class Reason(NamedTuple):
    """Contribution of one row of the memory to one target's score."""

    source: int  # event of the history; -1 - i is profile entry i
    weight: float  # mean over heads
    contribution: float  # signed; all rows' sum to the score without the prior
    effect: float | None = None  # what the score loses without the row; None = not computed
    effect_is_exact: bool = False  # False: not computed, or estimated


@torch.inference_mode()
def explain(
    snapshot: Snapshot,
    user: UserMemory,
    rows: NDArray[np.integer],
    top: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    partial: PartialSoftmax | None = None,
    effects: Effects = "none",
) -> list[list[Reason]]:
    """Return the `top` rows of the memory that raise the score of each item row [L] most.

    If fewer rows raise it, the rows that lower it most follow. A list is in descending order of the
    signed contributions. Events on hidden and deleted items are no reasons, since nobody may be
    told of these. A long history needs `partial`, the attention [H, L] as `score` returned it.
    """
    if not len(user) or top < 1 or not len(rows):
        return [[] for _ in rows]
    targets = torch.from_numpy(np.asarray(rows, dtype=np.int64))
    if partial is None:
        found = [contributions(snapshot, user, targets, options)]
    else:  # a long history opens other events for each target
        without = attention_without_newest(snapshot, user, targets, options)
        every = replace(options, mode="exact")  # what was not retrieved is hidden
        found = [
            contributions(
                snapshot,
                expand_top_events(snapshot, user, int(target), top, partial.target(place), options),
                target[None],
                every,
                without=None if without is None else without.target(place),
            )
            for place, target in enumerate(targets)
        ]
    named, reasons = list[TargetRows](), list[list[Reason]]()
    for memory in found:
        rows_of = _foremost(memory, top, snapshot)
        pairs = zip(memory.targets.tolist(), rows_of, strict=True)
        named += [TargetRows(memory, at, *pair) for at, pair in enumerate(pairs)]
        reasons += _reasons(memory, rows_of)
    if effects == "none":
        return reasons
    exact = effects == "exact"
    completed = effects_of(snapshot, user, named, options, exact=exact, partial=partial)
    return [
        [
            reason._replace(effect=effect, effect_is_exact=is_exact)
            for reason, (effect, is_exact) in zip(*target, strict=True)
        ]
        for target in zip(reasons, completed, strict=True)
    ]


def _foremost(found: Contributions, top: int, snapshot: Snapshot) -> list[NDArray[np.int64]]:
    each = found.each.numpy()
    nameable = ((found.weights.sum(0) > 0).numpy() | (each != 0)) & (found.user.source != REMAINDER)
    nameable &= ~snapshot.catalogue.withheld(found.user.rows.numpy())
    # Rows that cannot be named count as 0, which comes last.
    orders = rank_contributions(np.where(nameable, each, 0.0))
    if not nameable.all():
        orders = np.take_along_axis(
            orders, np.argsort(~np.take_along_axis(nameable, orders, 1), axis=1, kind="stable"), 1
        )
    orders, targets = orders[:, :top], np.arange(len(each))[:, None]
    by_value = orders[targets, np.argsort(-each[targets, orders], axis=1, kind="stable")]
    return [rows[can[rows]] for rows, can in zip(by_value, nameable, strict=True)]


def _reasons(found: Contributions, named: Sequence[NDArray[np.int64]]) -> list[list[Reason]]:
    source, weights, each = found.user.source, found.weights.mean(0).numpy(), found.each.numpy()
    rows = np.concatenate([np.zeros(0, np.int64), *named])
    targets = np.repeat(np.arange(len(named)), [len(own) for own in named])
    reasons = map(
        Reason,
        source[rows].tolist(),
        weights[targets, rows].tolist(),
        each[targets, rows].tolist(),
    )
    return [list(islice(reasons, len(own))) for own in named]
