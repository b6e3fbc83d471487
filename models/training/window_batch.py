"""Batches of training windows: inputs, targets, request times and target weights as tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions
from models.data.windows import pad_windows
from models.encoder.history_encoder import NO_REQUEST_TIME
from models.recommender.recent_popularity import DAY
from models.training.log_profile import first_interactions, has_repeat_consumption, target_weights

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
        """Return the newest input that each target may see, [L], or [b, L] of some windows."""
        if self.newest_visible is None:
            return torch.arange(self.inputs.shape[1])
        return self.newest_visible[windows]


class WindowBatches:
    """Makes batches from windows of one log."""

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

        Args:
            log: the training log.
            device: of the tensors.
            next_basket: hide the events of a target's own time from it.
            exclude_seen: seen items are never recommended, so they are no targets either.
            request_time_share: share of windows whose request times are their targets' times.
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
