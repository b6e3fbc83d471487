"""Copy of a store to another, in SQLite or PostgreSQL: export all, import all, compare digests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import NamedTuple

from service.domain.errors import Conflict
from service.stores.base import Store
from service.stores.records.copying import BulkAccess
from service.stores.store_digest import TableDigest, digest_store, read_ledger, read_scenarios
from service.stores.values import MAX_ITEMS, Registers, StoredItem, StoredUser

EVENTS = 20_000  # read at once, and written in one transaction
NAMES = 10_000  # of items, or entries of the ledger, in one transaction

# Called with the stage, and what is done of all; all is 0 if it is not known.
CopyProgress = Callable[[str, int, int], None]


class ComparedTable(NamedTuple):
    """One table of two stores."""

    name: str
    source: TableDigest
    target: TableDigest

    @property
    def is_same(self) -> bool:
        return self.source == self.target


class StoreCopy(NamedTuple):
    """Users and events that were copied, and the tables of both stores at the end."""

    users: int
    events: int
    tables: list[ComparedTable]

    @property
    def differing(self) -> list[str]:
        return [table.name for table in self.tables if not table.is_same]


async def compare_stores(source: Store, target: Store) -> list[ComparedTable]:
    """Return the digests of all tables of both stores, each read whole.

    A table also differs if the target's own counter does not match its records.
    """
    ours, theirs = await asyncio.gather(digest_store(source), digest_store(target))
    counts = await target.counts()
    return [
        ComparedTable(
            name,
            digest,
            theirs[name]._replace(records=counts.get(name, theirs[name].records)),
        )
        for name, digest in ours.items()
    ]


async def begin_copy(target: Store, origin: str) -> str | None:
    """Mark the target as an unfinished copy; return the last user written, None if it is whole.

    The target is an empty store, or a copy of `origin`, the recorded identity of the source, that
    was not changed since.

    Raises:
        Conflict: the target has data that are not of a copy from this source.
    """
    bulk = target.bulk()
    record = await bulk.copy_record()
    if record is None:
        registers = (await _read_registers(target))._asdict()
        counts = await target.counts() | {name: len(rows) for name, rows in registers.items()}
        held = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        if held:
            raise Conflict(f"the target is not empty, and no copy: it holds {held}")
        await bulk.begin_copy(origin)
        return ""
    if record.origin != origin:
        raise Conflict(f"the target is a copy of another store, {record.origin}")
    if not record.is_untouched:
        raise Conflict(
            "the target was changed since it was copied to, and is a store of its own now: "
            "copy to an empty place"
        )
    return None if record.is_whole else record.position


async def copy_store(
    source: Store,
    target: Store,
    origin: str,
    *,
    progress: CopyProgress = lambda _stage, _done, _total: None,
) -> StoreCopy:
    """Copy everything that a store holds, and compare the two.

    Keys come first, so that no copy is ever served without them; then scenarios, imports and the
    ledger; then items in the order of the catalogue; then users with their events, in the order of
    their ids. Each transaction records the position, from which the next call goes on if this one
    is killed. Until source and target are the same, only a copy opens the target.

    The source is only read; writes to it meanwhile make the stores differ. `target` and `origin`
    are as of `begin_copy`.

    Raises:
        Conflict: the target has data that are not of a copy from this source, or is changed by
            something else meanwhile.
    """
    position = await begin_copy(target, origin)
    users = events = 0
    ours, theirs = source.bulk(), target.bulk()
    await theirs.copy_record()  # it notes the last change
    if position is not None:
        progress("keys, scenarios, imports and the ledger", 0, 0)
        await _copy_registers(source, target, theirs)
        await _copy_items(ours, theirs, progress)
        total = (await source.counts())["events"]
        if position:
            total = max(0, total - (await target.counts())["events"])
        async with aclosing(_pages(ours, position)) as pages:
            async for page in pages:
                await theirs.put_users(page, page[-1].user_id)
                users, events = users + len(page), events + sum(len(user.events) for user in page)
                progress("events", events, total)
        await theirs.finish_copy()
    progress("comparing", 0, 0)
    result = StoreCopy(users, events, await compare_stores(source, target))
    if position is not None and not result.differing:
        await theirs.mark_copy(is_whole=True)
    return result


async def _read_registers(store: Store) -> Registers:
    scenarios = [
        version
        for deleted in (False, True)
        for version in await read_scenarios(store, deleted=deleted)
    ]
    return Registers(await store.imports(), scenarios, await store.keys(), await read_ledger(store))


async def _copy_registers(source: Store, target: Store, bulk: BulkAccess) -> None:
    ours, theirs = await _read_registers(source), await _read_registers(target)
    entries = sorted(set(ours.forgotten) - set(theirs.forgotten))
    missing = Registers(
        [each for each in ours.imports if each not in theirs.imports],
        [each for each in ours.scenarios if each not in theirs.scenarios],
        [each for each in ours.keys if each not in theirs.keys],
        entries[:NAMES],
    )
    if any(missing):
        await bulk.put_registers(missing)
    for start in range(NAMES, len(entries), NAMES):
        await bulk.put_registers(Registers([], [], [], entries[start : start + NAMES]))


async def _copy_items(source: BulkAccess, target: BulkAccess, progress: CopyProgress) -> None:
    """Copy names in the order of arrival, then the catalogue in the order of its changes.

    Both orders number items, and so decide what comes first of equals.
    """
    after = 0
    while names := await source.item_names(after, NAMES):
        after = names[-1][0]
        await target.add_item_names([name for _, name in names])
    unused = await source.noted_item_names()
    for start in range(0, len(unused), NAMES):
        await target.discard_item_names(unused[start : start + NAMES])
    ids = [
        item_id for _, item_id in sorted([(it.place, it.item_id) async for it in _items(source)])
    ]
    progress("items", 0, len(ids))
    for start in range(0, len(ids), MAX_ITEMS):
        items = await source.find_items(ids[start : start + MAX_ITEMS])
        await target.put_items(sorted(items, key=lambda item: item.place))
        progress("items", start + len(items), len(ids))


async def _items(store: BulkAccess) -> AsyncIterator[StoredItem]:
    after = ""
    while page := await store.items(after, MAX_ITEMS):
        after = page[-1].item_id
        for item in page:
            if item.was_put or item.replaced:
                yield item


async def _pages(store: BulkAccess, after: str) -> AsyncGenerator[list[StoredUser], None]:
    """Iterate over users by pages; the next page is read meanwhile."""
    reading = asyncio.ensure_future(store.users(after, EVENTS))
    try:
        while page := await reading:
            reading = asyncio.ensure_future(store.users(page[-1].user_id, EVENTS))
            yield page
    finally:
        await asyncio.gather(reading, return_exceptions=True)
