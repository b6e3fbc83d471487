"""Imports: their records, their claims on events that were stored before, and their undoing.

`events.import_no` is the import that an event goes with: the one that stored it, or none if it was
written without one. Each other import that contains the event has a claim, as a range of the user's
seqs: an export that is imported again takes one row a user instead of one an event. A range may
include seqs without an event, since no seq is given twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from service.domain.errors import Invalid
from service.stores.encoding import Document, document_digest
from service.stores.jobs import Changed, Delete, Find, Insert, Job, Rows, Run, Transaction, Update
from service.stores.records.catalogue import Replacement, replace_items
from service.stores.records.users import delete_places, drop_if_empty, put_profile
from service.stores.values import ImportRecord

Place: TypeAlias = tuple[int, int, int]
"""Key of an event: the user, the timestamp and the seq."""

_SEQ_BITS = 32  # of a user's code and a seq in one integer; histories read seqs as uint32
_FIRST: Place = (-1, 0, 0)
_REPLACED_ITEMS = """\
SELECT i.item_no, written, r.document, r.embedding, i.document, i.embedding
  FROM $[replaced|heed.replaced_items] AS r
  JOIN heed.items AS i ON $[kind = 'item' AND i.item_no = row_no|
                            i.namespace_no = r.namespace_no AND i.item_no = r.item_no]
 WHERE $here(r) AND r.import_no = :import_no"""
_REPLACED_PROFILES = """\
SELECT user_id, written, r.document
  FROM $[replaced|heed.replaced_profiles] AS r
  JOIN heed.users AS u ON $[kind = 'user' AND u.user_no = row_no|
                            u.namespace_no = r.namespace_no AND u.user_key = r.user_key]
 WHERE $here(r) AND r.import_no = :import_no ORDER BY r.$[row_no|user_key]"""


# ------------------------------------------------------------------------------ records


def begin(_: Transaction, source: str, now: int) -> Job[int]:
    """`Store.begin_import`."""
    ((last,),) = yield Run("SELECT coalesce(max(import_no), 0) FROM heed.imports WHERE $here")
    import_no = int(last) + 1
    yield Insert(
        "imports",
        "import_no started source undone",
        [(import_no, now, source, False)],
        key="import_no",
    )
    return import_no


def records() -> Job[list[ImportRecord]]:
    """`Store.imports`."""
    rows = yield Run(
        "SELECT import_no, started, source, undone FROM heed.imports WHERE $here ORDER BY import_no"
    )
    return [ImportRecord(row[0], row[1], row[2], bool(row[3])) for row in rows]


def counts() -> Job[dict[int, list[int]]]:
    """`Store.import_counts`."""
    numbers: dict[int, list[int]] = {}
    for place, rows in enumerate(
        (
            "heed.events WHERE $here AND import_no IS NOT NULL",
            "heed.$[replaced|replaced_items] WHERE $here $[AND kind = 'item'|]",
            "heed.$[replaced|replaced_profiles] WHERE $here $[AND kind = 'user'|]",
        )
    ):
        for import_no, count in (
            yield Run(f"SELECT import_no, count(*) FROM {rows} GROUP BY import_no")
        ):
            numbers.setdefault(import_no, [0, 0, 0])[place] = count
    return numbers


def put_records(imports: Iterable[ImportRecord]) -> Job[None]:
    """Insert the records of imports; of those that are stored, record whether they are undone."""
    yield Insert(
        "imports",
        "import_no started source undone",
        imports,
        key="import_no",
        update="undone = excluded.undone",
    )


# ------------------------------------------------------------------------------ claims


def claim(import_no: int | None, stored: Iterable[tuple[int, int, int, int | None]]) -> Job[None]:
    """Claim stored events for an import, or, without one, take them from all imports.

    Args:
        import_no: the import.
        stored: the place of each event, and the import that it goes with.
    """
    if import_no is None:
        yield Update(
            "events",
            "$user timestamp seq import_no",
            [(*place, None) for *place, owner in stored if owner is not None],
            keys=3,
        )
        return
    others = ((user, seq) for user, _, seq, owner in stored if owner not in (None, import_no))
    yield Insert(
        "claims",
        "$user import_no first_seq last_seq",
        [(user, import_no, first, last) for user, first, last in _ranges(others)],
        key="$user import_no first_seq",
        update="last_seq = $[max|greatest](claims.last_seq, excluded.last_seq)",
    )


def claim_places(import_no: int | None, places: Sequence[Place]) -> Job[None]:
    """Do as `claim` does, for events of which only the places are known."""
    if not places or not (yield Run("SELECT 1 FROM heed.imports WHERE $here LIMIT 1")):
        return
    columns = "$user timestamp seq"
    rows = yield Find(
        "events", columns, sorted(places), returning="$user, timestamp, seq, import_no"
    )
    yield from claim(import_no, [(row[0], row[1], row[2], row[3]) for row in rows])


def _ranges(places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Iterate over runs of consecutive seqs of users: the user, the first seq and the last."""
    codes: dict[int, int] = {}
    numbers = [codes.setdefault(user, len(codes)) << _SEQ_BITS | seq for user, seq in places]
    if not numbers:
        return
    users = list(codes)
    ordered = np.sort(np.array(numbers, np.int64))
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    firsts, lasts = ordered[np.append(0, breaks + 1)], ordered[np.append(breaks, -1)]
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        yield users[first >> _SEQ_BITS], first % (1 << _SEQ_BITS), last % (1 << _SEQ_BITS)


def _claimants(places: Sequence[Place]) -> Job[dict[Place, int]]:
    """Return an import that claims the event, for each of the places that has one."""
    rows = yield Run(
        "SELECT $user, first_seq, last_seq, import_no FROM heed.claims"
        " WHERE $here AND $user $in(users) ORDER BY first_seq",
        users=sorted({user for user, _, _ in places}),
    )
    ranges: dict[int, list[tuple[int, int, int]]] = {}
    for user, *claimed in rows:
        ranges.setdefault(user, []).append((claimed[0], claimed[1], claimed[2]))
    claimants: dict[Place, int] = {}
    for user, of_user in ranges.items():
        at, last, import_no = 0, 0, 0
        for place in sorted((each for each in places if each[0] == user), key=itemgetter(2)):
            # If any range that begins up to here has the seq, the one that ends last has it.
            while at < len(of_user) and of_user[at][0] <= place[2]:
                if of_user[at][1] > last:
                    _, last, import_no = of_user[at]
                at += 1
            if last >= place[2]:
                claimants[place] = import_no
    return claimants


# ------------------------------------------------------------------------------ undoing


def begin_undo(_: Transaction, import_no: int) -> Job[Place]:
    """Give up the import's claims, and return the place before all events.

    Raises `Invalid` unless the import can be undone.
    """
    rows = yield Run(
        "SELECT undone FROM heed.imports WHERE $here AND import_no = :import_no",
        import_no=import_no,
    )
    if not rows:
        raise Invalid("/import_id", f"there is no import {import_no}")
    if rows[0][0]:
        raise Invalid("/import_id", f"import {import_no} is undone already")
    # First: until the end no event may be handed to the import.
    yield Delete("claims", "import_no", [(import_no,)])
    return _FIRST


def undo_events(
    tx: Transaction, import_no: int, after: Place, limit: int
) -> Job[tuple[int, int, Place | None]]:
    """Take back up to `limit` events of an import; those that another import contains stay.

    Returns:
        Numbers of deleted events and of those that stay, and the place of the last one, or None
        after the last event of all.
    """
    rows = yield Run(
        "SELECT $user, timestamp, seq FROM heed.events WHERE $here"
        " AND ($user, timestamp, seq) > (:user, :time, :seq) AND import_no = :import_no"
        " ORDER BY $user, timestamp, seq LIMIT :most",
        user=after[0],
        time=after[1],
        seq=after[2],
        import_no=import_no,
        most=limit,
    )
    places: list[Place] = [(user, time, seq) for user, time, seq in rows]
    users = yield from _user_ids(places)
    yield from tx.lock_users(users)
    claimants = yield from _claimants(places)
    yield Update(
        "events",
        "$user timestamp seq import_no",
        [(*place, owner) for place, owner in claimants.items()],
        keys=3,
    )
    deleted = [place for place in places if place not in claimants]
    if deleted:
        yield from delete_places(tx, deleted)
        yield from drop_if_empty(tx, users)
    return len(deleted), len(claimants), places[-1] if len(places) == limit else None


def _user_ids(places: Iterable[Place]) -> Job[list[str]]:
    rows = yield Run(
        "SELECT user_id FROM heed.users WHERE $here AND $user $in(users)",
        users=sorted({user for user, _, _ in places}),
    )
    return [user_id for (user_id,) in rows]


def undo_documents(tx: Transaction, import_no: int) -> Job[tuple[int, int, int]]:
    """Restore what an import has replaced, and record that the import is undone.

    Args:
        tx: with the lock of the catalogue.
        import_no: the import.

    Returns:
        Numbers of restored items, of restored profiles, and of both that were changed since.
    """
    items: list[Replacement] = []
    kept = profiles = 0
    rows: Rows = yield Run(_REPLACED_ITEMS, import_no=import_no)
    for item_no, written, *documents in rows:
        before, current = (documents[0], documents[1]), (documents[2], documents[3])
        is_current = yield from _is_current(
            import_no, "item", item_no, written=written, before=before, current=current
        )
        if is_current:
            items.append((item_no, current, before))
        kept += is_current is False
    if items:
        yield from replace_items(tx, items)
    rows = yield Run(_REPLACED_PROFILES, import_no=import_no)
    for user_id, written, before in rows:
        user = (yield from tx.lock_users([user_id])).get(user_id)
        if user is None:
            raise Changed  # forgotten since
        is_current = yield from _is_current(
            import_no,
            "user",
            user.user,
            written=written,
            before=(before, None),
            current=(user.profile, None),
        )
        if is_current:
            yield from put_profile(tx, user.user, user.profile, before)
            yield from drop_if_empty(tx, [user_id])
            profiles += 1
        kept += is_current is False
    for table in ("$[replaced|replaced_items]", "$[replaced|replaced_profiles]"):
        yield Delete(table, "import_no", [(import_no,)])
    yield Update("imports", "import_no undone", [(import_no, True)])
    return len(items), profiles, kept


def _is_current(
    import_no: int,
    kind: str,
    row: int,
    *,
    written: int,
    before: Document,
    current: Document,
) -> Job[bool | None]:
    """Report whether a document is what the import wrote.

    None, if a later import has replaced that: it restores what was there before both.
    """
    is_item = kind == "item"
    table = f"$[replaced|replaced_{'items' if is_item else 'profiles'}]"
    number = f"$[row_no|{'item_no' if is_item else 'user_key'}]"
    later: list[tuple[Any, ...]] = yield Run(
        f"SELECT import_no, document, {'embedding' if is_item else 'NULL'}"
        f" FROM heed.{table} WHERE $here AND $[kind = :kind AND |]{number} = :row"
        " AND import_no > :import_no ORDER BY import_no LIMIT 1",
        kind=kind,
        row=row,
        import_no=import_no,
    )
    if not later:
        return document_digest(current) == written
    next_no, document, embedding = later[0]
    if document_digest((document, embedding)) != written:
        return False
    yield Update(
        table,
        f"{number} import_no sqlite:kind document{' embedding' if is_item else ''}",
        [(row, next_no, kind, *before[: 2 if is_item else 1])],
        keys=3,
    )
    return None
