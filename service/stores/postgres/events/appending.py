"""Appending of events to a PostgreSQL store: one transaction a batch.

Rows of users are locked first, in the order of their keys, then those of event ids: transactions
that take locks in one order do not wait for one another in a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from service.domain.errors import Conflict
from service.domain.records import DISLIKE, Event
from service.stores.base import AppendResult
from service.stores.encoding import EventIds, vector_bytes
from service.stores.event_identity import FreshEvent, event_key, find_fresh, user_key
from service.stores.postgres.database.transaction import Changed, NamespaceTransaction, Rows
from service.stores.postgres.events.names import InternedNames
from service.stores.postgres.events.tallies import (
    EVENT_BYTES,
    USER_BYTES,
    Tally,
    add_tallies,
)
from service.stores.postgres.imports.claims import add_claims

_FIND_IDS = """\
SELECT event_key, digest, timestamp, user_key, seq FROM heed.event_ids
 WHERE namespace_no = %s AND event_key = ANY(%s)"""
_FIND_USERS = """\
SELECT user_key, next_seq FROM heed.users
 WHERE namespace_no = %s AND user_key = ANY(%s::bigint[])"""
_NEW_NUMBERS = "SELECT nextval('heed.user_numbers_{}') FROM generate_series(1, %s)"
# Of a user who is known, the number in the row is not used.
_PUT_USERS = """\
INSERT INTO heed.users AS known (namespace_no, user_key, user_no, user_id, version, generation,
                                 next_seq, has_vectors)
SELECT %s, user_key, user_no, user_id, %s, %s, 1 + events, has_vectors
  FROM unnest(%s::bigint[], %s::bigint[], %s::text[], %s::integer[], %s::boolean[])
       AS new (user_key, user_no, user_id, events, has_vectors)
ON CONFLICT (namespace_no, user_key) DO UPDATE
   SET version = greatest(known.version + 1, excluded.version),
       next_seq = known.next_seq + excluded.next_seq - 1,
       has_vectors = known.has_vectors OR excluded.has_vectors
RETURNING user_key, user_no, user_id, next_seq"""
_ADD_EVENTS = """\
INSERT INTO heed.events (namespace_no, import_no, user_key, timestamp, seq, item_no, type_no,
                         weight, event_key, event_id)
SELECT %s, %s, * FROM unnest(%s::bigint[], %s::bigint[], %s::integer[], %s::integer[],
                             %s::integer[], %s::double precision[], %s::uuid[], %s::text[])"""
ADD_IDS = """\
INSERT INTO heed.event_ids (namespace_no, event_key, user_key, timestamp, seq, digest)
SELECT %s, * FROM unnest(%b::uuid[], %b::bigint[], %b::bigint[], %b::integer[], %b::bigint[])"""
ADD_VECTORS = """\
INSERT INTO heed.vectors (namespace_no, user_key, seq, key, value)
SELECT %s, * FROM unnest(%b::bigint[], %b::integer[], %b::bytea[], %b::bytea[])"""


class Appending:
    """Appends events to the log of one namespace."""

    def __init__(self, items: InternedNames, types: InternedNames) -> None:
        self._items = items
        self._types = types
        self._event_ids = EventIds()

    async def prepare(self, events: Sequence[Event]) -> None:
        """Learn the names that the events use, before the transaction."""
        await self._items.learn({event.item_id for event in events})
        await self._types.learn({event.type for event in events})

    def keys(self, events: Sequence[Event], now: int) -> list[UUID]:
        """Return the key of each event's id; of an event without one, a new one."""
        own = self._event_ids.take(sum(event.event_id is None for event in events), now)
        return [
            UUID(next(own)) if event.event_id is None else event_key(event.event_id)
            for event in events
        ]

    async def append(
        self,
        transaction: NamespaceTransaction,
        events: Sequence[Event],
        event_keys: Sequence[UUID],
        now: int,
        import_no: int | None,
    ) -> AppendResult:
        """Append events, with their `keys`, that arrived at `now`, microseconds UTC."""
        items = self._items.numbers(transaction, {event.item_id for event in events})
        types = self._types.numbers(transaction, {event.type for event in events})
        named = list(zip(events, event_keys, strict=True))
        keys = {id_: key for event, key in named if (id_ := event.event_id) is not None}
        own_keys = (key for event, key in named if event.event_id is None)
        stored = await transaction.rows(_FIND_IDS, list(keys.values())) if keys else []
        names = {key: event_id for event_id, key in keys.items()}
        known = {names[key]: (digest, timestamp) for key, digest, timestamp, _, _ in stored}
        fresh = find_fresh(events, now, known)
        if stored and transaction.is_distributed:
            await _check_seen(transaction, [(row[3], row[4]) for row in stored])
        await add_claims(transaction, import_no, [(row[3], row[2], row[4]) for row in stored])
        if not fresh:
            return AppendResult(0, len(events))
        users, created = await _put_users(transaction, fresh)
        tally = Tally(users=created, bytes=USER_BYTES * created)
        rows: list[tuple[Any, ...]] = []
        vectors: list[tuple[Any, ...]] = []
        for event, timestamp, digest in fresh:
            user = users[event.user_id]
            key, seq = user
            user[1] += 1
            item_no, type_no = items[event.item_id], types[event.type]
            tally.add(item_no, event.type == DISLIKE)
            if event.event_id is None:
                id_key, event_id = next(own_keys), None  # it is always fresh
            else:
                id_key = keys[event.event_id]
                event_id = None if str(id_key) == event.event_id else event.event_id
            place = (key, timestamp, seq)
            rows.append((*place, item_no, type_no, event.weight, id_key, event_id, digest))
            if event.key is not None or event.value is not None:
                blobs = _blob(event.key), _blob(event.value)
                vectors.append((key, seq, *blobs))
                tally.bytes += sum(len(blob) for blob in blobs if blob is not None)
        tally.bytes += EVENT_BYTES * len(rows)
        rows.sort()  # rows that are adjacent in an index are written together
        *columns, digests = map(list, zip(*rows, strict=True))
        await transaction.execute(_ADD_EVENTS, import_no, *columns)
        user_keys, timestamps, seqs, _, _, _, id_keys, _ = columns
        ids = sorted(zip(id_keys, user_keys, timestamps, seqs, digests, strict=True))
        await transaction.execute(ADD_IDS, *map(list, zip(*ids, strict=True)))
        if vectors:
            await transaction.execute(ADD_VECTORS, *map(list, zip(*vectors, strict=True)))
        await add_tallies(transaction, rows[0][0], tally)
        return AppendResult(len(rows), len(events) - len(rows))


async def _check_seen(transaction: NamespaceTransaction, places: Sequence[tuple[int, int]]) -> None:
    """Raise `Changed` where events, by user_key and seq, cannot be seen yet although their ids can.

    Ids and events are on different workers. A duplicate is acknowledged, so its event must be part
    of the next answer.
    """
    keys = sorted({key for key, _ in places})
    next_seqs: dict[int, int] = dict(await transaction.rows(_FIND_USERS, keys))
    if any(next_seqs.get(key, 0) <= seq for key, seq in places):
        raise Changed


async def _put_users(
    transaction: NamespaceTransaction, fresh: Sequence[FreshEvent]
) -> tuple[dict[str, list[int]], int]:
    """Lock the users of events, create unknown ones, and move their versions and seqs on.

    Returns:
        `[user_key, first seq]` of each user, and the number of users that were created.
    """
    counts = Counter(event.user_id for event, _, _ in fresh)
    with_vectors = {
        event.user_id for event, _, _ in fresh if event.key is not None or event.value is not None
    }
    return await put_users(transaction, counts, with_vectors)


async def put_users(
    transaction: NamespaceTransaction, counts: Counter[str], with_vectors: set[str]
) -> tuple[dict[str, list[int]], int]:
    """Give users, who are created where they are unknown, a new version and so many seqs.

    Returns:
        `[user_key, first seq]` of each user, and the number of users that were created.

    Raises:
        Conflict: two users have one key.
    """
    by_key = {user_key(user_id): user_id for user_id in counts}
    if len(by_key) < len(counts):
        by_id = {user_key(user_id): user_id for user_id in reversed(counts)}
        raise same_key(*next((a, b) for key, a in by_key.items() if (b := by_id[key]) != a))
    ordered = sorted(by_key)
    found = {key for key, _ in await transaction.rows(_FIND_USERS, ordered)}
    numbers: dict[int, int] = dict.fromkeys(ordered, 0)
    new = [key for key in ordered if key not in found]
    if new:
        numbers |= zip(new, await new_user_numbers(transaction, len(new)), strict=True)
    ids = [by_key[key] for key in ordered]
    rows: Rows = await transaction.rows(
        _PUT_USERS,
        transaction.tick,
        transaction.tick,
        ordered,
        list(numbers.values()),
        ids,
        [counts[user_id] for user_id in ids],
        [user_id in with_vectors for user_id in ids],
    )
    users: dict[str, list[int]] = {}
    created = 0
    for key, user_no, user_id, next_seq in rows:
        if user_id != by_key[key]:
            raise same_key(user_id, by_key[key])
        if user_no == 0:  # forgotten since they were looked for
            raise Changed
        created += user_no == numbers[key]
        users[user_id] = [key, next_seq - counts[user_id]]
    return users, created


async def new_user_numbers(transaction: NamespaceTransaction, count: int) -> list[int]:
    """Return so many numbers for new users."""
    cursor = await transaction.connection.execute(
        _NEW_NUMBERS.format(transaction.namespace_no).encode(), (count,)
    )
    return [number for (number,) in await cursor.fetchall()]


def same_key(first: str, second: str) -> Conflict:
    """Return the error for two users of one key."""
    return Conflict(
        f"user_id {second!r} cannot be stored: its 63-bit hash is that of {first!r}, which happens "
        "once in some billions of users; use another id for one of them"
    )


def _blob(vector: Any) -> bytes | None:
    return None if vector is None else vector_bytes(vector)
