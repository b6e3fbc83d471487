"""Digest of the logical content of a store, by which two stores are compared."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from service.domain.records import Event, Vector
from service.domain.scenarios import Scenario
from service.stores.base import Store

_BYTES = 16  # of the digest of a record, and of a table
_MODULUS = 1 << 8 * _BYTES
_PAGE = 1_000  # scenarios read at once


class TableDigest(NamedTuple):
    """Number of the records of one kind, and the digest of all of them."""

    records: int
    digest: str  # hex


async def digest_store(store: Store) -> Mapping[str, TableDigest]:
    """Return the digests of `events`, `items`, `users`, `profiles`, `scenarios` and `imports`.

    They depend on the records alone, not on their order, on versions of users or on how a store
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
    digests["scenarios"] = _digest([_scenario(each) for each in await _scenarios(store)])
    imports = await store.imports()
    digests["imports"] = _digest([_record(each._asdict()) for each in imports])
    return digests


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


def _scenario(scenario: Scenario) -> bytes:
    return _record(_fields(scenario))


async def _scenarios(store: Store) -> list[Scenario]:
    """Return all versions of all scenarios that have a version in use."""
    found: list[Scenario] = []
    cursor: str | None = None
    while True:
        page, cursor = await store.page_scenarios(cursor=cursor, limit=_PAGE)
        for scenario in page:
            found += await _versions(store, scenario.name)
        if cursor is None:
            return found


async def _versions(store: Store, name: str) -> list[Scenario]:
    found: list[Scenario] = []
    cursor: str | None = None
    while True:
        page, cursor = await store.page_scenario_versions(name, cursor=cursor, limit=_PAGE)
        found += page
        if cursor is None:
            return found
