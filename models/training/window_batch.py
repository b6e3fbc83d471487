"""Batches of training windows: inputs, targets, request times, weights, and transition counts.

Transitions are counted leave-one-out: each user's own pairs are subtracted while training on them.
A model that sees its own targets counted learns to trust counts that a request will not have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions
from models.data.vocabulary import expand_ranges, user_item_keys
from models.data.windows import pad_windows
from models.encoder.history_encoder import NO_REQUEST_TIME
from models.recommender.co_occurrence import MAX_PAIR_DISTANCE, TransitionCounts, sum_pairs
from models.recommender.recent_popularity import DAY
from models.training.log_profile import first_interactions, has_repeat_consumption, target_weights


class HeldOutTransitions:
    """Transition counts at every position of a window, without the window's own user."""

    def __init__(self, counts: TransitionCounts, log: Interactions) -> None:
        self._items, self._counts, self._window = counts.items.long(), counts.counts, counts.window
        n = max(log.n_items, 1)
        # Dense codes of (user, item), so that pairs of them fit an integer in any log.
        held: NDArray[np.int64]
        sources: NDArray[np.int64]
        held, sources = np.unique(user_item_keys(log.users, log.items, n), return_inverse=True)
        keys, sums = sum_pairs(
            log, sources, np.arange(len(log)), MAX_PAIR_DISTANCE, counts.window.power
        )
        source, self._own_items = np.divmod(keys, n)
        self._own_counts = (
            sums.astype(np.float32) * counts.window.item_weights(log)[held[source] % n]
        )
        self._begin = np.searchsorted(source, sources, "left")  # [E]
        self._lengths = np.searchsorted(source, sources, "right") - self._begin

    def log_counts(
        self, items: Tensor, events: NDArray[np.int64], column: Tensor | None, width: int
    ) -> Tensor:
        """Return log(1 + 2F) at each position, [B, L, width].

        items [B, L] are item rows, events [B, L] their rows in the log. `column` int64 [N + 1] is
        the column of each item, `width` if it has none; None if an item's column is its row.
        """
        batch, length = items.shape
        flat = items.reshape(-1)
        total = self._counts.new_zeros(batch * length, width + 1)
        columns = self._items[flat]
        # The pairs that start at each event's item in its user's history: no item comes twice.
        starts = events.reshape(-1)
        place, pairs = expand_ranges(self._begin[starts], self._lengths[starts])
        index, own, counts = (
            torch.from_numpy(part).to(items.device)
            for part in (place, self._own_items[pairs], self._own_counts[pairs])
        )
        if column is not None:
            columns, own = column[columns], column[own]
        # A row has duplicates in the last, unread column only, so nothing needs adding up.
        total.scatter_(1, columns, self._counts[flat])
        entries, at = total.view(-1), index * (width + 1) + own
        counted = entries[at]  # 0 for a pair outside the table
        entries[at] = counted - torch.minimum(counted, counts)
        total = self._decayed_sum(total.view(batch, length, width + 1))
        return total[:, :, :width].mul_(2).log1p_()

    def _decayed_sum(self, x: Tensor) -> Tensor:
        """Sum x [B, L, W] over each position's window with decaying weights; overwrites x."""
        decay, depth = self._window.decay, self._window.depth
        if decay == 1:
            return _window_sum(x, depth)
        doubled, reach = torch.empty_like(x), 1
        while reach < min(depth, x.shape[1]):  # sums over 1, 2, 4, 8 positions
            doubled[:, :reach] = x[:, :reach]
            torch.add(x[:, reach:], x[:, :-reach], alpha=decay, out=doubled[:, reach:])
            x, doubled, reach, decay = doubled, x, 2 * reach, decay * decay
        return x


def log_repeat_counts(columns: Tensor, liked: Tensor, width: int, depth: int) -> Tensor:
    """Return log(1 + the user's own count) of each column at each position, [B, L, width].

    columns int64 [B, L], `width` for an item without a column; liked [B, L], 0 for dislikes, else
    1; the `depth` newest positions count.
    """
    counts = liked.new_zeros(*columns.shape, width + 1)
    counts.scatter_(2, columns[..., None], liked[..., None])
    return _window_sum(counts, depth)[:, :, :width].log1p_()


def _window_sum(x: Tensor, depth: int) -> Tensor:
    """Sum x [B, L, W] over each position and the depth - 1 before it."""
    total = x.cumsum(1)
    if depth < x.shape[1]:
        older = total[:, :-depth].clone()
        total[:, depth:].sub_(older).clamp_(min=0)  # rounding may leave a negative rest
    return total


# Recent popularity is up to this much older than its target: a model is served for a while after
# its training.
MAX_POPULARITY_AGE = 14 * DAY
_ALL_STATELESS = 0.2  # of the windows with rows without states, the share without any state


class WindowBatch(NamedTuple):
    """Windows as inputs and targets: B windows, L inputs each."""

    inputs: Tensor  # int64 [B, L] item rows
    targets: Tensor  # int64 [B, L]
    timestamps: Tensor  # int64 [B, L] of the inputs
    request_times: Tensor  # int64 [B, L] times of the targets, or NO_REQUEST_TIME
    log_weights: Tensor  # [B, L] of the inputs
    types: Tensor  # int64 [B, L] of the inputs
    target_weights: Tensor  # [B, L] weight in the loss; 0 in the padding and for dislikes
    valid: Tensor  # bool [B, L], False in the padding and for targets without visible inputs
    events: NDArray[np.int64]  # [B, L] rows of the inputs in the log
    popularity_times: Tensor  # int64 [B, L] time of the recent popularity of each target
    newest_visible: Tensor | None  # int64 [B, L] newest input a target may see; None = its own

    def visible_state(self, x: Tensor, windows: slice = slice(None)) -> Tensor:
        """Gather x [b, L, ...] of some windows at the newest input that each target may see."""
        if self.newest_visible is None:
            return x
        return x[torch.arange(len(x))[:, None], self.newest_visible[windows]]

    def newest_inputs(self, windows: slice = slice(None)) -> Tensor:
        """The newest input that each target may see, [L], or [b, L] of some windows."""
        if self.newest_visible is None:
            return torch.arange(self.inputs.shape[1])
        return self.newest_visible[windows]


class WindowBatches:
    def __init__(
        self,
        log: Interactions,
        device: torch.device,
        *,
        next_basket: bool,
        exclude_seen: bool,
        request_time_share: float,
    ) -> None:
        """Weigh the targets of a log.

        `next_basket` hides the events of a target's own time from it. With `exclude_seen`, seen
        items are never recommended, so they are no targets either. In `request_time_share` of the
        windows request times are the targets' times.
        """
        self._log, self._device = log, device
        self._next_basket, self._request_time_share = next_basket, request_time_share
        weights = target_weights(log)
        if exclude_seen and has_repeat_consumption(log):
            weights *= first_interactions(log)
        self._target_weights = torch.from_numpy(weights).to(device)

    def batch(self, windows: NDArray[np.int64]) -> WindowBatch:
        """Build the batch of windows (first event, end) [B, 2]."""
        padded = pad_windows(self._log, windows[:, 0], windows[:, 1])
        items, times = self._to_device(padded.items), self._to_device(padded.timestamps)
        with_time = torch.rand(len(windows), 1) < self._request_time_share
        position = torch.arange(items.shape[1] - 1)
        valid = position < self._to_device(padded.lengths - 1)[:, None]
        newest_visible, popularity_times = None, times[:, 1:]
        if self._next_basket:
            age = (torch.rand(len(windows), 1) * MAX_POPULARITY_AGE).long()
            popularity_times = popularity_times - age
            before = torch.searchsorted(times[:, :-1].contiguous(), times[:, 1:].contiguous())
            valid = valid & (before > 0)
            newest_visible = (before - 1).clamp(min=0)
        return WindowBatch(
            inputs=items[:, :-1].contiguous(),
            targets=items[:, 1:].contiguous(),
            timestamps=times[:, :-1].contiguous(),
            request_times=torch.where(with_time, times[:, 1:], NO_REQUEST_TIME),
            log_weights=self._to_device(np.log(padded.weights[:, :-1])),
            types=self._to_device(padded.types[:, :-1]),
            target_weights=self._target_weights[self._to_device(padded.events[:, 1:])] * valid,
            valid=valid,
            events=padded.events[:, :-1],
            popularity_times=popularity_times,
            newest_visible=newest_visible,
        )

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def draw_stateless_rows(windows: int, length: int, share: float) -> Tensor:
    """Draw how many of the oldest of `length` rows have no state, int64 [windows, 1].

    That is 0 but for a share of the windows, whose older rows are then as the events that are older
    than the encoder's window; and some windows have no state at all, as a profile without events.
    """
    has_stateless, all_stateless = torch.rand(2, windows, 1).unbind()
    rows = (torch.rand(windows, 1) * length).long()
    rows = torch.where(all_stateless < _ALL_STATELESS, length, rows)
    return rows * (has_stateless < share)
