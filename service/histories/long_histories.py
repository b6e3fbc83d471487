"""The older events of long histories, put together once and kept: a cache bounded by bytes."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from models.catalogue.snapshot import Snapshot
from models.history.collapsed_history import CollapsedHistory, collapsible_events
from service.histories.request_history import RequestHistory

_log = logging.getLogger(__name__)

LONG = 4_096  # events: of fewer, attending each takes less time than keeping them together


def collapse_history(snapshot: Snapshot, asked: RequestHistory, at: int) -> CollapsedHistory | None:
    """The older events of a history; None where it is not long, or not all that is stored."""
    if asked.version is None or len(asked.history.rows) < LONG or asked.history.vectors:
        return None
    count = collapsible_events(len(asked.history.rows), snapshot.model.config.window)
    return CollapsedHistory(snapshot, asked.history, count, at)


class LongHistories:
    """Collapsed histories by user; their clusters are built on a thread of their own.

    As with `Encodings`, any of it may be dropped at any time without changing an answer: an entry
    serves a history only where it was made of a beginning of it and of the same items.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[int, CollapsedHistory]] = OrderedDict()  # with the epoch
        self._making: dict[str, Future[None]] = {}
        self._maker = ThreadPoolExecutor(
            1, "heed-cells", initializer=torch.set_num_threads, initargs=(1,)
        )

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        with self._lock:
            return sum(older.nbytes for _, older in self._kept.values())

    @property
    def making(self) -> int:
        """How many users' cells are being made or waited for."""
        return len(self._making)

    def of(self, snapshot: Snapshot, asked: RequestHistory, at: int) -> CollapsedHistory | None:
        """The older events of a history; None where it is not long, or not all that is stored.

        Whoever uses it holds its lock, from before the newer events are remembered until the last
        answer is made of both: others may let it grow.
        """
        past, whole = asked.history, asked.version
        if whole is None or len(past.rows) < LONG or past.vectors:
            return None
        count = collapsible_events(len(past.rows), snapshot.model.config.window)
        with self._lock:
            epoch, older = self._kept.get(whole.user_id, (0, None))
        if older is not None:
            with older.lock:
                if epoch != whole.epoch or not older.rebind(snapshot):
                    older = None
                elif older.count < count:
                    older.advance_to(at)
                    older.extend(snapshot, past, count)
                elif older.count <= len(past.rows):
                    older.history = past  # what was before the last event may be let go of
        older = collapse_history(snapshot, asked, at) if older is None else older
        if older is None:
            return None
        with self._lock:
            self._kept[whole.user_id] = (whole.epoch, older)
            self._kept.move_to_end(whole.user_id)
            held = sum(each.nbytes for _, each in self._kept.values())
            while held > self._max_bytes and self._kept:
                _, (_, dropped) = self._kept.popitem(last=False)
                held -= dropped.nbytes
            if older.needs_clusters and whole.user_id not in self._making:
                work = self._maker.submit(self._make, whole.user_id, snapshot, older)
                self._making[whole.user_id] = work
        return older

    def settle(self) -> None:
        """Wait until no cells are being made."""
        for work in list(self._making.values()):
            work.result()

    def close(self) -> None:
        """Make no more; what is being made is waited for."""
        self._maker.shutdown(cancel_futures=True)

    def _make(self, user_id: str, snapshot: Snapshot, collapsed: CollapsedHistory) -> None:
        try:
            collapsed.adopt_clusters(*collapsed.build_clusters(snapshot))
        except Exception:  # noqa: BLE001 - without cells every row is attended
            _log.exception("the history of %r is attended event by event", user_id)
        finally:
            with self._lock:
                self._making.pop(user_id, None)
