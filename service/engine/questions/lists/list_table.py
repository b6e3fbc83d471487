"""The output file of a run over all users, made of its progress when all lists are computed."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import NamedTuple

from models.compute.progress import ProgressCallback
from service.datasets.tables import open_table
from service.engine.questions.lists.list_progress import ListProgress
from service.stores.base import Store
from service.stores.values import user_digest

_COLUMNS = {"user_id": str, "rank": int, "item_id": str, "score": float}
_ROWS = 20_000  # written at a time: a row group of Parquet
_PAGE = 1_000  # entries of the ledger read at once


class TableCounts(NamedTuple):
    """Counts of what a table holds."""

    users: int  # those without rows included
    rows: int


async def write_table(
    path: Path,
    lists: ListProgress,
    store: Store,
    users: Set[str],
    metadata: Mapping[str, str],
    *,
    progress: ProgressCallback,
) -> TableCounts:
    """Write the lists to a file, without those of users who were forgotten since the run began.

    A user who was forgotten and came back has no list: the one there is may be of what was
    forgotten. The file appears when it is complete and durable.

    Args:
        path: of the file, whose suffix selects the format.
        lists: by user id.
        store: that knows who was forgotten.
        users: that are stored now.
        metadata: of the file, where its format has any.
        progress: called with how many users are done, of how many.

    Raises what `service.datasets.tables.open_table` raises.
    """
    was_forgotten = await _forgotten_since(store, lists.run.begun)
    written = rows = done = 0
    with open_table(path, _COLUMNS, metadata) as write:
        waiting: list[tuple[str, int, str, float]] = []
        for batch in lists.batches():
            for user_id, item_ids, scores in batch.lists:
                if user_id not in users or was_forgotten(user_id):
                    continue
                listed = zip(item_ids, scores, strict=True)
                waiting += [(user_id, rank, *item) for rank, item in enumerate(listed, 1)]
                written, rows = written + 1, rows + len(item_ids)
                if len(waiting) >= _ROWS:
                    write(waiting)
                    waiting = []
            done += len(batch.lists)
            progress(done, lists.users)
            await asyncio.sleep(0)  # an interrupted command is cancelled here
        if waiting:
            write(waiting)
    return TableCounts(written, rows)


async def _forgotten_since(store: Store, since: int) -> Callable[[str], bool]:
    """Return the function that tells whether a user was forgotten at that time or later."""
    digests: defaultdict[bytes, set[bytes]] = defaultdict(set)  # by salt
    if await store.count_forgotten(since):
        cursor: str | None = None
        while True:
            page, cursor = await store.page_forgotten(cursor=cursor, limit=_PAGE)
            for entry in page:
                if entry.forgotten >= since:
                    digests[entry.salt].add(entry.digest)
            if cursor is None:
                break
    return lambda user_id: any(user_digest(salt, user_id) in digests[salt] for salt in digests)
