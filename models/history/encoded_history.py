"""The encoder's states of a history, and of the same history without one of its events."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.catalogue.snapshot import Snapshot
from models.data.windows import window_start
from models.encoder.history_encoder import EncoderCache, HistoryEncoder
from models.history.user_history import UserHistory

_FEW = 2  # events that are appended one by one: of more, torch does all at once in less time


class EncodedHistory(NamedTuple):
    """Encoder states of a history, and their inputs, which tell where encoding can resume."""

    first_item: int  # number of the first event on an item that was read
    events: Tensor  # [n, dim] what was read of them: `Recommender.event_inputs`
    cache: EncoderCache  # with their states and timestamps

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.events.nbytes + self.cache.nbytes


def encode(
    snapshot: Snapshot,
    history: UserHistory,
    source: NDArray[np.int64],
    rows: Tensor,
    before: EncodedHistory | None,
) -> EncodedHistory | None:
    """Encode the newest events that can be attended; None without an encoder.

    Args:
        snapshot: the model and the catalogue.
        history: what the requester did.
        source: positions of the events that can be attended, from `attendable_events`.
        rows: their item rows.
        before: from an earlier call with the same model. Where it read a beginning of the same
            events, and the same inputs, only the rest is computed; else it is ignored.
    """
    encoder = snapshot.model.encoder
    if encoder is None:
        return None
    on_items = (rows >= 0).numpy()
    if not on_items.all():
        source, rows = source[on_items], rows[torch.from_numpy(on_items)]
    start = window_start(history.before + len(rows), snapshot.model.config.window)
    first = start - history.before
    events = encoder_inputs(snapshot, history, source[first:], rows[first:])
    times = torch.from_numpy(history.timestamps[source[first:]])
    cache, read = None, 0
    if before is not None and before.first_item == start and len(before.events) <= len(events):
        size = len(before.events)
        same = torch.equal(before.cache.timestamps, times[:size])
        if same and torch.equal(before.events, events[:size]):
            cache, read = before.cache, size
    if cache is None:
        cache = encoder.empty_cache()
    if snapshot.stepper is not None and 0 < len(events) - read <= _FEW:
        for event, time in zip(events[read:], times[read:].tolist(), strict=True):
            cache = snapshot.stepper.append(cache, event, time)
    else:
        cache = encoder.append(cache, events[read:], times[read:])
    return EncodedHistory(start, events, cache)


def encoder_inputs(
    snapshot: Snapshot, history: UserHistory, source: NDArray[np.int64], rows: Tensor
) -> Tensor:
    """The encoder's inputs for events on items, [n, dim], by their positions and item rows [n]."""
    vectors = torch.index_select(snapshot.tables.vectors, 0, rows)
    return snapshot.model.event_inputs(vectors, *types_and_log_weights(history, source))


def types_and_log_weights(history: UserHistory, source: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Types int64 and log weights of some events, [n] each."""
    types = torch.from_numpy(history.types[source].astype(np.int64))
    return types, torch.from_numpy(np.log(history.weights[source]))


def without_each(
    encoder: HistoryEncoder, encoded: EncodedHistory, gone: NDArray[np.int64]
) -> list[EncodedHistory]:
    """Return the encoded history without each of the ascending places [G], in one pass."""
    size = len(encoded.events)
    shared = min(int(gone[0]), size - 2)  # so that something follows
    after = torch.arange(shared, size).expand(len(gone), -1)
    after = after[after != torch.from_numpy(gone)[:, None]].view(len(gone), -1)  # (G, n)
    events = encoded.events[after]
    caches = encoder.branch(encoded.cache, shared, events, encoded.cache.timestamps[after])
    return [
        EncodedHistory(encoded.first_item, torch.cat([encoded.events[:shared], own]), cache)
        for own, cache in zip(events, caches, strict=True)
    ]
