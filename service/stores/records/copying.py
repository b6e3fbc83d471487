"""Bulk access to records as they are stored, by which one store is copied to another.

A record comes with what other methods keep to themselves: the places of events in the order of
arrival, digests of bodies, the imports that events belong to, and what imports have replaced.

A copy has a record in its target. The table of SQLite is made when a copy begins: no other store
has one. Every change of users, events, items and keys leaves its tick somewhere, which tells
whether anything but the copy has written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol, TypeVar, TypeVarTuple, cast
from uuid import UUID

from service.domain.errors import Conflict
from service.domain.records import NEGATIVE
from service.stores.encoding import event_key, spelled_id, user_key
from service.stores.jobs import (
    CATALOGUE,
    FOLDING,
    KEYS,
    SCENARIOS,
    Do,
    Insert,
    Job,
    Rows,
    Run,
    Tally,
    Transaction,
)
from service.stores.records import imports, keys, scenarios
from service.stores.records.catalogue import replace_items
from service.stores.records.events import find_names
from service.stores.records.forgetting import add_entries
from service.stores.records.users import EVENT_BYTES, USER_BYTES, delete_users, note_items
from service.stores.values import (
    CopyRecord,
    Registers,
    StoredClaim,
    StoredEvent,
    StoredItem,
    StoredReplacement,
    StoredUser,
    StoredVectors,
    latest_holders,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_USERS = 5_000  # in one page, however few events they have

_COPIES = """
CREATE TABLE IF NOT EXISTS copies (
  only     INTEGER PRIMARY KEY CHECK (only = 1),
  origin   TEXT NOT NULL,
  position TEXT NOT NULL,
  written  INTEGER NOT NULL, -- the tick of the copy's last change
  is_whole INTEGER -- 1: compared with its source and the same; NULL: of an earlier Heed
) STRICT
"""
_TABLE = "SELECT $[(SELECT group_concat(name) FROM pragma_table_info('copies'))|'is_whole']"
_LAST_CHANGE = """\
$[(SELECT clock FROM state)|
greatest((SELECT version FROM heed.users WHERE $here
           ORDER BY version_range DESC, version DESC LIMIT 1),
         (SELECT max(change) FROM heed.gone_users WHERE $here),
         (SELECT greatest(catalogue, keys, names) FROM heed.namespaces WHERE $here))]"""
_OF_USERS = "WHERE $here AND $user $in(users)"
# First the events, since a distributed database has their ids elsewhere.
_EVENTS = f"""\
$[SELECT user_no, timestamp, seq, item_no, type_no, weight, event_id, digest, import_no
  FROM events {_OF_USERS} ORDER BY user_no, timestamp, seq|
WITH found AS MATERIALIZED (SELECT * FROM heed.events {_OF_USERS})
SELECT found.user_key, found.timestamp, found.seq, item_no, type_no, weight,
       coalesce(event_id, event_key::text), digest, import_no
  FROM found JOIN heed.event_ids USING (namespace_no, event_key)
 ORDER BY found.user_key, found.timestamp, found.seq]"""
_REPLACED = """\
SELECT $[row_no|{of}], import_no, written, document, {embedding}
  FROM $[replaced|heed.replaced_{kind}] WHERE $here $[AND kind = '{one}'|]
   AND $[row_no|{of}] $in(rows) ORDER BY 1, import_no"""
_REPLACED_ITEMS = _REPLACED.format(of="item_no", kind="items", one="item", embedding="embedding")
_REPLACED_PROFILES = _REPLACED.format(of="user_key", kind="profiles", one="user", embedding="NULL")
_ITEMS = "SELECT item_id, item_no, change, document, embedding FROM heed.items WHERE $here"


class _Read(Protocol):
    """`Store._read_apart`."""

    def __call__(self, job: Callable[[*Ts], Job[T]], *args: *Ts) -> Awaitable[T]: ...


class _Write(Protocol):
    """`Store._write`."""

    def __call__(
        self,
        job: Callable[[Transaction, *Ts], Job[T]],
        *args: *Ts,
        rows: int = 1,
        alone: tuple[int, ...] = (),
        items: Iterable[str] = (),
        types: Iterable[str] = (),
        is_long: bool = False,
    ) -> Awaitable[T]: ...


class BulkAccess:
    """Bulk reads of any store, and bulk writes of a store that is the target of a copy.

    Each call is one transaction. A write also records how far the copy is. It raises `Conflict`
    where there is no record, or where anything but this object has changed the store since the
    object has read or written the record: another copy, or a service. Each object is for one copy
    at a time.
    """

    def __init__(self, read: _Read, write: _Write) -> None:
        self._read = read
        self._write = write
        self._written: int | None = None  # the last number of the copy's last change

    # ------------------------------------------------------------------ any store

    async def users(self, after: str, events: int) -> list[StoredUser]:
        """Return the next users by user_id (as bytes): about `events` events, at least one user.

        An empty list is the end.
        """
        return await self._read(_users, after, events)

    async def item_names(self, after: int, limit: int) -> list[tuple[int, str]]:
        """Return up to `limit` numbers and ids of items by number, which is the order of arrival.

        They include items that only events name.
        """
        return await self._read(_item_names, after, limit)

    async def items(self, after: str, limit: int) -> list[StoredItem]:
        """Return up to `limit` items by item_id (as bytes), whatever is stored of them."""
        return await self._read(_page_items, after, limit)

    async def find_items(self, item_ids: Sequence[str]) -> list[StoredItem]:
        """Return the items of these ids that are stored, in any order."""
        return await self._read(_find_items, item_ids)

    async def noted_item_names(self) -> list[str]:
        """Return the names of items that deleted events had, and that `clean_up` is to look at."""
        return await self._read(_noted_item_names)

    async def copy_record(self) -> CopyRecord | None:
        """Return the record of the copy that the store is a target of, None without one."""
        found = await self._read(read_record)
        if found is None:
            return None
        record, self._written = found
        return record

    # ------------------------------------------------------------------ the target of a copy

    async def begin_copy(self, origin: str) -> None:
        """Make the store the target of a copy. The caller must have found it empty."""
        self._written = await self._write(_begin, origin)

    async def put_registers(self, registers: Registers) -> None:
        """Insert records; of imports and keys that are there, replace what can change."""
        rows = sum(len(records) for records in registers)
        await self._change(lambda tx: _put_registers(tx, registers), rows, (KEYS, SCENARIOS))

    async def add_item_names(self, item_ids: Sequence[str]) -> None:
        """Give the items numbers, in this order; those that have one keep it."""
        await self._change(lambda tx: tx.add_item_names(item_ids), len(item_ids))

    async def put_items(self, items: Sequence[StoredItem]) -> None:
        """Replace items, up to `MAX_ITEMS`, in the order of the catalogue.

        Items of one version in `place` are changed together, and others one after another, so that
        `catalogue_changes` has the order of the source.
        """
        names = [item.item_id for item in items]
        await self._change(lambda tx: _put_items(tx, items), len(items), (CATALOGUE,), items=names)

    async def discard_item_names(self, item_ids: Sequence[str]) -> None:
        """Leave names to `clean_up`, which deletes those that no event uses."""
        await self._change(lambda tx: note_items(tx, "item_id", list(item_ids)), len(item_ids))

    async def put_users(self, users: Sequence[StoredUser], position: str) -> None:
        """Replace users by these, and record the position.

        Ids of events are unique: where another user, or an earlier one of these, has an event of a
        user to be stored, since they were merged at the source meanwhile, that one is dropped too.
        A dropped user is not added to the ledger of forgotten users.
        """
        events = [event for user in users for event in user.events]
        await self._change(
            lambda tx: _put_users(tx, users),
            len(events),
            items={event.item_id for event in events},
            types={event.type for event in events},
            position=position,
        )

    async def finish_copy(self) -> None:
        """Record that all users are copied; tidy up after very many writes."""
        await self._change(lambda tx: tx.finish_copy(), 1, (FOLDING,), position="")

    async def mark_copy(self, *, is_whole: bool) -> None:
        """Record whether the copy equals its source; until then, the store is not opened."""
        await self._change(lambda _: _mark(is_whole), 1)

    async def _change(
        self,
        job: Callable[[Transaction], Job[None]],
        rows: int,
        alone: tuple[int, ...] = (),
        *,
        items: Iterable[str] = (),
        types: Iterable[str] = (),
        position: str | None = None,
    ) -> None:
        written = self._written
        if written is None:
            raise Conflict("no copy to this store was begun")
        self._written = await self._write(
            _recorded,
            job,
            written,
            position,
            rows=rows,
            alone=alone,
            items=items,
            types=types,
            is_long=True,
        )


# ------------------------------------------------------------------------------ the record


def read_record() -> Job[tuple[CopyRecord, int] | None]:
    """Return the record and the last number of the copy; None without a record."""
    ((columns,),) = yield Run(_TABLE)
    if columns is None:
        return None
    whole = "is_whole" if "is_whole" in columns else "NULL"
    rows = yield Run(
        f"SELECT origin, position, written, {whole}, {_LAST_CHANGE} FROM heed.copies WHERE $here"
    )
    if not rows:
        return None
    origin, position, written, is_whole, changed = rows[0]
    is_untouched = changed is None or changed <= written
    if is_whole is None:  # written by an earlier Heed
        is_whole = not (position and is_untouched)
    return CopyRecord(origin, position, is_untouched, bool(is_whole)), written


def unfinished() -> Job[str | None]:
    """Return the origin of an unfinished copy; None without one."""
    found = yield from read_record()
    return None if found is None or found[0].is_whole else found[0].origin


def _begin(tx: Transaction, origin: str) -> Job[int]:
    if not tx.by_key:
        yield Do(_COPIES)
    written = tx.last_number()
    yield Insert(
        "copies",
        "sqlite:only origin position written is_whole",
        [(1, origin, "", written, False)],
        key="only",
    )
    return written


def _mark(is_whole: bool) -> Job[None]:
    ((columns,),) = yield Run(_TABLE)
    if "is_whole" not in columns:
        yield Do("ALTER TABLE copies ADD COLUMN is_whole INTEGER")
    yield Do("UPDATE heed.copies SET is_whole = :is_whole WHERE $here", is_whole=is_whole)


def _recorded(
    tx: Transaction, job: Callable[[Transaction], Job[None]], written: int, position: str | None
) -> Job[int]:
    """Run a job of the copy, and record it; raise `Conflict` if something else has written."""
    rows = yield Run(f"SELECT written, {_LAST_CHANGE} FROM heed.copies WHERE $here$[| FOR UPDATE]")
    if not rows or rows[0][0] != written or (rows[0][1] or 0) > written or tx.has_changes():
        raise Conflict("the target was changed by something else while it was copied to")
    yield from job(tx)
    last = tx.last_number()
    yield Do(
        "UPDATE heed.copies SET written = :written, position = coalesce(:position, position)"
        " WHERE $here",
        written=last,
        position=position,
    )
    return last


# ------------------------------------------------------------------------------ reads


def _users(after: str, events: int) -> Job[list[StoredUser]]:
    page: Rows = []
    found = 0  # at most
    rows = yield Run(
        "SELECT $user, user_id, next_seq FROM heed.users WHERE $here AND user_id > :after"
        " ORDER BY user_id LIMIT :most",
        after=after,
        most=MAX_USERS,
    )
    for row in rows:
        if page and found + row[2] - 1 > events:
            break
        page.append(row)
        found += row[2] - 1
    users = [user for user, _, _ in page]
    profiles = yield Run(
        f"SELECT $user, profile FROM heed.users {_OF_USERS} AND profile IS NOT NULL", users=users
    )
    profile_of: dict[int, bytes] = dict(cast(list[tuple[int, bytes]], profiles))
    rows = yield Run(_EVENTS, users=users)
    item_ids = yield from find_names("items", "item_no", "item_id", {row[3] for row in rows})
    types = yield from find_names("types", "type_no", "type", {row[4] for row in rows})
    events_of: dict[int, list[StoredEvent]] = {}
    for user, time, seq, item_no, type_no, *rest in rows:
        event = StoredEvent(time, seq, item_ids[item_no], types[type_no], *rest)
        events_of.setdefault(user, []).append(event)
    vectors = yield Run(
        f"SELECT $user, seq, key, value FROM heed.vectors {_OF_USERS} ORDER BY $user, seq",
        users=users,
    )
    claims = yield Run(
        f"SELECT $user, import_no, first_seq, last_seq FROM heed.claims {_OF_USERS}"
        " ORDER BY $user, import_no, first_seq",
        users=users,
    )
    replaced = yield Run(_REPLACED_PROFILES, rows=users)
    vectors_of, claims_of, replaced_of = map(_grouped, (vectors, claims, replaced))
    return [
        StoredUser(
            user_id=user_id,
            next_seq=next_seq,
            profile=profile_of.get(user),
            events=events_of.get(user, []),
            vectors=[StoredVectors(*row) for row in vectors_of.get(user, ())],
            claims=[StoredClaim(*row) for row in claims_of.get(user, ())],
            replaced=[StoredReplacement(*row) for row in replaced_of.get(user, ())],
        )
        for user, user_id, next_seq in page
    ]


def _item_names(after: int, limit: int) -> Job[list[tuple[int, str]]]:
    rows = yield Run(
        "SELECT item_no, item_id FROM heed.items WHERE $here AND item_no > :after"
        " ORDER BY item_no LIMIT :limit",
        after=after,
        limit=limit,
    )
    return [(number, name) for number, name in rows]


def _noted_item_names() -> Job[list[str]]:
    rows = yield Run(
        "SELECT item_id FROM heed.items WHERE $here AND item_no IN"
        " (SELECT number FROM heed.unused_names WHERE $here AND kind = 'items')"
    )
    return [item_id for (item_id,) in rows]


def _page_items(after: str, limit: int) -> Job[list[StoredItem]]:
    rows = yield Run(
        f"{_ITEMS} AND item_id > :after ORDER BY item_id LIMIT :limit", after=after, limit=limit
    )
    return (yield from _stored_items(rows))


def _find_items(item_ids: Sequence[str]) -> Job[list[StoredItem]]:
    rows = yield Run(f"{_ITEMS} AND item_id $in(ids)", ids=list(item_ids))
    return (yield from _stored_items(rows))


def _stored_items(rows: Rows) -> Job[list[StoredItem]]:
    replaced = yield Run(_REPLACED_ITEMS, rows=[row[1] for row in rows])
    replaced_of = _grouped(replaced)
    return [
        StoredItem(
            item_id=item_id,
            was_put=change is not None,
            document=document,
            embedding=embedding,
            replaced=[StoredReplacement(*row) for row in replaced_of.get(item_no, ())],
            place=(change or 0, item_no),
        )
        for item_id, item_no, change, document, embedding in rows
    ]


def _grouped(rows: Rows) -> dict[int, Rows]:
    """Return rows without their first column, by its number; equal numbers come together."""
    return {
        number: [row[1:] for row in group] for number, group in groupby(rows, key=itemgetter(0))
    }


# ------------------------------------------------------------------------------ writes


def _put_registers(tx: Transaction, registers: Registers) -> Job[None]:
    yield from imports.put_records(registers.imports)
    yield from scenarios.put_versions(registers.scenarios)
    yield from keys.put(tx, registers.keys)
    yield from add_entries(registers.forgotten)


def _put_items(tx: Transaction, items: Sequence[StoredItem]) -> Job[None]:
    numbers = tx.item_numbers(item.item_id for item in items)
    own = list(numbers.values())
    rows = yield Run(
        "SELECT item_no, document, embedding FROM heed.items WHERE $here AND item_no $in(own)",
        own=own,
    )
    old = {item_no: (document, embedding) for item_no, document, embedding in rows}
    changes = groupby((each for each in items if each.was_put), key=lambda item: item.place[0])
    replaced, later = [], []
    for rank, (_, group) in enumerate(changes):
        for item in group:
            number = numbers[item.item_id]
            replaced.append((number, old[number], (item.document, item.embedding)))
            later.append(rank)
    if replaced:
        yield from replace_items(tx, replaced, later=later)
    yield Do(
        "DELETE FROM $[replaced|heed.replaced_items] WHERE $here $[AND kind = 'item'|]"
        " AND $[row_no|item_no] $in(own)",
        own=own,
    )
    yield Insert(
        "$[replaced|replaced_items]",
        "sqlite:kind $[row_no|item_no] import_no written document embedding",
        [("item", numbers[item.item_id], *row) for item in items for row in item.replaced],
        key="import_no",
    )


def _put_users(tx: Transaction, users: Sequence[StoredUser]) -> Job[None]:
    """Drop users, and those who have events of these users, and store these."""
    users = latest_holders(users)
    names = {user.user_id for user in users}
    ids = [event.event_id for user in users for event in user.events]
    rows = yield Run(
        "SELECT DISTINCT user_id FROM heed.users WHERE $here AND $user IN ("
        "SELECT $user FROM $[events|heed.event_ids]"
        " WHERE $here AND $[event_id $in(ids)|event_key $in(keys)])",
        ids=ids,
        keys=[UUID(bytes=event_key(event_id)) for event_id in ids] if tx.by_key else [],
    )
    holders = [user_id for (user_id,) in rows]
    locked = yield from tx.lock_users({*names, *holders})
    yield from delete_users(tx, list(locked.values()))
    user_nos = yield from tx.new_user_numbers(len(users))
    keyed = [
        (user_key(user.user_id) if tx.by_key else user_no, user_no, user)
        for user_no, user in zip(user_nos, users, strict=True)
    ]
    tick = tx.tick()
    yield Insert(
        "users",
        "postgres:user_key user_no user_id version generation next_seq"
        " postgres:has_vectors profile",
        [
            (key, no, user.user_id, tick, tick, user.next_seq, bool(user.vectors), user.profile)
            for key, no, user in keyed
        ],
        key="user_id",
    )
    tally = yield from _put_events(tx, [(key, user) for key, _, user in keyed])
    yield Insert(
        "vectors",
        "$user seq key value",
        [(key, *row) for key, _, user in keyed for row in user.vectors],
        key="seq",
    )
    yield Insert(
        "claims",
        "$user import_no first_seq last_seq",
        [(key, *row) for key, _, user in keyed for row in user.claims],
        key="first_seq",
    )
    yield Insert(
        "$[replaced|replaced_profiles]",
        "sqlite:kind $[row_no|user_key] import_no written document",
        [("user", key, *row[:3]) for key, _, user in keyed for row in user.replaced],
        key="import_no",
    )
    tally.users = len(users)
    tally.bytes += USER_BYTES * len(users)
    tally.bytes += sum(len(user.profile or b"") for user in users)
    tally.bytes += sum(
        len(key or b"") + len(value or b"") for user in users for _, key, value in user.vectors
    )
    yield from tx.count(keyed[0][0], tally)


def _put_events(tx: Transaction, users: Sequence[tuple[int, StoredUser]]) -> Job[Tally]:
    events = [event for _, user in users for event in user.events]
    items = tx.item_numbers({event.item_id for event in events})
    types = tx.type_numbers({event.type for event in events})
    tally = Tally(bytes=EVENT_BYTES * len(events))
    rows: list[tuple[Any, ...]] = []
    ids: list[tuple[Any, ...]] = []
    for key, user in users:
        for time, seq, item_id, type_, weight, event_id, digest, import_no in user.events:
            tally.add(items[item_id], type_ in NEGATIVE)
            id_key, spelled = b"", None
            if tx.by_key:
                id_key = event_key(event_id)
                spelled = spelled_id(event_id, id_key)
                ids.append((id_key, key, time, seq, digest))
            rows.append(
                (
                    *(key, time, seq, items[item_id], types[type_], weight),
                    *(id_key, spelled if tx.by_key else event_id, digest, import_no),
                )
            )
    rows.sort(key=itemgetter(0, 1, 2))  # rows that are adjacent in an index are written together
    yield Insert(
        "events",
        "$user timestamp seq item_no type_no weight postgres:event_key event_id sqlite:digest"
        " import_no",
        rows,
        key="seq",
    )
    if tx.by_key:
        ids.sort()
        yield Insert("event_ids", "event_key user_key timestamp seq digest", ids, key="event_key")
    return tally
