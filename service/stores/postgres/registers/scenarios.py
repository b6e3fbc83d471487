"""Scenarios of a PostgreSQL store: all their versions, of which the last is in use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from psycopg import AsyncConnection

from service.domain.errors import Conflict, Invalid
from service.domain.scenarios import Scenario
from service.stores.encoding import cursor_of, position_of
from service.stores.postgres.database.transaction import NamespaceTransaction

_COLUMNS = "SELECT name, version, written, document FROM heed.scenarios WHERE namespace_no = %s"
_IS_LATEST = """\
version = (SELECT max(version) FROM heed.scenarios AS later
            WHERE later.namespace_no = scenarios.namespace_no AND later.name = scenarios.name)"""


async def put(
    transaction: NamespaceTransaction, name: str, body: Mapping[str, Any], now: int
) -> Scenario:
    """`Store.put_scenario`, in a transaction that holds the lock of scenarios."""
    await _check_fallback(transaction, name, body.get("fallback"))
    last = await _last(transaction.connection, transaction.namespace_no, name)
    if last is not None and orjson.dumps(last.body) == orjson.dumps(body):
        return last
    return await _insert(transaction, name, last, now, body)


async def delete(transaction: NamespaceTransaction, name: str, now: int) -> bool:
    """`Store.delete_scenario`, in a transaction that holds the lock of scenarios."""
    last = await _last(transaction.connection, transaction.namespace_no, name)
    if last is None or last.body is None:
        return False
    user = await transaction.row(f"{_COLUMNS} AND fallback = %s AND {_IS_LATEST} LIMIT 1", name)
    if user is not None:
        raise Conflict(f"scenario {name!r} is the fallback of {user[0]!r}")
    await _insert(transaction, name, last, now, None)
    return True


async def current(connection: AsyncConnection, namespace_no: int, name: str) -> Scenario | None:
    """`Store.scenario`."""
    last = await _last(connection, namespace_no, name)
    return None if last is None or last.body is None else last


async def page(
    connection: AsyncConnection, namespace_no: int, cursor: str | None, limit: int
) -> tuple[list[Scenario], str | None]:
    """`Store.page_scenarios`."""
    (after,) = ("",) if cursor is None else position_of(cursor, str)
    found = await _scenarios(
        connection,
        f"{_COLUMNS} AND name > %s AND {_IS_LATEST} AND document IS NOT NULL"
        " ORDER BY name LIMIT %s",
        namespace_no,
        after,
        limit + 1,
    )
    return found[:limit], cursor_of(found[limit - 1].name) if len(found) > limit else None


async def versions(
    connection: AsyncConnection, namespace_no: int, name: str, cursor: str | None, limit: int
) -> tuple[list[Scenario], str | None]:
    """`Store.page_scenario_versions`."""
    (before,) = (1 << 31,) if cursor is None else position_of(cursor, int)
    found = await _scenarios(
        connection,
        f"{_COLUMNS} AND name = %s AND version < %s::bigint ORDER BY version DESC LIMIT %s",
        namespace_no,
        name,
        before,
        limit + 1,
    )
    return found[:limit], cursor_of(found[limit - 1].version) if len(found) > limit else None


async def _check_fallback(
    transaction: NamespaceTransaction, name: str, fallback: str | None
) -> None:
    """Raise `Invalid` for a fallback that is not stored, or that falls back to this scenario."""
    chain = [name]
    while fallback is not None:
        if fallback in chain:
            raise Invalid("/fallback", f"must not lead back: {' → '.join([*chain, fallback])}")
        found = await current(transaction.connection, transaction.namespace_no, fallback)
        if found is None:
            raise Invalid("/fallback", f"there is no scenario {fallback!r}")
        chain.append(fallback)
        fallback = found.fallback


async def _insert(
    transaction: NamespaceTransaction,
    name: str,
    last: Scenario | None,
    now: int,
    body: Mapping[str, Any] | None,
) -> Scenario:
    new = Scenario(name, 1 if last is None else last.version + 1, now, body)
    document = None if body is None else orjson.dumps(body)
    await transaction.execute(
        "INSERT INTO heed.scenarios (namespace_no, name, version, written, document, fallback)"
        " VALUES (%s, %s, %s, %s, %s, %s)",
        name,
        new.version,
        now,
        document,
        new.fallback,
    )
    return new


async def _last(connection: AsyncConnection, namespace_no: int, name: str) -> Scenario | None:
    found = await _scenarios(
        connection, f"{_COLUMNS} AND name = %s ORDER BY version DESC LIMIT 1", namespace_no, name
    )
    return found[0] if found else None


async def _scenarios(connection: AsyncConnection, query: str, *values: Any) -> list[Scenario]:
    cursor = await connection.execute(query.encode(), values, binary=True)
    return [
        Scenario(name, version, written, None if document is None else orjson.loads(document))
        for name, version, written, document in await cursor.fetchall()
    ]
