"""API keys. None is ever deleted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from service.domain.errors import Conflict
from service.domain.keys import ApiKey, Scope, parse_rate
from service.stores.jobs import Insert, Job, Rows, Run, Transaction, Update

_COLUMNS = """\
SELECT key_id, name, namespace, scopes, digest, created, expires, revoked, rate, namespace_id
  FROM heed.keys WHERE $here"""


def add(tx: Transaction, key: ApiKey) -> Job[None]:
    """`Store.add_key`."""
    if (yield from find(key.key_id)) is not None:
        raise Conflict(f"there is a key {key.key_id} already")
    yield from put(tx, [key])


def put(tx: Transaction, keys: Iterable[ApiKey]) -> Job[None]:
    """Insert keys, or revoke those of the same ids."""
    rows = [_row(key, tx.tick()) for key in keys]
    if not rows:
        return
    yield Insert(
        "keys",
        "key_id name namespace scopes digest created expires revoked rate namespace_id"
        " sqlite:change",
        rows,
        key="key_id",
        update="revoked = excluded.revoked$[, change = excluded.change|]",
    )
    yield from tx.move_keys()


def revoke(tx: Transaction, key_id: str, now: int) -> Job[bool]:
    """`Store.revoke_key`."""
    key = yield from find(key_id)
    if key is None or key.revoked is not None:
        return False
    yield Update("keys", "key_id revoked sqlite:change", [(key_id, now, tx.tick())])
    yield from tx.move_keys()
    return True


def find(key_id: str) -> Job[ApiKey | None]:
    """`Store.key`."""
    rows = yield Run(f"{_COLUMNS} AND key_id = :key_id", key_id=key_id)
    return _keys(rows)[0] if rows else None


def all_keys() -> Job[list[ApiKey]]:
    """`Store.keys`."""
    return _keys((yield Run(f"{_COLUMNS} ORDER BY created, key_id")))


def version() -> Job[int]:
    """`Store.keys_version`."""
    rows = yield Run(
        "SELECT $[coalesce(max(change), 0) FROM keys|keys FROM heed.namespaces WHERE $here]"
    )
    return int(rows[0][0]) if rows else 0


def _row(key: ApiKey, tick: int) -> tuple[Any, ...]:
    scopes = ",".join(sorted(key.scopes))
    rate = None if key.rate is None else str(key.rate)
    own = (key.key_id, key.name, key.namespace, scopes, key.digest, key.created)
    return (*own, key.expires, key.revoked, rate, key.namespace_id, tick)


def _keys(rows: Rows) -> list[ApiKey]:
    return [
        ApiKey(
            key_id=key_id,
            name=name,
            namespace=namespace,
            scopes=frozenset(cast(list[Scope], scopes.split(","))),
            digest=digest,
            created=created,
            expires=expires,
            revoked=revoked,
            rate=None if rate is None else parse_rate(rate),
            namespace_id=namespace_id,
        )
        for (
            key_id,
            name,
            namespace,
            scopes,
            digest,
            created,
            expires,
            revoked,
            rate,
            namespace_id,
        ) in rows
    ]
