"""Bulk writes of whole users into a PostgreSQL store that is the target of a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from service.domain.records import NEGATIVE
from service.stores.event_identity import event_key, spelled_id, user_key
from service.stores.postgres.database.arrays import bigints, doubles, integers, uuids
from service.stores.postgres.database.transaction import NamespaceTransaction, Rows
from service.stores.postgres.events.appending import (
    ADD_IDS,
    ADD_VECTORS,
    new_user_numbers,
    same_key,
)
from service.stores.postgres.events.names import InternedNames
from service.stores.postgres.events.tallies import (
    EVENT_BYTES,
    USER_BYTES,
    Tally,
    add_tallies,
    negative_types,
)
from service.stores.postgres.forgetting import drop_user, note_names
from service.stores.protocols.bulk_access import StoredUser, latest_holders

_ROWS = 50_000  # in one statement, of a user with very many

_FIND = """\
SELECT user_key, user_id, user_no, octet_length(profile) FROM heed.users
 WHERE namespace_no = %s AND user_key = %b FOR UPDATE"""
_PUT = """\
INSERT INTO heed.users AS known (namespace_no, version, generation, user_key, user_no, user_id,
                                 next_seq, has_vectors, profile)
SELECT %s, %s, %s, * FROM unnest(%b::bigint[], %b::bigint[], %b::text[], %b::integer[],
                                 %b::boolean[], %b::bytea[])
ON CONFLICT (namespace_no, user_key) DO UPDATE
   SET version = greatest(known.version + 1, excluded.version),
       generation = greatest(known.version + 1, excluded.version),
       next_seq = excluded.next_seq, has_vectors = excluded.has_vectors,
       profile = excluded.profile"""
_DELETE_EVENTS = """\
DELETE FROM heed.events WHERE namespace_no = %s AND user_key = ANY(%b::bigint[])
RETURNING event_key, item_no, type_no"""
_DELETE_IDS = "DELETE FROM heed.event_ids WHERE namespace_no = %s AND event_key = ANY(%b)"
_DELETE_VECTORS = """\
WITH gone AS (DELETE FROM heed.vectors WHERE namespace_no = %s AND user_key = ANY(%b::bigint[])
              RETURNING coalesce(octet_length(key), 0) + coalesce(octet_length(value), 0) AS size)
SELECT coalesce(sum(size), 0)::bigint FROM gone"""
_DELETE_CLAIMS = "DELETE FROM heed.claims WHERE namespace_no = %s AND user_key = ANY(%b::bigint[])"
_DELETE_REPLACED = """\
DELETE FROM heed.replaced_profiles WHERE namespace_no = %s AND user_key = ANY(%b::bigint[])"""
_HOLDERS = """\
SELECT DISTINCT user_key FROM heed.event_ids
 WHERE namespace_no = %s AND event_key = ANY(%s::uuid[])"""
_ADD_EVENTS = """\
INSERT INTO heed.events (namespace_no, user_key, timestamp, seq, item_no, type_no, weight,
                         event_key, event_id, import_no)
SELECT %s, * FROM unnest(%s::bigint[], %s::bigint[], %s::integer[], %s::integer[], %s::integer[],
                         %s::double precision[], %s::uuid[], %b::text[], %b::integer[])"""
_ADD_CLAIMS = """\
INSERT INTO heed.claims (namespace_no, user_key, import_no, first_seq, last_seq)
SELECT %s, * FROM unnest(%b::bigint[], %b::integer[], %b::integer[], %b::integer[])"""
_ADD_REPLACED = """\
INSERT INTO heed.replaced_profiles (namespace_no, user_key, import_no, written, document)
SELECT %s, * FROM unnest(%b::bigint[], %b::integer[], %b::bigint[], %b::bytea[])"""


class PostgresUserWrites:
    """Changes of users in transactions."""

    def __init__(self, items: InternedNames, types: InternedNames) -> None:
        self._items = items
        self._types = types

    async def prepare(self, users: Sequence[StoredUser]) -> None:
        """Learn the names that the events use, before the transaction."""
        await self._items.learn({event.item_id for user in users for event in user.events})
        await self._types.learn({event.type for user in users for event in user.events})

    async def put_users(
        self,
        transaction: NamespaceTransaction,
        users: Sequence[StoredUser],
        absent: Sequence[str],
        *,
        evict: bool,
    ) -> None:
        """`BulkAccess.put_users`, in the first attempt without `evict`.

        Args:
            transaction: of the write.
            users: to be stored.
            absent: ids of users.
            evict: drop others who have events of these users.

        Raises:
            Conflict: two users have one key.
            psycopg.errors.UniqueViolation: without `evict`, others have events of these users.
        """
        if evict:
            users = latest_holders(users)
        keys, without = {user_key(user.user_id): user for user in users}, frozenset(absent)
        if len(keys) < len(users):
            other = next(user for user in users if keys[user_key(user.user_id)] is not user)
            raise same_key(other.user_id, keys[user_key(other.user_id)].user_id)
        wanted = {*keys, *(user_key(user_id) for user_id in absent)}
        found = await transaction.rows_of_each(_FIND, sorted(wanted))
        for key, user_id, _, _ in found:
            if key in keys and user_id != keys[key].user_id:
                raise same_key(user_id, keys[key].user_id)
        known = [row for row in found if row[0] in keys]
        gone = [row for row in found if row[0] not in keys and row[1] in without]
        if evict:
            ids = uuids(event_key(event.event_id) for user in users for event in user.events)
            holders = [key for (key,) in await transaction.rows(_HOLDERS, ids) if key not in keys]
            held = await transaction.rows_of_each(_FIND, sorted(holders))
            gone += [row for row in held if row not in gone]
        if known or gone:
            await self._delete_rows(transaction, [row[0] for row in (*known, *gone)])
        for key, _, user_no, profile_bytes in gone:
            await drop_user(transaction, key, user_no, profile_bytes or 0)
        if users:
            await self._insert(transaction, keys, known)

    async def _delete_rows(self, transaction: NamespaceTransaction, keys: list[int]) -> None:
        """Delete everything about users but their own rows."""
        negative = await negative_types(transaction)
        rows = await transaction.rows(_DELETE_EVENTS, keys)
        await note_names(transaction, {row[1] for row in rows}, {row[2] for row in rows})
        tally = Tally(bytes=-EVENT_BYTES * len(rows))
        for _, item_no, type_no in rows:
            tally.add(item_no, type_no in negative, -1)
        await transaction.execute(_DELETE_IDS, [id_key for id_key, _, _ in rows])
        ((size,),) = await transaction.rows(_DELETE_VECTORS, keys)
        tally.bytes -= size
        await transaction.execute(_DELETE_CLAIMS, keys)
        await transaction.execute(_DELETE_REPLACED, keys)
        await add_tallies(transaction, keys[0], tally)

    async def _insert(
        self, transaction: NamespaceTransaction, users: dict[int, StoredUser], known: Rows
    ) -> None:
        """Insert users by their keys, or replace the rows of the known ones."""
        known_numbers = {key: user_no for key, _, user_no, _ in known}
        new = [key for key in sorted(users) if key not in known_numbers]
        numbers = known_numbers | dict(
            zip(new, await new_user_numbers(transaction, len(new)), strict=True)
        )
        rows = [
            (
                key,
                numbers[key],
                user.user_id,
                user.next_seq,
                bool(user.vectors),
                user.profile,
            )
            for key, user in sorted(users.items())
        ]
        await transaction.execute(_PUT, transaction.tick, transaction.tick, *_columns(rows))
        tally = Tally(users=len(new), bytes=USER_BYTES * len(new))
        tally.bytes += sum(len(user.profile or b"") for user in users.values())
        tally.bytes -= sum(size or 0 for *_, size in known)
        await self._add_events(transaction, users, tally)
        vectors = [(key, *row) for key, user in users.items() for row in user.vectors]
        if vectors:
            await transaction.execute(ADD_VECTORS, *_columns(vectors))
            tally.bytes += sum(len(own or b"") + len(value or b"") for *_, own, value in vectors)
        claims = [(key, *row) for key, user in users.items() for row in user.claims]
        if claims:
            await transaction.execute(_ADD_CLAIMS, *_columns(claims))
        replaced = [(key, *row[:3]) for key, user in users.items() for row in user.replaced]
        if replaced:
            await transaction.execute(_ADD_REPLACED, *_columns(replaced))
        await add_tallies(transaction, next(iter(users)), tally)

    async def _add_events(
        self, transaction: NamespaceTransaction, users: dict[int, StoredUser], tally: Tally
    ) -> None:
        items = self._items.numbers(
            transaction, {event.item_id for user in users.values() for event in user.events}
        )
        types = self._types.numbers(
            transaction, {event.type for user in users.values() for event in user.events}
        )
        rows: list[tuple[Any, ...]] = []
        ids: list[tuple[Any, ...]] = []
        for key, user in users.items():
            for time, seq, item_id, type_, weight, event_id, digest, import_no in user.events:
                item_no, id_key = items[item_id], event_key(event_id)
                given = spelled_id(event_id, id_key)
                tally.add(item_no, type_ in NEGATIVE)
                rows.append(
                    (key, time, seq, item_no, types[type_], weight, id_key, given, import_no)
                )
                ids.append((id_key, key, time, seq, digest))
        tally.bytes += EVENT_BYTES * len(rows)
        rows.sort()  # rows that are adjacent in an index are written together
        ids.sort()
        for start in range(0, len(rows), _ROWS):
            keys, times, seqs, item_nos, type_nos, weights, id_keys, given_ids, imports = _columns(
                rows[start : start + _ROWS]
            )
            await transaction.execute(
                _ADD_EVENTS,
                *(bigints(keys), bigints(times), integers(seqs), integers(item_nos)),
                *(integers(type_nos), doubles(weights), uuids(id_keys), given_ids, imports),
            )
            id_keys, keys, times, seqs, digests = _columns(ids[start : start + _ROWS])
            await transaction.execute(
                ADD_IDS,
                *(uuids(id_keys), bigints(keys), bigints(times), integers(seqs)),
                bigints(digests),
            )


def _columns(rows: Iterable[tuple[Any, ...]]) -> Iterator[list[Any]]:
    return map(list, zip(*rows, strict=True))
