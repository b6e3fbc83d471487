"""API keys of a PostgreSQL store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from psycopg import AsyncConnection

from service.domain.errors import Conflict
from service.domain.keys import ApiKey, Scope, parse_rate
from service.stores.postgres.database.transaction import NamespaceTransaction

_COLUMNS = """\
SELECT key_id, name, namespace, scopes, digest, created, expires, revoked, rate,
 namespace_id FROM heed.keys
 WHERE namespace_no = %s"""


async def add(transaction: NamespaceTransaction, key: ApiKey) -> None:
    """`KeyStore.add_key`, in a transaction that holds the lock of keys."""
    if await find(transaction.connection, transaction.namespace_no, key.key_id) is not None:
        raise Conflict(f"there is a key {key.key_id} already")
    await put(transaction, [key])


async def put(transaction: NamespaceTransaction, keys: Iterable[ApiKey]) -> None:
    """Insert keys, or revoke those of the same ids, in a transaction with the lock of keys."""
    for key in keys:
        await transaction.execute(
            "INSERT INTO heed.keys (namespace_no, key_id, name, namespace, scopes, digest, created,"
            " expires, revoked, rate, namespace_id)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
            " ON CONFLICT (namespace_no, key_id) DO UPDATE SET revoked = excluded.revoked",
            key.key_id,
            key.name,
            key.namespace,
            ",".join(sorted(key.scopes)),
            key.digest,
            key.created,
            key.expires,
            key.revoked,
            None if key.rate is None else str(key.rate),
            key.namespace_id,
        )
    await _move_version(transaction)


async def revoke(transaction: NamespaceTransaction, key_id: str, now: int) -> bool:
    """`KeyStore.revoke_key`, in a transaction that holds the lock of keys."""
    key = await find(transaction.connection, transaction.namespace_no, key_id)
    if key is None or key.revoked is not None:
        return False
    await transaction.connection.execute(
        b"UPDATE heed.keys SET revoked = %s WHERE namespace_no = %s AND key_id = %s",
        (now, transaction.namespace_no, key_id),
    )
    await _move_version(transaction)
    return True


async def find(connection: AsyncConnection, namespace_no: int, key_id: str) -> ApiKey | None:
    """`KeyStore.key`."""
    found = await _keys(connection, f"{_COLUMNS} AND key_id = %s", namespace_no, key_id)
    return found[0] if found else None


async def all_keys(connection: AsyncConnection, namespace_no: int) -> list[ApiKey]:
    """`KeyStore.keys`."""
    return await _keys(connection, f"{_COLUMNS} ORDER BY created, key_id", namespace_no)


async def version(connection: AsyncConnection, namespace_no: int) -> int:
    """`KeyStore.keys_version`."""
    cursor = await connection.execute(
        b"SELECT keys FROM heed.namespaces WHERE namespace_no = %s", (namespace_no,)
    )
    row = await cursor.fetchone()
    return 0 if row is None else int(row[0])


async def _move_version(transaction: NamespaceTransaction) -> None:
    cursor = await transaction.connection.execute(
        b"UPDATE heed.namespaces SET keys = greatest(keys + 1, %s) WHERE namespace_no = %s"
        b" RETURNING keys",
        (transaction.tick, transaction.namespace_no),
    )
    ((version,),) = await cursor.fetchall()
    await transaction.announce(keys=version)


async def _keys(connection: AsyncConnection, query: str, *values: Any) -> list[ApiKey]:
    cursor = await connection.execute(query.encode(), values)
    return [_key(*row) for row in await cursor.fetchall()]


def _key(
    key_id: str,
    name: str,
    namespace: str,
    scopes: str,
    digest: bytes,
    created: int,
    expires: int | None,
    revoked: int | None,
    rate: str | None,
    namespace_id: str,
) -> ApiKey:
    held = frozenset(cast(list[Scope], scopes.split(",")))
    bound = None if rate is None else parse_rate(rate)
    own = key_id, name, namespace, held, digest, created, expires, revoked, bound, namespace_id
    return ApiKey(*own)
