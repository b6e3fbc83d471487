"""Scenarios: all their versions, of which the last is in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from service.domain.errors import Conflict, Invalid
from service.domain.records import Scenario
from service.stores.encoding import cursor_of, position_of
from service.stores.jobs import Insert, Job, Rows, Run, Transaction

_COLUMNS = "SELECT name, version, written, document FROM heed.scenarios WHERE $here"
_IS_LATEST = """\
version = (SELECT max(version) FROM heed.scenarios AS later
            WHERE $here(later) AND later.name = scenarios.name)"""


def put(_: Transaction, name: str, body: Mapping[str, Any], now: int) -> Job[Scenario]:
    """`Store.put_scenario`."""
    yield from _check_fallback(name, body.get("fallback"))
    last = yield from _last(name)
    if last is not None and orjson.dumps(last.body) == orjson.dumps(body):
        return last
    return (yield from _insert(name, last, now, body))


def delete(_: Transaction, name: str, now: int) -> Job[bool]:
    """`Store.delete_scenario`."""
    last = yield from _last(name)
    if last is None or last.body is None:
        return False
    users = yield Run(f"{_COLUMNS} AND fallback = :name AND {_IS_LATEST} LIMIT 1", name=name)
    if users:
        raise Conflict(f"scenario {name!r} is the fallback of {users[0][0]!r}")
    yield from _insert(name, last, now, None)
    return True


def put_versions(versions: Iterable[Scenario]) -> Job[None]:
    """Insert versions of scenarios as they are; those that are stored stay."""
    yield Insert(
        "scenarios",
        "name version written document fallback",
        [
            (
                each.name,
                each.version,
                each.written,
                None if each.body is None else orjson.dumps(each.body),
                each.fallback,
            )
            for each in versions
        ],
    )


def current(name: str) -> Job[Scenario | None]:
    """`Store.scenario`."""
    last = yield from _last(name)
    return None if last is None or last.body is None else last


def page(cursor: str | None, limit: int, deleted: bool) -> Job[tuple[list[Scenario], str | None]]:
    """`Store.page_scenarios`."""
    (after,) = ("",) if cursor is None else position_of(cursor, str)
    only = "IS NULL" if deleted else "IS NOT NULL"
    rows = yield Run(
        f"{_COLUMNS} AND name > :after AND {_IS_LATEST} AND document {only}"
        " ORDER BY name LIMIT :most",
        after=after,
        most=limit + 1,
    )
    found = _scenarios(rows)
    return found[:limit], cursor_of(found[limit - 1].name) if len(found) > limit else None


def versions(name: str, cursor: str | None, limit: int) -> Job[tuple[list[Scenario], str | None]]:
    """`Store.page_scenario_versions`."""
    (before,) = (1 << 31,) if cursor is None else position_of(cursor, int)
    rows = yield Run(
        f"{_COLUMNS} AND name = :name AND version < CAST(:before AS bigint)"
        " ORDER BY version DESC LIMIT :most",
        name=name,
        before=before,
        most=limit + 1,
    )
    found = _scenarios(rows)
    return found[:limit], cursor_of(found[limit - 1].version) if len(found) > limit else None


def _check_fallback(name: str, fallback: str | None) -> Job[None]:
    """Raise `Invalid` for a fallback that is not stored, or that falls back to this scenario."""
    chain = [name]
    while fallback is not None:
        if fallback in chain:
            raise Invalid("/fallback", f"must not lead back: {' → '.join([*chain, fallback])}")
        found = yield from current(fallback)
        if found is None:
            raise Invalid("/fallback", f"there is no scenario {fallback!r}")
        chain.append(fallback)
        fallback = found.fallback


def _insert(
    name: str, last: Scenario | None, now: int, body: Mapping[str, Any] | None
) -> Job[Scenario]:
    new = Scenario(name, 1 if last is None else last.version + 1, now, body)
    yield from put_versions([new])
    return new


def _last(name: str) -> Job[Scenario | None]:
    rows = yield Run(f"{_COLUMNS} AND name = :name ORDER BY version DESC LIMIT 1", name=name)
    return _scenarios(rows)[0] if rows else None


def _scenarios(rows: Rows) -> list[Scenario]:
    return [
        Scenario(name, version, written, None if document is None else orjson.loads(document))
        for name, version, written, document in rows
    ]
