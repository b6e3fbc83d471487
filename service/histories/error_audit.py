"""The true errors of answers over clusters, from a sample that is computed again exactly."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.history.attention_options import AttentionOptions
from models.history.user_memory import UserMemory
from models.ranking.scoring import Scores, score

_log = logging.getLogger(__name__)

_TARGETS = 8  # of one answer that are computed again
_PENDING = 4  # answers at most that wait to be; no others are sampled meanwhile

ErrorObserver = Callable[[float, float], None]
"""Called with the true and the stated error of one target: relative, the largest of its heads."""


class ErrorAudit:
    """Samples answers and reports their errors, off the path of requests."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._free = threading.Semaphore(_PENDING)
        self._worker = ThreadPoolExecutor(
            1, "heed-error-audit", initializer=torch.set_num_threads, initargs=(1,)
        )
        self.observer: ErrorObserver | None = None

    def sample(
        self,
        snapshot: Snapshot,
        user: UserMemory,
        rows: NDArray[np.int32] | NDArray[np.int64],
        scores: Scores,
        options: AttentionOptions,
    ) -> None:
        """Perhaps compute an answer again, later. The arguments are those of its scores."""
        observer, error = self.observer, scores.relative_error
        if observer is None or error is None or not bool(error.any()):
            return
        if random.random() >= self._fraction or not self._free.acquire(blocking=False):
            return

        def compare() -> None:
            try:
                true = _true_errors(snapshot, user, rows[:_TARGETS], scores, options)
                for pair in zip(true, error.tolist(), strict=False):
                    observer(*pair)
            except Exception:  # noqa: BLE001 - no request waits for it
                _log.exception("an answer could not be compared with its exact one")
            finally:
                self._free.release()

        self._worker.submit(compare)

    def close(self) -> None:
        """Compare no more answers."""
        self._worker.shutdown(cancel_futures=True)


def _true_errors(
    snapshot: Snapshot,
    user: UserMemory,
    rows: NDArray[np.int32] | NDArray[np.int64],
    scores: Scores,
    options: AttentionOptions,
) -> list[float]:
    """The relative error of each of the first rows; [] where the history has been extended."""
    collapsed = user.collapsed
    if collapsed is None or scores.partial is None:
        return []
    with collapsed.lock:
        if collapsed.count != user.collapsed_count:
            return []  # its exact answer is another
        exact = score(snapshot, user, rows, replace(options, mode="exact")).partial
    if exact is None:
        return []
    found = scores.partial.context[:, : len(rows)]
    away = (found - exact.context).norm(dim=-1)
    errors: list[float] = (away / exact.context.norm(dim=-1).clamp(min=1e-30)).amax(0).tolist()
    return errors
