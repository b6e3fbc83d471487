"""Scenarios of a SQLite store: all their versions, of which the last is in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import apsw
import orjson

from service.domain.errors import Conflict, Invalid
from service.domain.scenarios import Scenario
from service.stores.encoding import cursor_of, position_of
from service.stores.sqlite.writer import Transaction

_COLUMNS = "SELECT name, version, written, document FROM scenarios"
_IS_LATEST = (
    "version = (SELECT max(version) FROM scenarios AS later WHERE later.name = scenarios.name)"
)


def put(transaction: Transaction, name: str, body: Mapping[str, Any], now: int) -> Scenario:
    """`Store.put_scenario`."""
    connection = transaction.connection
    _check_fallback(connection, name, body.get("fallback"))
    last = _last(connection, name)
    if last is not None and orjson.dumps(last.body) == orjson.dumps(body):
        return last
    return _insert(transaction, name, last, now, body)


def delete(transaction: Transaction, name: str, now: int) -> bool:
    """`Store.delete_scenario`."""
    connection = transaction.connection
    last = _last(connection, name)
    if last is None or last.body is None:
        return False
    users = connection.execute(
        f"{_COLUMNS} WHERE fallback = ? AND {_IS_LATEST} LIMIT 1", (name,)
    ).fetchall()
    if users:
        raise Conflict(f"scenario {name!r} is the fallback of {users[0][0]!r}")
    _insert(transaction, name, last, now, None)
    return True


def put_versions(transaction: Transaction, versions: Iterable[Scenario]) -> None:
    """Insert versions of scenarios as they are; those that are stored stay."""
    transaction.connection.executemany(
        "INSERT OR IGNORE INTO scenarios VALUES (?, ?, ?, ?, ?)",
        (
            (
                each.name,
                each.version,
                each.written,
                None if each.body is None else orjson.dumps(each.body),
                each.fallback,
            )
            for each in versions
        ),
    )


def current(connection: apsw.Connection, name: str) -> Scenario | None:
    """`Store.scenario`."""
    last = _last(connection, name)
    return None if last is None or last.body is None else last


def page(
    connection: apsw.Connection, cursor: str | None, limit: int, deleted: bool
) -> tuple[list[Scenario], str | None]:
    """`Store.page_scenarios`."""
    (after,) = ("",) if cursor is None else position_of(cursor, str)
    only = "IS NULL" if deleted else "IS NOT NULL"
    rows = connection.execute(
        f"{_COLUMNS} WHERE name > ? AND {_IS_LATEST} AND document {only} ORDER BY name LIMIT ?",
        (after, limit + 1),
    )
    found = [_scenario(*row) for row in rows]
    return found[:limit], cursor_of(found[limit - 1].name) if len(found) > limit else None


def versions(
    connection: apsw.Connection, name: str, cursor: str | None, limit: int
) -> tuple[list[Scenario], str | None]:
    """`Store.page_scenario_versions`."""
    (before,) = (1 << 62,) if cursor is None else position_of(cursor, int)
    rows = connection.execute(
        f"{_COLUMNS} WHERE name = ? AND version < ? ORDER BY version DESC LIMIT ?",
        (name, before, limit + 1),
    )
    found = [_scenario(*row) for row in rows]
    return found[:limit], cursor_of(found[limit - 1].version) if len(found) > limit else None


def _check_fallback(connection: apsw.Connection, name: str, fallback: str | None) -> None:
    """Raise `Invalid` for a fallback that is not stored, or that falls back to this scenario."""
    chain = [name]
    while fallback is not None:
        if fallback in chain:
            raise Invalid("/fallback", f"must not lead back: {' → '.join([*chain, fallback])}")
        found = current(connection, fallback)
        if found is None:
            raise Invalid("/fallback", f"there is no scenario {fallback!r}")
        chain.append(fallback)
        fallback = found.fallback


def _insert(
    transaction: Transaction,
    name: str,
    last: Scenario | None,
    now: int,
    body: Mapping[str, Any] | None,
) -> Scenario:
    new = Scenario(name, 1 if last is None else last.version + 1, now, body)
    put_versions(transaction, [new])
    return new


def _last(connection: apsw.Connection, name: str) -> Scenario | None:
    row = connection.execute(
        f"{_COLUMNS} WHERE name = ? ORDER BY version DESC LIMIT 1", (name,)
    ).fetchone()
    return None if row is None else _scenario(*row)


def _scenario(name: str, version: int, written: int, document: bytes | None) -> Scenario:
    return Scenario(name, version, written, None if document is None else orjson.loads(document))
