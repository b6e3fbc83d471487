"""Users: their profiles, and changes of their events that are not appends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast
from uuid import UUID

from service.domain.records import NEGATIVE, User
from service.stores.encoding import (
    document_digest,
    event_key,
    first_user,
    user_document,
    user_from,
    user_key,
    users_page,
)
from service.stores.jobs import (
    Changed,
    Delete,
    Do,
    Insert,
    Job,
    Run,
    Tally,
    Transaction,
    Update,
    UserRow,
)

EVENT_BYTES = 280  # in PostgreSQL, of an event with its ids and indexes, measured
USER_BYTES = 400

PROFILES = """\
SELECT user_id, profile FROM heed.users WHERE $here AND profile IS NOT NULL ORDER BY user_id"""
USER_IDS = "SELECT user_id FROM heed.users WHERE $here ORDER BY user_id"

_VECTOR_BYTES = "coalesce(octet_length(key), 0) + coalesce(octet_length(value), 0)"
# PostgreSQL's rows move by deletion and insertion, since they go to another partition.
_MOVE = (
    """\
$[UPDATE events SET user_no = :target, seq = seq + :shift WHERE user_no = :source|
WITH moved AS (DELETE FROM heed.events WHERE $here AND user_key = :source RETURNING *)
INSERT INTO heed.events (user_key, timestamp, weight, namespace_no, seq, item_no, type_no,
                         import_no, event_key, event_id)
SELECT :target, timestamp, weight, namespace_no, seq + :shift, item_no, type_no, import_no,
       event_key, event_id FROM moved]""",
    """\
$[UPDATE vectors SET user_no = :target, seq = seq + :shift WHERE user_no = :source|
WITH moved AS (DELETE FROM heed.vectors WHERE $here AND user_key = :source RETURNING *)
INSERT INTO heed.vectors (user_key, namespace_no, seq, key, value)
SELECT :target, namespace_no, seq + :shift, key, value FROM moved]""",
    """\
$[UPDATE claims SET user_no = :target, first_seq = first_seq + :shift,
                    last_seq = last_seq + :shift WHERE user_no = :source|
WITH moved AS (DELETE FROM heed.claims WHERE $here AND user_key = :source RETURNING *)
INSERT INTO heed.claims (user_key, namespace_no, import_no, first_seq, last_seq)
SELECT :target, namespace_no, import_no, first_seq + :shift, last_seq + :shift FROM moved]""",
    """\
UPDATE heed.users
   SET next_seq = next_seq - 1 + :seqs$[|, has_vectors = has_vectors OR EXISTS (
         SELECT FROM heed.vectors WHERE $here AND user_key = :target)]
 WHERE $here AND $user = :target""",
)
_MOVE_IDS = """\
WITH moved AS (
  UPDATE heed.event_ids SET user_key = :target, seq = seq + :shift
   WHERE $here AND user_key = :source AND event_key = ANY(ARRAY(
         SELECT event_key FROM heed.events
          WHERE $here AND user_key = :target AND seq > :shift))
  RETURNING 1)
SELECT count(*) FROM moved"""
_DELETE_IDS = """\
WITH gone AS (
  DELETE FROM heed.event_ids WHERE $here AND event_key = ANY(ARRAY(
    SELECT event_key FROM heed.events WHERE $here AND {}))
  RETURNING 1)
SELECT count(*) FROM gone"""


# ------------------------------------------------------------------------------ profiles


def put_user(tx: Transaction, user_id: str, profile: bytes, import_no: int | None) -> Job[None]:
    """`Store.put_user`."""
    user = (yield from tx.put_users([user_id]))[user_id]
    rows = yield Run("SELECT profile FROM heed.users WHERE $here AND $user = :user", user=user)
    old = rows[0][0] if rows else None
    if import_no is not None and old != profile:
        # An import that is undone restores what it has replaced, unless it wrote that itself.
        yield Insert(
            "$[replaced|replaced_profiles]",
            "sqlite:kind $[row_no|user_key] import_no written document",
            [("user", user, import_no, document_digest((profile, None)), old)],
            key="$[kind row_no|user_key] import_no",
            update="written = excluded.written",
        )
    yield from _set_profile(tx, user, old, profile)


def put_profile(tx: Transaction, user: int, old: bytes | None, profile: bytes | None) -> Job[None]:
    """Replace a stored user's profile, and give the user a new version."""
    yield Do(
        "UPDATE heed.users SET version = $[:tick|greatest(version + 1, :tick)]"
        " WHERE $here AND $user = :user",
        tick=tx.tick(),
        user=user,
    )
    yield from _set_profile(tx, user, old, profile)


def _set_profile(tx: Transaction, user: int, old: bytes | None, profile: bytes | None) -> Job[None]:
    yield Update("users", "$user profile", [(user, profile)])
    yield from tx.count(user, Tally(bytes=len(profile or b"") - len(old or b"")))


def get_user(user_id: str) -> Job[User | None]:
    """`Store.get_user`."""
    rows = yield Run(
        "SELECT profile FROM heed.users WHERE $here AND $[|user_key = :key AND ]user_id = :id",
        id=user_id,
        key=user_key(user_id),
    )
    return user_from(user_id, rows[0][0]) if rows else None


def page_users(cursor: str | None, limit: int, prefix: str) -> Job[tuple[list[User], str | None]]:
    """`Store.page_users`."""
    rows = yield Run(
        "SELECT user_id, profile FROM heed.users WHERE $here AND user_id >= :start"
        " ORDER BY user_id LIMIT :most",
        start=first_user(cursor, prefix),
        most=limit + 1,
    )
    return users_page([(user_id, profile) for user_id, profile in rows], limit, prefix)


def event_counts(user_ids: Sequence[str]) -> Job[list[int]]:
    """`Store.event_counts`."""
    rows = yield Run(
        "SELECT user_id, count(*) FROM heed.users JOIN heed.events USING ($[|namespace_no, ]$user)"
        " WHERE $here AND $[user_id $in(ids)|user_key $in(keys)] GROUP BY $user, user_id",
        ids=list(user_ids),
        keys=[user_key(user_id) for user_id in user_ids],
    )
    counts: dict[str, int] = dict(cast(list[tuple[str, int]], rows))
    return [counts.get(user_id, 0) for user_id in user_ids]


def user_ids(numbers: Sequence[int]) -> Job[list[str | None]]:
    """`Store.user_ids`."""
    rows = yield Run(
        "SELECT user_no, user_id FROM heed.users WHERE $here AND user_no $in(numbers)",
        numbers=list(numbers),
    )
    names: dict[int, str] = dict(cast(list[tuple[int, str]], rows))
    return [names.get(number) for number in numbers]


# ------------------------------------------------------------------------------ events


def delete_event(tx: Transaction, user_id: str, event_id: str) -> Job[bool]:
    """`Store.delete_event`."""
    found = (yield from tx.lock_users([user_id])).get(user_id)
    if found is None:
        return False
    places = yield Run(
        "SELECT timestamp, seq FROM $[events|heed.event_ids]"
        " WHERE $here AND $[event_id = :id|event_key = :key] AND $user = :user",
        id=event_id,
        key=UUID(bytes=event_key(event_id)),
        user=found.user,
    )
    if not places:
        return False
    yield from delete_places(tx, [(found.user, *places[0])])
    return True


def delete_places(tx: Transaction, places: Sequence[tuple[int, int, int]]) -> Job[None]:
    """Delete events by the user, the timestamp and the seq of each, at least one.

    The users are locked, and keep their rows.
    """
    rows = yield Delete(
        "events",
        "$user timestamp seq",
        places,
        returning="item_no, type_no$[|, event_key]",
    )
    if len(rows) < len(places):
        raise Changed
    yield from note_names(tx, {row[0] for row in rows}, {row[1] for row in rows})
    if tx.by_key:
        ids = yield Run(
            "DELETE FROM heed.event_ids WHERE $here AND event_key $in(keys) RETURNING 1",
            keys=[row[2] for row in rows],
        )
        if len(ids) != len(rows):
            raise Changed  # ids of a transaction that cannot be seen everywhere yet
    sizes = yield Delete(
        "vectors",
        "$user seq",
        [(user, seq) for user, _, seq in places],
        returning=_VECTOR_BYTES,
    )
    tally = Tally(bytes=-EVENT_BYTES * len(rows) - sum(size for (size,) in sizes))
    negative = yield from _negative_types()
    for item_no, type_no, *_ in rows:
        tally.add(item_no, type_no in negative, -1)
    yield from tx.count(places[0][0], tally)
    for user in dict.fromkeys(user for user, _, _ in places):
        yield from _rewrite_history(tx, user)
    tx.scrub()


def merge(tx: Transaction, user_id: str, source: str) -> Job[int]:
    """`Store.merge`."""
    found = yield from tx.lock_users([user_id, source])
    if source not in found:
        return 0
    if user_id not in found:
        yield from tx.put_users([user_id])
        found = yield from tx.lock_users([user_id, source])
        if len(found) < 2:
            raise Changed
    target, theirs = found[user_id], found[source]
    ((moved,),) = yield Run(
        "SELECT count(*) FROM heed.events WHERE $here AND $user = :source", source=theirs.user
    )
    # Seqs start at 1: the source's follow the target's, gaps and all.
    values = {"source": theirs.user, "target": target.user, "shift": target.next_seq - 1}
    for statement in _MOVE:
        yield Do(statement, **values, seqs=theirs.next_seq)
    if tx.by_key:
        ((ids,),) = yield Run(_MOVE_IDS, **values)
        if ids != moved:
            raise Changed
    if theirs.profile is not None:
        first, second = user_from(user_id, target.profile), user_from(source, theirs.profile)
        interests = dict.fromkeys(first.interests + second.interests)
        merged = User(user_id, {**second.attributes, **first.attributes}, tuple(interests))
        yield from _set_profile(tx, target.user, target.profile, user_document(merged))
    yield from _rewrite_history(tx, target.user)
    yield from drop_user(tx, theirs)
    return int(moved)


# ------------------------------------------------------------------------------ deletion


def delete_users(tx: Transaction, users: Sequence[UserRow]) -> Job[int]:
    """Delete locked users with everything that is stored of them; return the number of events."""
    if not users:
        return 0
    keys = [each.user for each in users]
    # With an array of keys, PostgreSQL plans for all partitions of the events.
    of_users = "$user = :user" if len(keys) == 1 else "$user $in(users)"
    values = {"user": keys[0], "users": keys}
    counts = yield Run(
        "SELECT item_no, type_no, count(*) FROM heed.events"
        f" WHERE $here AND {of_users} GROUP BY item_no, type_no",
        **values,
    )
    events = sum(count for _, _, count in counts)
    yield from note_names(tx, {row[0] for row in counts}, {row[1] for row in counts})
    if tx.by_key:
        ((ids,),) = yield Run(_DELETE_IDS.format(of_users), **values)
        if ids != events:
            raise Changed
    yield Do(f"DELETE FROM heed.events WHERE $here AND {of_users}", **values)
    sizes = yield Run(
        f"DELETE FROM heed.vectors WHERE $here AND {of_users} RETURNING {_VECTOR_BYTES}",
        **values,
    )
    tally = Tally(bytes=-EVENT_BYTES * events - sum(size for (size,) in sizes))
    negative = yield from _negative_types()
    for item_no, type_no, count in counts:
        tally.add(item_no, type_no in negative, -count)
    yield from tx.count(keys[0], tally)
    for each in users:
        yield from drop_user(tx, each)
    return int(events)


def drop_user(tx: Transaction, row: UserRow) -> Job[None]:
    """Delete a user without events, with the profiles that imports have replaced and claims."""
    of_user = "WHERE $here AND $user = :user"
    yield Do(f"DELETE FROM heed.claims {of_user}", user=row.user)
    yield Do(f"DELETE FROM heed.users {of_user}", user=row.user)
    yield Do(
        "DELETE FROM heed.$[replaced|replaced_profiles] WHERE $here $[AND kind = 'user'|]"
        " AND $[row_no|user_key] = :user",
        user=row.user,
    )
    yield Insert(
        "gone_users",
        "postgres:user_key user_no change",
        [(row.user, row.user_no, tx.tick())],
        key="$[|user_key ]user_no",
        update="change = excluded.change",
    )
    size = -USER_BYTES - len(row.profile or b"")
    yield from tx.count(row.user, Tally(users=-1, bytes=size))
    tx.scrub()


def drop_if_empty(tx: Transaction, users: Iterable[str]) -> Job[None]:
    """Delete those of locked users who have neither events nor a profile."""
    for row in (yield from tx.lock_users(users)).values():
        if row.profile is not None:
            continue
        events = yield Run(
            "SELECT 1 FROM heed.events WHERE $here AND $user = :user LIMIT 1", user=row.user
        )
        if not events:
            yield from drop_user(tx, row)


def note_names(tx: Transaction, items: Collection[int], types: Collection[int]) -> Job[None]:
    """Note the numbers of names that deleted events used, for `Store.clean_up`."""
    yield from note_items(tx, "item_no", sorted(items))
    yield Insert(
        "unused_names",
        "kind number noted",
        [("types", number, tx.tick()) for number in sorted(types)],
        key="kind number",
        update="noted = excluded.noted",
    )


def note_items(tx: Transaction, column: str, items: list[Any]) -> Job[None]:
    """Note items that only events have named, for `Store.clean_up`: by `item_no` or `item_id`."""
    yield Do(
        "INSERT INTO heed.unused_names ($[|namespace_no, ]kind, number, noted)"
        " SELECT $[|namespace_no, ]'items', item_no, CAST(:tick AS bigint) FROM heed.items"
        f" WHERE $here AND {column} $in(items) AND change IS NULL"
        " ON CONFLICT ($[|namespace_no, ]kind, number) DO UPDATE SET noted = excluded.noted",
        tick=tx.tick(),
        items=items,
    )


def _rewrite_history(tx: Transaction, user: int) -> Job[None]:
    """Record a change of a user's events that is not an append."""
    yield Do(
        "UPDATE heed.users SET version = $[:tick|greatest(version + 1, :tick)],"
        " generation = $[:tick|greatest(version + 1, :tick)] WHERE $here AND $user = :user",
        tick=tx.tick(),
        user=user,
    )


def _negative_types() -> Job[frozenset[int]]:
    """Return the numbers of the negative types that the store has had."""
    rows = yield Run(
        "SELECT type_no FROM heed.types WHERE $here AND type $in(types)", types=sorted(NEGATIVE)
    )
    return frozenset(number for (number,) in rows)
