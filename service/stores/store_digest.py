"""Digest of the logical content of a store, by which two stores are compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import orjson

from service.domain.keys import ApiKey
from service.domain.records import Event, Scenario, Vector
from service.stores.base import Store
from service.stores.values import ForgottenUser

_BYTES = 16  # of the digest of a record, and of a table
_MODULUS = 1 << 8 * _BYTES
_PAGE = 1_000  # scenarios, or entries of the ledger, read at once
T = TypeVar("T")


class TableDigest(NamedTuple):
    """Number of the records of one kind, and the digest of all of them."""

    records: int
    digest: str  # hex


async def digest_store(store: Store) -> Mapping[str, TableDigest]:
    """Return the digest of each table of a store.

    The tables are `events`, `items`, `users`, `profiles`, `scenarios` and `deleted_scenarios` (all
    versions, of those in use and of those deleted), `imports`, `keys` and `forgotten`, the ledger.
    They depend only on the records, not on their order, on versions of users or on how a store
    lays them out: two stores with the same content have the same digests, whatever holds them. The
    digest of a table is the sum of its records' BLAKE2b digests modulo 2^128. It finds damage and
    omissions; it is no defence against a forger.

    Reads the whole store, off the event loop. Each table is read in one transaction, but not all
    in the same one: of a store that is being written, the digests belong to several moments.
    """
    tables = {
        "events": map(_event, store.scan_events()),
        "items": (_vector_record(_fields(item), item.embedding) for item in store.scan_items()),
        "users": (user_id.encode() for user_id in store.scan_user_ids()),
        "profiles": (_record(_fields(user)) for user in store.scan_users()),
    }
    digests = {name: await asyncio.to_thread(_digest, rows) for name, rows in tables.items()}
    for name, deleted in (("scenarios", False), ("deleted_scenarios", True)):
        versions = await read_scenarios(store, deleted=deleted)
        digests[name] = _digest([_record(_fields(each)) for each in versions])
    imports = await store.imports()
    digests["imports"] = _digest([_record(each._asdict()) for each in imports])
    digests["keys"] = _digest([_key(each) for each in await store.keys()])
    digests["forgotten"] = _digest(
        [
            entry.digest + entry.salt + b"%d %d" % (entry.forgotten, entry.events)
            for entry in await read_ledger(store)
        ]
    )
    return digests


async def read_scenarios(store: Store, *, deleted: bool) -> list[Scenario]:
    """Return all versions of the scenarios that are in use, or of those that were deleted."""
    return [
        version
        async for scenario in _pages(partial(store.page_scenarios, deleted=deleted))
        async for version in _pages(partial(store.page_scenario_versions, scenario.name))
    ]


async def read_ledger(store: Store) -> list[ForgottenUser]:
    """Return all entries of the ledger of forgotten users."""
    return [entry async for entry in _pages(store.page_forgotten)]


def _fields(record: Any) -> dict[str, Any]:
    """Return the fields of a record with slots, without its vectors."""
    fields = {name: getattr(record, name) for name in record.__slots__}
    return {name: value for name, value in fields.items() if name != "embedding"}


def _digest(records: Iterable[bytes]) -> TableDigest:
    count = total = 0
    for record in records:
        count += 1
        total += int.from_bytes(blake2b(record, digest_size=_BYTES).digest(), "big")
    return TableDigest(count, f"{total % _MODULUS:0{2 * _BYTES}x}")


def _event(event: Event) -> bytes:
    body = [
        event.user_id,
        event.item_id,
        event.event_id,
        event.type,
        event.weight,
        event.timestamp,
        None if event.key is None else event.key.tobytes().hex(),
        None if event.value is None else event.value.tobytes().hex(),
    ]
    return orjson.dumps(body)


def _record(fields: Mapping[str, Any]) -> bytes:
    return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)


def _vector_record(fields: Mapping[str, Any], vector: Vector | None) -> bytes:
    return _record(fields) + (b"" if vector is None else vector.tobytes())


def _key(key: ApiKey) -> bytes:
    bound = None if key.rate is None else str(key.rate)
    fields = _fields(key) | {"scopes": sorted(key.scopes), "rate": bound}
    if not key.namespace_id:  # as in digests of earlier versions
        del fields["namespace_id"]
    return _record(fields | {"digest": key.digest.hex()})


async def _pages(
    page: Callable[..., Awaitable[tuple[list[T], str | None]]],
) -> AsyncIterator[T]:
    """Iterate over the records of all pages of a list."""
    cursor: str | None = None
    while True:
        found, cursor = await page(cursor=cursor, limit=_PAGE)
        for each in found:
            yield each
        if cursor is None:
            return
