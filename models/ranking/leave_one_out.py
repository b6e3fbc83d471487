"""Leave-one-out scores: the whole model without one event, the history encoder included.

A history without the event is made into a memory and scored as any other. Only the encoder reuses
its cache: events before the missing one are encoded as they were, and histories that lack events
near to each other are encoded in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.catalogue.snapshot import Snapshot
from models.data.windows import window_start
from models.encoder.history_encoder import HistoryEncoder
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.user_memory import (
    EncodedHistory,
    UserMemory,
    attendable_events,
    build_memory,
    encoder_inputs,
)
from models.ranking.scoring import score
from models.recommender.recommender import Recommender

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
    summaries = _summaries(snapshot, user, list(targets))
    for (source, rows), summary in zip(targets.items(), summaries, strict=True):
        less = build_memory(
            snapshot, user.history.without(_place(user, source)), user.at, user_state=summary
        )
        less = replace(less, collapsed=user.collapsed)
        totals = score(snapshot, less, np.asarray(rows, dtype=np.int64), options).total.tolist()
        found |= {(source, row): total for row, total in zip(rows, totals, strict=True)}
    return found


def _summaries(snapshot: Snapshot, user: UserMemory, sources: Sequence[int]) -> Tensor:
    """Return h_u [J, dim] of the history without each of the sources [J]."""
    summaries = user.user_state.repeat(len(sources), 1)
    model, encoded = snapshot.model, user.encoded
    encoder = model.encoder
    if encoder is None or encoded is None:
        return summaries
    before = user.history.before
    asked = np.array([_place(user, source) for source in sources])
    source, rows = attendable_events(snapshot, user.history)
    source, rows = source[(rows >= 0).numpy()], rows[rows >= 0]  # what the encoder may read
    read = np.flatnonzero(np.isin(asked, source))  # of the others it knows nothing
    if not len(read):
        return summaries
    places = np.searchsorted(source, asked[read])
    left = len(source) - 1
    if left < 1:
        summaries[read] = 0
        return summaries
    start = window_start(before + left, model.config.window) - before
    if start != encoded.first_item - before:
        events = encoder_inputs(snapshot, user.history, source[start:], rows[start:])
        times = torch.from_numpy(user.history.timestamps[source[start:]])
        encoded = EncodedHistory(
            start + before, events, encoder.append(encoder.empty_cache(), events, times)
        )
    # One event more than the window that is left: without an earlier event, its first one is past.
    gone, row = np.unique(np.maximum(places - start, 0), return_inverse=True)
    parts = np.split(gone, np.flatnonzero(np.diff(gone // _NEAR)) + 1)
    each = torch.cat([_summaries_of(model, encoder, encoded, part, user.at) for part in parts])
    summaries[read] = each[row]
    return summaries


def _place(user: UserMemory, source: int) -> int:
    """Return the place of a source in `user.history`, which has a long history's newest events."""
    return source if source < 0 or user.collapsed is None else source - user.collapsed.count


def _summaries_of(
    model: Recommender,
    encoder: HistoryEncoder,
    read: EncodedHistory,
    gone: NDArray[np.int64],
    at: int,
) -> Tensor:
    """Return h_u [G, dim] of the encoded history without each of the ascending places [G]."""
    shared = min(int(gone[0]), len(read.events) - 2)  # so that something follows
    after = torch.arange(shared, len(read.events)).expand(len(gone), -1)
    after = after[after != torch.from_numpy(gone)[:, None]].view(len(gone), -1)  # (G, n)
    times = read.state.timestamps[after]
    asked = model.clamp_request_time(torch.tensor(at), times[:, -1])
    return encoder.branch(read.state, shared, read.events[after], times, asked)
