"""Effects: what a score loses without an event, estimated or computed exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import attend, exclude_self, logits
from models.attention.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.attention.kv_memory import gather_rows
from models.attention.partial_softmax import PartialSoftmax, remove_partial
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint
from models.data.windows import window_start
from models.encoder.recency_bias import FARTHEST
from models.history.encoded_history import EncodedHistory, encoder_inputs, without_each
from models.history.encoder_window import EncoderWindow
from models.history.user_attention import at_request, is_known, known_rows, retrieve_user
from models.history.user_history import attendable_events
from models.history.user_memory import NEWEST_LEFT_OUT, UserMemory, build_memory, target_queries
from models.index.memory_attention import as_mask, attend_near
from models.ranking.contributions import Contributions
from models.ranking.scoring import score, target_counts

# exact ----------------------------------------------------------------------------------

# Histories without events so near to each other are encoded in one pass. Measured: a pass costs as
# much as 35 events in it, and what some of them need not have read anew is less than that.
_NEAR = 32


@torch.inference_mode()
def scores_without(
    snapshot: Snapshot,
    user: UserMemory,
    targets: Mapping[int, Sequence[int]],
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> dict[tuple[int, int], float]:
    """Score targets without one event of the history, or one profile entry.

    Args:
        snapshot: the model and the catalogue, which stay as they are.
        user: from `build_memory` with the same snapshot.
        targets: item rows, for each source: an event of the history, or -1 - i for profile entry i;
            of a long history none of the older events.
        options: as in `score`.

    Returns:
        dict: the score of each (source, item row).
    """
    found: dict[tuple[int, int], float] = {}
    for source, encoded in _encoded_without(snapshot, user, list(targets)):
        rows = targets[source]
        history = user.history.without(_place(user, source))
        less = build_memory(snapshot, history, user.at, encoded=encoded)
        less = replace(less, collapsed=user.collapsed)
        totals = score(snapshot, less, np.asarray(rows, dtype=np.int64), options).total.tolist()
        found |= {(source, row): total for row, total in zip(rows, totals, strict=True)}
    return found


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
    is_read = np.isin(places, source)  # of the others it knows nothing
    yield from ((each, encoded) for each, read in zip(sources, is_read, strict=True) if not read)
    left = len(source) - 1
    if left < 1 or not is_read.any():
        yield from ((each, None) for each, read in zip(sources, is_read, strict=True) if read)
        return
    start = window_start(before + left, snapshot.model.config.window) - before
    if start != encoded.first_item - before:
        events = encoder_inputs(snapshot, user.history, source[start:], rows[start:])
        times = torch.from_numpy(user.history.timestamps[source[start:]])
        cache = encoder.append(encoder.empty_cache(), events, times)
        encoded = EncodedHistory(start + before, events, cache)
    # One event more than the window that is left: without an earlier event, its first one is past,
    # whichever event that is.
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
    return source if source < 0 or user.collapsed is None else source - user.collapsed.items.count


# slopes of the encoder ------------------------------------------------------------------


def encoder_slopes(
    snapshot: Snapshot,
    user: UserMemory,
    targets: Tensor,
    options: AttentionOptions,
    *,
    partial: PartialSoftmax | None = None,
) -> Tensor:
    """Differentiate scores by gates on the encoder's events, [L, n].

    Row j of the attention itself is not gated: without it the score is known in closed form.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory`, with an encoded history of n events.
        targets: item rows, int64 [L].
        options: as in `score`; the temperature counts.
        partial: of a history of very many items, the targets' attention as `score` returned it,
            [H, L].

    Raises:
        ValueError: for a memory without an encoded history, or very many items without `partial`.
    """
    encoded, model = user.encoded, snapshot.model
    if encoded is None or model.encoder is None or model.state_attention is None:
        raise ValueError("user: has no encoded history")
    older = None
    with at_request(user):
        block, own = known_rows(user), user.rows
        if user.collapsed is not None and block.bias.shape[1] > len(own):
            own = torch.cat([own, torch.from_numpy(user.collapsed.items.items)])
        seen = exclude_self(targets, own) if options.exclude_self else None
        retrieved = retrieve_user(snapshot, user, targets, options)
        if retrieved is not None:
            seen = as_mask(retrieved, len(own))
        if not is_known(user):
            if partial is None:
                raise ValueError("partial: must be given for a history of very many items")
            # To first order this is one row, whose context and mass do not depend on the query.
            query = target_queries(snapshot, user, targets)
            near = attend_near(query, block._replace(visible=seen), options)
            older = remove_partial(partial, near)
    attention = model.state_attention
    counts = target_counts(snapshot, user, targets, again=not options.exclude_self)
    # What requests compute cannot be differentiated through; copies can.
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
        found = attend(queries, keys, values, bias=bias, temperature=options.temperature)
        context = found.context
        if older is not None:
            context = context + found.weights[..., -1:] * older.context.clone()
        totals = (context * gather_rows(snapshot.tables.outputs, targets).clone()).sum((0, 2))
        user_state = user.user_state.clone() + change[-1]
        totals = totals + model.transition_scores(user_state, counts.clone())
        slopes = list[Tensor]()
        for total in totals:
            checkpoint()
            slopes += torch.autograd.grad(total, gates, retain_graph=True)
    return torch.stack(slopes)


# estimates ------------------------------------------------------------------------------

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
