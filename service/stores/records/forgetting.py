"""Forgetting: the user's rows, the names that only they used, and the ledger.

Deleted rows are overwritten in SQLite's database, and its write-ahead log is emptied soon after.
PostgreSQL keeps them in its files until it vacuums them, and in its log and base backups for as
long as the operator keeps these. Names that were interned for events are candidates for deletion
once a user of them is forgotten; to find out needs a look at all events, which `Store.clean_up`
takes later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from service.stores.encoding import cursor_of, position_of
from service.stores.jobs import Do, Insert, Job, Rows, Run, Transaction
from service.stores.postgres.ticks import changed_between
from service.stores.records.users import delete_users
from service.stores.values import ForgottenUser, user_digest

Unused: TypeAlias = Mapping[Literal["items", "types"], list[int]]
"""Numbers of names that no event uses, by table."""

_SALT_BYTES = 16
_ENTRIES = "SELECT digest, salt, forgotten, events FROM heed.forgotten WHERE $here"
_HEX = "$[lower(hex(digest))|encode(digest, 'hex')]"
_TABLES: Mapping[Literal["items", "types"], str] = {"items": "item_no", "types": "type_no"}
_CHANGED = f"$[version > :since|{changed_between(':since')}]"


# ------------------------------------------------------------------------------ changes


def forget(tx: Transaction, user_id: str, now: int) -> Job[int]:
    """`Store.forget`."""
    found = (yield from tx.lock_users([user_id])).get(user_id)
    if found is None:
        return 0
    events = yield from delete_users(tx, [found])
    salts = yield Run("SELECT salt FROM heed.forgotten WHERE $here LIMIT 1")
    salt = salts[0][0] if salts else os.urandom(_SALT_BYTES)
    yield from add_entries([ForgottenUser(user_digest(salt, user_id), salt, now, events)])
    return events


def forget_entry(tx: Transaction, user_id: str, entry: ForgottenUser, now: int) -> Job[int | None]:
    """Forget a user for an entry of another ledger, and add it; None if the user is unknown."""
    known = yield from tx.lock_users([user_id])
    events = yield from forget(tx, user_id, now)
    yield from add_entries([entry])
    return events if known else None


def add_entries(entries: Sequence[ForgottenUser]) -> Job[None]:
    """Add entries to the ledger; those that it has are left out."""
    yield Insert("forgotten", "digest salt forgotten events", entries)


# ------------------------------------------------------------------------------ names


def has_noted_names() -> Job[bool]:
    """Report whether there are names to be looked at."""
    return bool((yield Run("SELECT 1 FROM heed.unused_names WHERE $here LIMIT 1")))


def find_unused(horizon: str) -> Job[tuple[int, int, Unused]]:
    """Return the noted names that no event uses.

    Args:
        horizon: the statement that reads the tick up to which all changes are seen.

    Returns:
        The tick up to which names were noted, the tick up to which no event used them, and their
        numbers.
    """
    ((since,),) = yield Run(horizon)
    rows = yield Run("SELECT kind, number, noted FROM heed.unused_names WHERE $here")
    noted: Unused = {
        table: [number for kind, number, _ in rows if kind == table] for table in _TABLES
    }
    unused = yield from _without_events(noted, None)
    return max((tick for _, _, tick in rows), default=0), since, unused


def still_unused(horizon: str, since: int, unused: Unused) -> Job[tuple[int, Unused]]:
    """Return those of the names that no event uses that was stored after the tick `since`.

    They come with the tick up to which that was so.
    """
    ((later,),) = yield Run(horizon)
    return later, (yield from _without_events(unused, since))


def delete_names(tx: Transaction, noted: int, since: int, unused: Unused) -> Job[bool]:
    """Delete names that no event used up to the tick `since`, and that none uses now.

    Returns False, with nothing deleted, where events may be stored that cannot be seen yet.

    Args:
        tx: with the lock of names, so that no event is appended meanwhile.
        noted: the tick up to which noted names were looked at.
        since: as `still_unused` returned it.
        unused: as `still_unused` returned it.
    """
    if (yield from tx.has_unseen()):
        return False
    for table, numbers in (yield from _without_events(unused, since)).items():
        extra = "AND change IS NULL AND document IS NULL" if table == "items" else ""
        yield Do(
            f"DELETE FROM heed.{table} WHERE $here AND {_TABLES[table]} $in(numbers) {extra}",
            numbers=numbers,
        )
        yield from tx.renumber(table, numbers)
    # Names that were noted since are looked at the next time.
    yield Do("DELETE FROM heed.unused_names WHERE $here AND noted <= :noted", noted=noted)
    tx.scrub()
    return True


def _without_events(numbers: Unused, since: int | None) -> Job[Unused]:
    """Return the numbers that no event uses, or none of users who changed after a tick."""
    source = "heed.events" if since is None else "heed.users JOIN heed.events USING ($key)"
    changed = "" if since is None else f"AND {_CHANGED}"
    unused = {}
    for table, wanted in numbers.items():
        column, rows = _TABLES[table], Rows()
        if wanted:
            rows = yield Run(
                f"SELECT DISTINCT {column} FROM {source} WHERE $here {changed}"
                f" AND {column} $in(numbers)".replace("$key", "$[|namespace_no, ]$user"),
                numbers=wanted,
                since=since,
            )
        used = {number for (number,) in rows}
        unused[table] = [number for number in wanted if number not in used]
    return unused


# ------------------------------------------------------------------------------ ledger


def page(cursor: str | None, limit: int) -> Job[tuple[list[ForgottenUser], str | None]]:
    """`Store.page_forgotten`."""
    time, digest = (-1, "") if cursor is None else position_of(cursor, int, str)
    rows = yield Run(
        f"{_ENTRIES} AND (forgotten, {_HEX}) > (:time, :digest)"
        f" ORDER BY forgotten, {_HEX} LIMIT :most",
        time=time,
        digest=digest.lower(),
        most=limit + 1,
    )
    found = [ForgottenUser(*row) for row in rows]
    if len(found) <= limit:
        return found, None
    last = found[limit - 1]
    return found[:limit], cursor_of(last.forgotten, last.digest.hex())


def find(user_id: str) -> Job[list[ForgottenUser]]:
    """`Store.find_forgotten`."""
    salts = yield Run("SELECT DISTINCT salt FROM heed.forgotten WHERE $here")
    rows = yield Run(
        f"{_ENTRIES} AND digest $in(digests) ORDER BY forgotten",
        digests=[user_digest(salt, user_id) for (salt,) in salts],
    )
    return [ForgottenUser(*row) for row in rows]


def count(since: int) -> Job[int]:
    """`Store.count_forgotten`."""
    rows = yield Run(
        "SELECT count(*) FROM heed.forgotten WHERE $here AND forgotten >= :since", since=since
    )
    return int(rows[0][0])


def unknown_entries(entries: Sequence[ForgottenUser]) -> Job[list[ForgottenUser]]:
    """Return the entries that the ledger does not have."""
    rows = yield Run(
        "SELECT digest, forgotten FROM heed.forgotten WHERE $here AND digest $in(digests)",
        digests=[entry.digest for entry in entries],
    )
    known = {(digest, forgotten) for digest, forgotten in rows}
    return [each for each in entries if (each.digest, each.forgotten) not in known]
