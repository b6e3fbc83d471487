"""Work on long histories beside requests, on one thread: lists are built, answers are audited."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from models.catalogue.snapshot import Snapshot
from models.history.long_history import CollapsedHistory
from models.history.user_memory import UserMemory
from models.ranking.scoring import Scores

_log = logging.getLogger(__name__)
_TARGETS = 8  # of one answer that are computed again
_PENDING = 4  # answers at most that wait to be; no others are sampled meanwhile

ErrorObserver = Callable[[float, float], None]
"""Called with the true and the stated error of one target: relative, the largest of its heads."""


class LongWork:
    """Builds lists, without which every item is attended, and samples answers for their errors."""

    def __init__(self, audited: float) -> None:
        """Audit this fraction of the answers that lists gave."""
        self.observer: ErrorObserver | None = None
        self._audited, self._free = audited, threading.Semaphore(_PENDING)
        self._building: set[str] = set()
        self._worker = ThreadPoolExecutor(
            1, "heed-long-histories", initializer=torch.set_num_threads, initargs=(1,)
        )

    @property
    def pending(self) -> int:
        """Number of users whose lists are being built or waited for."""
        return len(self._building)

    def build(
        self,
        user_id: str,
        snapshot: Snapshot,
        collapsed: CollapsedHistory,
        on_built: Callable[[str], object],
    ) -> None:
        """Build the lists of a user's history, unless that is under way, and call `on_built`."""

        def work() -> None:
            collapsed.build_lists(snapshot)
            on_built(user_id)

        if user_id not in self._building:
            self._building.add(user_id)
            self._submit(work, lambda: self._building.discard(user_id))

    def audit(self, user: UserMemory, scores: Scores, again: Callable[[int], Scores]) -> None:
        """Perhaps compare scores, later, with those that `again` computes of the first targets."""
        is_listed = self.observer is not None and scores.relative_error is not None
        if is_listed and random.random() < self._audited and self._free.acquire(blocking=False):
            self._submit(partial(self._compare, user, scores, again), self._free.release)

    def close(self) -> None:
        """Begin no more work; what has begun is waited for."""
        self._worker.shutdown(cancel_futures=True)

    def _submit(self, work: Callable[[], None], finish: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            except Exception:  # noqa: BLE001 - no request waits for it
                _log.exception("work on a long history failed; answers do not depend on it")
            finally:
                finish()

        self._worker.submit(run)

    def _compare(self, user: UserMemory, scores: Scores, again: Callable[[int], Scores]) -> None:
        """Report the true and the stated error of targets, unless the history has been extended."""
        older, error = user.collapsed, scores.relative_error
        if older is None or error is None or scores.partial is None or self.observer is None:
            return
        with older.lock:
            if older.items.count != user.collapsed_count:
                return  # its exact answer is another
            exact = again(_TARGETS).partial
        if exact is not None:
            wanted = exact.context
            away = (scores.partial.context[:, : wanted.shape[1]] - wanted).norm(dim=-1)
            true = (away / wanted.norm(dim=-1).clamp(min=1e-30)).amax(0)
            for pair in zip(true.tolist(), error.tolist(), strict=False):
                self.observer(*pair)
