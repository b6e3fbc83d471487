"""Changes of users in a PostgreSQL store: profiles, deleted events, merging."""

from __future__ import annotations

from collections import Counter
from typing import Any
from uuid import UUID

from service.domain.records import User
from service.stores.encoding import user_document, user_from
from service.stores.event_identity import event_key, user_key
from service.stores.postgres.database.transaction import Changed, NamespaceTransaction
from service.stores.postgres.events.appending import put_users
from service.stores.postgres.events.tallies import (
    EVENT_BYTES,
    USER_BYTES,
    Tally,
    add_tallies,
    negative_types,
)
from service.stores.postgres.forgetting import drop_user, note_names
from service.stores.postgres.imports.replaced import keep_replaced_profile

_LOCK_USER = """\
SELECT user_key, user_id, user_no, next_seq, profile FROM heed.users
 WHERE namespace_no = %s AND user_key = %s FOR UPDATE"""
_FIND_EVENT = """\
SELECT timestamp, seq FROM heed.event_ids
 WHERE namespace_no = %s AND event_key = %s AND user_key = %s"""
_DELETE_EVENT = """\
DELETE FROM heed.events
 WHERE namespace_no = %s AND user_key = %s AND timestamp = %s AND seq = %s AND event_key = %s
RETURNING item_no, type_no"""
_DELETE_ID = "DELETE FROM heed.event_ids WHERE namespace_no = %s AND event_key = %s"
_DELETE_VECTORS = """\
DELETE FROM heed.vectors WHERE namespace_no = %s AND user_key = %s AND seq = %s
RETURNING coalesce(octet_length(key), 0) + coalesce(octet_length(value), 0)"""
_REWRITE = """\
UPDATE heed.users SET version = greatest(version + 1, %s), generation = greatest(version + 1, %s)
 WHERE namespace_no = %s AND user_key = %s"""
_PUT_PROFILE = "UPDATE heed.users SET profile = %s WHERE namespace_no = %s AND user_key = %s"

# Rows move by deletion and insertion, since they go to another partition.
_MOVE_EVENTS = """\
WITH moved AS (DELETE FROM heed.events WHERE namespace_no = %(no)s AND user_key = %(source)s
               RETURNING *),
added AS (
  INSERT INTO heed.events (user_key, timestamp, weight, namespace_no, seq, item_no, type_no,
                           import_no, event_key, event_id)
  SELECT %(target)s, timestamp, weight, namespace_no, seq + %(shift)s, item_no, type_no, import_no,
         event_key, event_id FROM moved)
SELECT count(*) FROM moved"""
_MOVE_IDS = """\
WITH moved AS (
  UPDATE heed.event_ids SET user_key = %(target)s, seq = seq + %(shift)s
   WHERE namespace_no = %(no)s AND user_key = %(source)s AND event_key = ANY(ARRAY(
         SELECT event_key FROM heed.events
          WHERE namespace_no = %(no)s AND user_key = %(target)s AND seq > %(shift)s))
  RETURNING 1)
SELECT count(*) FROM moved"""
_MOVE_VECTORS = """\
WITH moved AS (DELETE FROM heed.vectors WHERE namespace_no = %(no)s AND user_key = %(source)s
               RETURNING *)
INSERT INTO heed.vectors (user_key, namespace_no, seq, key, value)
SELECT %(target)s, namespace_no, seq + %(shift)s, key, value FROM moved"""
_MOVE_CLAIMS = """\
WITH moved AS (DELETE FROM heed.claims WHERE namespace_no = %(no)s AND user_key = %(source)s
               RETURNING *)
INSERT INTO heed.claims (user_key, namespace_no, import_no, first_seq, last_seq)
SELECT %(target)s, namespace_no, import_no, first_seq + %(shift)s, last_seq + %(shift)s
  FROM moved"""
_AFTER_MERGE = """\
UPDATE heed.users AS target
   SET next_seq = target.next_seq - 1 + %(seqs)s,
       has_vectors = target.has_vectors OR EXISTS (
         SELECT FROM heed.vectors WHERE namespace_no = %(no)s AND user_key = %(target)s)
 WHERE namespace_no = %(no)s AND user_key = %(target)s"""


async def lock_users(
    transaction: NamespaceTransaction, *user_ids: str
) -> dict[str, tuple[Any, ...]]:
    """Lock the rows of users; return the key, number, next seq and profile of those known."""
    locked: dict[str, tuple[Any, ...]] = {}
    for key in sorted({user_key(user_id) for user_id in user_ids}):
        row = await transaction.row(_LOCK_USER, key)
        if row is not None and row[1] in user_ids:
            locked[row[1]] = (row[0], *row[2:])
    return locked


async def rewrite_history(transaction: NamespaceTransaction, key: int) -> None:
    """Record a change of a user's events that is not an append."""
    tick, no = transaction.tick, transaction.namespace_no
    await transaction.connection.execute(_REWRITE.encode(), (tick, tick, no, key))


async def delete_event(transaction: NamespaceTransaction, user_id: str, event_id: str) -> bool:
    """`Store.delete_event`."""
    user = (await lock_users(transaction, user_id)).get(user_id)
    if user is None:
        return False
    key, id_key = user[0], UUID(bytes=event_key(event_id))
    place = await transaction.row(_FIND_EVENT, id_key, key)
    if place is None:
        return False
    deleted = await transaction.row(_DELETE_EVENT, key, *place, id_key)
    if deleted is None:
        raise Changed
    item_no, type_no = deleted
    await note_names(transaction, [item_no], [type_no])
    await transaction.execute(_DELETE_ID, id_key)
    vectors = await transaction.row(_DELETE_VECTORS, key, place[1])
    await rewrite_history(transaction, key)
    tally = Tally(bytes=-EVENT_BYTES - (0 if vectors is None else vectors[0]))
    tally.add(item_no, type_no in await negative_types(transaction), -1)
    await add_tallies(transaction, key, tally)
    return True


async def merge(transaction: NamespaceTransaction, user_id: str, source: str) -> int:
    """`Store.merge`."""
    found = await lock_users(transaction, user_id, source)
    if source not in found:
        return 0
    if user_id not in found:
        await put_users(transaction, Counter({user_id: 0}), set(), set())
        await add_tallies(transaction, user_key(user_id), Tally(users=1, bytes=USER_BYTES))
        found = await lock_users(transaction, user_id, source)
        if len(found) < 2:
            raise Changed
    source_key, source_no, source_seq, theirs = found[source]
    target_key, _, next_seq, ours = found[user_id]
    # Seqs start at 1: the source's follow the target's, gaps and all.
    values = {
        "no": transaction.namespace_no,
        "source": source_key,
        "target": target_key,
        "shift": next_seq - 1,
        "seqs": source_seq,
    }
    execute = transaction.connection.execute
    ((moved,),) = await (await execute(_MOVE_EVENTS.encode(), values)).fetchall()
    ((ids,),) = await (await execute(_MOVE_IDS.encode(), values)).fetchall()
    if ids != moved:
        raise Changed  # ids of a transaction that cannot be seen everywhere yet
    for statement in (_MOVE_VECTORS, _MOVE_CLAIMS, _AFTER_MERGE):
        await execute(statement.encode(), values)
    if theirs is not None:
        first, second = user_from(user_id, ours), user_from(source, theirs)
        interests = dict.fromkeys(first.interests + second.interests)
        merged = User(user_id, {**second.attributes, **first.attributes}, tuple(interests))
        profile = user_document(merged)
        no = transaction.namespace_no
        await execute(_PUT_PROFILE.encode(), (profile, no, target_key))
        grown = len(profile) - len(ours or b"")
        await add_tallies(transaction, target_key, Tally(bytes=grown))
    await rewrite_history(transaction, target_key)
    await drop_user(transaction, source_key, source_no, len(theirs or b""))
    return int(moved)


async def put_user(
    transaction: NamespaceTransaction, user_id: str, profile: bytes, import_no: int | None
) -> None:
    """`Store.put_user`."""
    users, created = await put_users(transaction, Counter({user_id: 0}), set(), set())
    key, _ = users[user_id]
    row = await transaction.row(
        "SELECT profile FROM heed.users WHERE namespace_no = %s AND user_key = %s", key
    )
    old = None if row is None else row[0]
    if import_no is not None and old != profile:
        await keep_replaced_profile(transaction, import_no, key, old, profile)
    no = transaction.namespace_no
    await transaction.connection.execute(_PUT_PROFILE.encode(), (profile, no, key))
    grown = len(profile) - len(old or b"") + created * USER_BYTES
    await add_tallies(transaction, key, Tally(users=created, bytes=grown))
