"""Sizes and counts of a store that operators watch."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class StoreMeasures(NamedTuple):
    """Sizes of the store, and counts of this process since it opened the store."""

    database_bytes: int
    log_bytes: int  # of the write-ahead log; it keeps its size after a checkpoint
    log_pages: int  # written by this process since it last copied the log into the database
    queued_rows: int  # accepted and not yet committed
    commits: int
    checkpoints: int
    failures: int  # calls that failed for a reason other than their arguments
    failed: bool  # True once nothing is written any more until the store is opened anew


class MeasuredStore(Protocol):
    """The part of a store that is measured."""

    def measures(self) -> StoreMeasures:
        """Return sizes and counts as of now, without waiting for anything."""
        ...
