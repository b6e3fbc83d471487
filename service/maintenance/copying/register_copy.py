"""Copying of imports, scenarios, API keys and the ledger of forgotten users."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from service.domain.errors import Conflict
from service.stores.base import Store
from service.stores.records.copying import BulkAccess
from service.stores.store_digest import read_ledger, read_scenarios
from service.stores.values import Registers

T = TypeVar("T")

_ENTRIES = 10_000  # of the ledger, in one transaction


async def read_registers(store: Store) -> Registers:
    """Return the records of a store."""
    scenarios = [
        version
        for deleted in (False, True)
        for version in await read_scenarios(store, deleted=deleted)
    ]
    return Registers(await store.imports(), scenarios, await store.keys(), await read_ledger(store))


async def copy_registers(source: Store, target: Store, bulk: BulkAccess) -> None:
    """Insert the records that the target lacks, and change those that have changed.

    Args:
        source: the store that is copied.
        target: the store that is copied to.
        bulk: access to `target`.

    Raises:
        Conflict: the target has a record that the source does not have.
    """
    ours, theirs = await read_registers(source), await read_registers(target)
    changed = Registers(
        _changed(
            "an import",
            ours.imports,
            theirs.imports,
            key=lambda each: each.import_id,
            fixed=lambda each: each._replace(is_undone=False),
        ),
        _changed(
            "a version of a scenario",
            ours.scenarios,
            theirs.scenarios,
            key=lambda each: (each.name, each.version),
            fixed=lambda each: each,
        ),
        _changed(
            "an API key",
            ours.keys,
            theirs.keys,
            key=lambda each: each.key_id,
            fixed=lambda each: replace(each, revoked=None),
        ),
        _changed(
            "a forgotten user",
            ours.forgotten,
            theirs.forgotten,
            key=lambda each: each,
            fixed=lambda each: each,
        ),
    )
    entries = changed.forgotten
    if any(changed):
        await bulk.put_registers(changed._replace(forgotten=entries[:_ENTRIES]))
    for start in range(_ENTRIES, len(entries), _ENTRIES):
        await bulk.put_registers(Registers([], [], [], entries[start : start + _ENTRIES]))


def _changed(
    what: str,
    ours: Sequence[T],
    theirs: Sequence[T],
    *,
    key: Callable[[T], Hashable],
    fixed: Callable[[T], Any],
) -> list[T]:
    """Return our records that they do not have just so.

    Args:
        what: such a record, with an article.
        ours: of the source.
        theirs: of the target.
        key: identifies a record.
        fixed: what of a record never changes.

    Raises:
        Conflict: they have a record of another key, or another one of the same key.
    """
    known = {key(each): each for each in theirs}
    by_key = {key(each): each for each in ours}
    for found, record in known.items():
        if found not in by_key or fixed(by_key[found]) != fixed(record):
            raise Conflict(f"the target has {what} that the source does not have: it is no copy")
    return [each for each in ours if known.get(key(each)) != each]
