"""Appending of events to a PostgreSQL store: one transaction a batch.

Rows of users are locked first, in the order of their keys, then those of event ids: transactions
that take locks in one order do not wait for one another in a circle. Appends to the same
users wait until the commit, so that all columns but the seqs are encoded before.

Most batches have no event that is stored already, so their ids are not looked for: where fewer ids
than events were new, the next attempt looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from psycopg import AsyncCursor

from service.domain.errors import Conflict
from service.domain.records import NEGATIVE, Event
from service.stores.encoding import (
    EventIds,
    FreshEvent,
    blob_from,
    event_key,
    find_fresh,
    spelled_id,
    user_key,
)
from service.stores.jobs import Changed, Rows, Tally
from service.stores.postgres.dialect import bigints, doubles, integers, uuids
from service.stores.postgres.names import InternedNames
from service.stores.postgres.transaction import PostgresTransaction
from service.stores.records import imports
from service.stores.records.users import EVENT_BYTES, USER_BYTES
from service.stores.values import AppendResult

_FIND_IDS = """\
SELECT event_key, digest, timestamp, user_key, seq FROM heed.event_ids
 WHERE namespace_no = %s AND event_key = ANY(%s::uuid[])"""
_FIND_USERS = """\
SELECT user_key, next_seq FROM heed.users
 WHERE namespace_no = %s AND user_key = ANY(%s::bigint[])"""
_ADD_EVENTS = """\
INSERT INTO heed.events (namespace_no, import_no, user_key, timestamp, seq, item_no, type_no,
                         weight, event_key, event_id)
SELECT %s, %s, * FROM unnest(%s::bigint[], %s::bigint[], %s::integer[], %s::integer[],
                             %s::integer[], %s::double precision[], %s::uuid[], %b::text[])"""
_ADD_IDS = """\
INSERT INTO heed.event_ids (namespace_no, event_key, user_key, timestamp, seq, digest)
SELECT %s, * FROM unnest(%s::uuid[], %s::bigint[], %s::bigint[], %s::integer[], %s::bigint[])"""
_ADD_NEW_IDS = f"{_ADD_IDS}\nON CONFLICT (namespace_no, event_key) DO NOTHING RETURNING true"
_ADD_VECTORS = """\
INSERT INTO heed.vectors (namespace_no, user_key, seq, key, value)
SELECT %s, * FROM unnest(%b::bigint[], %b::integer[], %b::bytea[], %b::bytea[])"""


@dataclass
class Batch:
    """Events that arrived at `now`, microseconds UTC, with the keys of their ids."""

    events: Sequence[Event]
    keys: Sequence[bytes]
    now: int
    import_no: int | None
    was_tried: bool = False


class Appending:
    """Appends events to the log of one namespace."""

    def __init__(self, items: InternedNames, types: InternedNames) -> None:
        self._items = items
        self._types = types
        self._event_ids = EventIds()
        self._known_users: set[int] = set()
        self._expects_stored = False  # as some of the batch were that was looked for last

    async def prepare(self, events: Sequence[Event]) -> None:
        """Learn the names that the events use, before the transaction."""
        await self._items.learn({event.item_id for event in events})
        await self._types.learn({event.type for event in events})

    def batch(self, events: Sequence[Event], now: int, import_no: int | None) -> Batch:
        """Give each event the key of its id; one without an id, a new key."""
        own = self._event_ids.take(sum(event.event_id is None for event in events), now)
        keys = [
            event_key(next(own) if event.event_id is None else event.event_id) for event in events
        ]
        return Batch(events, keys, now, import_no)

    async def append(self, transaction: PostgresTransaction, batch: Batch) -> AppendResult:
        """Append a batch. Raises `Changed` where an event is stored that was not looked for."""
        events, now, import_no = batch.events, batch.now, batch.import_no
        looks = batch.was_tried or self._expects_stored
        batch.was_tried = True
        items = transaction.item_numbers({event.item_id for event in events})
        types = transaction.type_numbers({event.type for event in events})
        named = list(zip(events, batch.keys, strict=True))
        keys = {id_: key for event, key in named if (id_ := event.event_id) is not None}
        stored: Rows = []
        if keys and looks:
            stored = await transaction.rows(_FIND_IDS, uuids(keys.values()))
            self._expects_stored = bool(stored)
        names = {key: event_id for event_id, key in keys.items()} if stored else {}
        known = {names[key.bytes]: (digest, timestamp) for key, digest, timestamp, _, _ in stored}
        try:
            fresh = find_fresh(events, now, known)
        except Conflict:
            if looks:
                raise
            raise Changed from None  # a stored time may be the one that the others agree with
        if stored and transaction.is_distributed:
            await _check_seen(transaction, [(row[3], row[4]) for row in stored])
        places = [(row[3], row[2], row[4]) for row in stored]
        await transaction.run(imports.claim_places(import_no, places))
        if not fresh:
            return AppendResult(0, len(events))
        own = (key for event, key in named if event.event_id is None)  # which are always fresh
        id_keys = [
            next(own) if event.event_id is None else keys[event.event_id] for event, _, _ in fresh
        ]
        rows = _EventRows(fresh, items, types, id_keys)
        users, created = await transaction.run(
            transaction.put_counted_users(rows.counts, rows.with_vectors, self._known_users)
        )
        ids = await rows.insert(transaction, users, import_no)
        rows.tally.users += created
        rows.tally.bytes += USER_BYTES * created
        await transaction.run(transaction.count(rows.any_user, rows.tally))
        await ids.fetchone()  # the results up to here arrive
        if ids.rowcount < len(fresh):
            raise Changed
        return AppendResult(len(fresh), len(events) - len(fresh))


async def _check_seen(transaction: PostgresTransaction, places: Sequence[tuple[int, int]]) -> None:
    """Raise `Changed` where events, by user_key and seq, cannot be seen yet although their ids can.

    Ids and events are on different workers. A duplicate is acknowledged, so its event must be part
    of the next answer.
    """
    keys = sorted({key for key, _ in places})
    next_seqs: dict[int, int] = dict(await transaction.rows(_FIND_USERS, bigints(keys)))
    if any(next_seqs.get(key, 0) <= seq for key, seq in places):
        raise Changed


class _EventRows:
    """Rows of new events, encoded but for their seqs, which the rows of their users give.

    Rows that are adjacent in an index are written together: events by user and time, ids by
    themselves.
    """

    def __init__(
        self,
        fresh: Sequence[FreshEvent],
        items: Mapping[str, int],
        types: Mapping[str, int],
        id_keys: Sequence[bytes],
    ) -> None:
        events = [event for event, _, _ in fresh]
        self._events = events
        self._users = [event.user_id for event in events]
        self.counts = Counter(self._users)
        self._behind = _ranks(self._users)
        keys = {user_id: user_key(user_id) for user_id in self.counts}
        user_keys = np.array([keys[user_id] for user_id in self._users], np.int64)
        timestamps = np.array([timestamp for _, timestamp, _ in fresh], np.int64)
        item_nos = [items[event.item_id] for event in events]
        ids = np.frombuffer(b"".join(id_keys), "V16")
        order = self._order = np.lexsort((timestamps, user_keys))  # equal ones as they arrived
        places = order.tolist()
        self._before_seqs = bigints(user_keys[order]), bigints(timestamps[order])
        self._after_seqs = (
            integers([item_nos[place] for place in places]),
            integers([types[events[place].type] for place in places]),
            doubles([events[place].weight for place in places]),
            uuids(ids[order]),
            [spelled_id(events[place].event_id, id_keys[place]) for place in places],
        )
        low, high = ids.view(">u8").reshape(-1, 2).T[::-1]
        self._id_order = by_id = np.lexsort((low, high))
        self._id_columns = uuids(ids[by_id]), bigints(user_keys[by_id]), bigints(timestamps[by_id])
        self._digests = bigints(np.array([digest for _, _, digest in fresh], np.int64)[by_id])
        self.any_user = int(user_keys[0])
        self.with_vectors = {event.user_id for event in events if _has_vectors(event)}
        self.tally = Tally(bytes=EVENT_BYTES * len(events))
        for item_no, event in zip(item_nos, events, strict=True):
            self.tally.add(item_no, event.type in NEGATIVE)

    async def insert(
        self,
        transaction: PostgresTransaction,
        users: Mapping[str, Sequence[int]],
        import_no: int | None,
    ) -> AsyncCursor:
        """Insert the rows; return the cursor of the ids, which leaves out those that are known.

        Args:
            transaction: holds the locks of the users.
            users: key and first seq of each user.
            import_no: that the events go with.
        """
        seqs = self._behind + np.array([users[user_id][1] for user_id in self._users], np.int64)
        await transaction.execute(
            _ADD_EVENTS,
            import_no,
            *self._before_seqs,
            integers(seqs[self._order]),
            *self._after_seqs,
        )
        ids = await transaction.execute(
            _ADD_NEW_IDS, *self._id_columns, integers(seqs[self._id_order]), self._digests
        )
        if not self.with_vectors:
            return ids
        vectors = [
            (users[event.user_id][0], seq, blob_from(event.key), blob_from(event.value))
            for event, seq in zip(self._events, seqs.tolist(), strict=True)
            if _has_vectors(event)
        ]
        await transaction.execute(_ADD_VECTORS, *map(list, zip(*vectors, strict=True)))
        self.tally.bytes += sum(len(blob or b"") for row in vectors for blob in row[2:])
        return ids


def _has_vectors(event: Event) -> bool:
    return event.key is not None or event.value is not None


def _ranks(names: Iterable[str]) -> NDArray[np.int64]:
    """Return of each name how many equal ones come before it."""
    seen: dict[str, int] = {}
    ranks = []
    for name in names:
        rank = seen.get(name, 0)
        seen[name] = rank + 1
        ranks.append(rank)
    return np.array(ranks, np.int64)
