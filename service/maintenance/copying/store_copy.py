"""Copy of a store to another: resumable, and repeatable until both are the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from service.domain.errors import Conflict
from service.maintenance.copying.item_copy import copy_items
from service.maintenance.copying.register_copy import copy_registers, read_registers
from service.maintenance.copying.store_comparison import ComparedTable, compare_stores
from service.maintenance.copying.user_copy import CopiedUsers, copy_users
from service.stores.base import Store

# Called with the stage, and what is done of all; all is 0 where it is not known.
CopyProgress = Callable[[str, int, int], None]


class StoreCopy(NamedTuple):
    """A pass over a store: what it wrote, and the tables of both stores at its end."""

    users: CopiedUsers
    tables: list[ComparedTable]

    @property
    def differing(self) -> list[str]:
        """Names of the tables that differ."""
        return [table.name for table in self.tables if not table.is_same]


async def begin_copy(target: Store, origin: str) -> str:
    """Mark the target as an unfinished copy; return the position to go on from.

    Args:
        target: an empty store, or one that was copied to from this source and not changed since.
        origin: identity of the source, which is recorded in the target.

    Raises:
        Conflict: the target has data that are not of a copy from this source.
    """
    bulk = target.bulk()
    record = await bulk.copy_record()
    if record is None:
        await _check_empty(target)
        await bulk.begin_copy(origin)
        return ""
    if record.origin != origin:
        raise Conflict(f"the target is a copy of another store, {record.origin}")
    if not record.is_untouched:
        raise Conflict(
            "the target was changed since it was copied to, and is a store of its own now: "
            "copy to an empty place"
        )
    await bulk.mark_copy(is_whole=False)
    return record.position


async def copy_store(
    source: Store,
    target: Store,
    origin: str,
    *,
    progress: CopyProgress = lambda _stage, _done, _total: None,
) -> StoreCopy:
    """Bring the target to the state of the source, and compare the two.

    Keys come first, so that no copy is ever served without them; then scenarios, imports and the
    ledger; then items; then users with their events, in the order of their ids. Each transaction
    records the position, from which the next call goes on when one was killed. After a pass over
    all users, the next call compares all of them and writes those that differ. What is written to
    the source meanwhile is copied if it comes after the position, and by the next call otherwise.
    Until source and target are the same, only a copy opens the target.

    Args:
        source: is only read, each user as of one moment.
        target: as of `begin_copy`, as is `origin`.
        origin: identity of the source.
        progress: called as it proceeds.

    Raises:
        Conflict: the target has data that are not of a copy from this source, or is changed by
            something else meanwhile.
    """
    position = await begin_copy(target, origin)
    ours, theirs = source.bulk(), target.bulk()
    await theirs.copy_record()  # it notes the last change
    progress("keys, scenarios, imports and the ledger", 0, 0)
    await copy_registers(source, target, theirs)
    await copy_items(ours, theirs, partial(progress, "items"))
    total = (await source.counts())["events"]
    if position:
        total = max(0, total - (await target.counts())["events"])
    done = await copy_users(ours, theirs, position, lambda n: progress("events", n, total))
    await theirs.finish_copy()
    progress("comparing", 0, 0)
    result = StoreCopy(done, await compare_stores(source, target))
    if not result.differing:
        await theirs.mark_copy(is_whole=True)
    return result


async def _check_empty(target: Store) -> None:
    """Raise `Conflict` if the target holds anything."""
    registers = (await read_registers(target))._asdict()
    counts = await target.counts() | {name: len(records) for name, records in registers.items()}
    found = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    if found:
        raise Conflict(f"the target is not empty, and no copy: it holds {found}")
