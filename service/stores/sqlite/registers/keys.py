"""API keys of a SQLite store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import apsw

from service.domain.errors import Conflict
from service.domain.keys import ApiKey, Scope, parse_rate
from service.stores.sqlite.writer import Transaction

_COLUMNS = """\
SELECT key_id, name, namespace, scopes, digest, created, expires, revoked, rate,
 namespace_id FROM keys"""


def add(transaction: Transaction, key: ApiKey) -> None:
    """`KeyStore.add_key`."""
    if find(transaction.connection, key.key_id) is not None:
        raise Conflict(f"there is a key {key.key_id} already")
    put(transaction, [key])


def put(transaction: Transaction, keys: Iterable[ApiKey]) -> None:
    """Insert keys, or replace those of the same ids."""
    transaction.connection.executemany(
        "INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (
                key.key_id,
                key.name,
                key.namespace,
                ",".join(sorted(key.scopes)),
                key.digest,
                key.created,
                key.expires,
                key.revoked,
                None if key.rate is None else str(key.rate),
                transaction.tick(),
                key.namespace_id,
            )
            for key in keys
        ),
    )


def revoke(transaction: Transaction, key_id: str, now: int) -> bool:
    """`KeyStore.revoke_key`."""
    key = find(transaction.connection, key_id)
    if key is None or key.revoked is not None:
        return False
    transaction.connection.execute(
        "UPDATE keys SET revoked = ?, change = ? WHERE key_id = ?",
        (now, transaction.tick(), key_id),
    )
    return True


def find(connection: apsw.Connection, key_id: str) -> ApiKey | None:
    """`KeyStore.key`."""
    row = connection.execute(f"{_COLUMNS} WHERE key_id = ?", (key_id,)).fetchone()
    return None if row is None else _key(*row)


def all_keys(connection: apsw.Connection) -> list[ApiKey]:
    """`KeyStore.keys`."""
    return [_key(*row) for row in connection.execute(f"{_COLUMNS} ORDER BY created, key_id")]


def version(connection: apsw.Connection) -> int:
    """`KeyStore.keys_version`."""
    found: int = connection.execute("SELECT coalesce(max(change), 0) FROM keys").get
    return found


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
