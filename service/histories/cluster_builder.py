"""Clusters of collapsed histories, built on a thread of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from models.catalogue.snapshot import Snapshot
from models.history.collapsed_history import CollapsedHistory

_log = logging.getLogger(__name__)


class ClusterBuilder:
    """Builds clusters beside requests, which attend item by item until they are there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._building: set[str] = set()
        self._worker = ThreadPoolExecutor(
            1, "heed-clusters", initializer=torch.set_num_threads, initargs=(1,)
        )

    @property
    def pending(self) -> int:
        """Number of users whose clusters are being built or waited for."""
        return len(self._building)

    def submit(
        self,
        user_id: str,
        snapshot: Snapshot,
        collapsed: CollapsedHistory,
        on_built: Callable[[], object],
    ) -> None:
        """Build the clusters of a user's history, unless that is under way, and call `on_built`."""

        def build() -> None:
            try:
                collapsed.adopt_clusters(*collapsed.build_clusters(snapshot))
                on_built()
            except Exception:  # noqa: BLE001 - without clusters every item is attended
                _log.exception("a long history is attended item by item")
            finally:
                with self._lock:
                    self._building.discard(user_id)

        with self._lock:
            if user_id not in self._building:
                self._building.add(user_id)
                self._worker.submit(build)

    def close(self) -> None:
        """Build no more; what is being built is waited for."""
        self._worker.shutdown(cancel_futures=True)
