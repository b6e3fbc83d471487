"""Leave-one-out scores: the whole model without one event, the history encoder included.

A history without the event is made into a memory and scored as any other. Only the encoder reuses
its cache: events before the missing one are encoded as they were, and histories that lack events
near to each other are encoded in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.data.windows import window_start
from models.history.encoded_history import EncodedHistory, encoder_inputs, without_each
from models.history.user_history import attendable_events
from models.history.user_memory import UserMemory, build_memory
from models.ranking.scoring import score

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
