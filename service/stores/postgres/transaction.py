"""Transactions that write: their tick, what jobs do in them, and when they are tried again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.errors import Diagnostic

from service.domain.errors import Busy, Conflict, HeedError, NotFound, Unconfirmed
from service.stores.encoding import user_key
from service.stores.jobs import NAMES, Changed, Do, Insert, Job, Rows, Run, Tally, UserRow
from service.stores.postgres.connections import LONG_TIMEOUT, Connections
from service.stores.postgres.dialect import bigints, integers, run_job
from service.stores.postgres.faults import explain, is_disconnected, is_lost, is_retried
from service.stores.postgres.names import InternedNames
from service.stores.postgres.notices import NOTIFY, Notices
from service.stores.postgres.schema import IS_THERE
from service.stores.postgres.tallies import NO_ITEM, fold
from service.stores.postgres.ticks import TICKS, UNSEEN
from service.stores.records.users import USER_BYTES

T = TypeVar("T")

_ATTEMPTS = 8
_PAUSE = 0.01  # seconds by which the time between two attempts grows, from the third one on
_LOCK_USERS = """\
SELECT user_id, user_key, user_no, next_seq, profile FROM heed.users
 WHERE $here AND user_key $in(keys) ORDER BY user_key FOR UPDATE"""
# In the given order, so that the sequence is asked in it.
_ADD_ITEMS = """\
INSERT INTO heed.items (namespace_no, item_no, item_id)
SELECT :no, nextval('heed.item_numbers'), item_id
  FROM (SELECT item_id FROM unnest(CAST(:ids AS text[])) WITH ORDINALITY AS new (item_id, place)
         ORDER BY place) AS new"""
# Until the server has looked at the new rows, it joins whole tables row by row.
_ANALYZE = "ANALYZE heed.users, heed.events, heed.event_ids, heed.vectors, heed.items, heed.types"
_FIND_USERS = (
    "SELECT user_key FROM heed.users WHERE $here AND user_key = ANY(CAST(:keys AS bigint[]))"
)
# The number in the row of a known user is not used.
_PUT_USERS = """\
INSERT INTO heed.users AS known (namespace_no, user_key, user_no, user_id, version, generation,
                                 next_seq, has_vectors)
SELECT :no, user_key, user_no, user_id, :tick, :tick, 1 + events, has_vectors
  FROM unnest(CAST(:keys AS bigint[]), CAST(:numbers AS bigint[]), CAST(:ids AS text[]),
              CAST(:events AS integer[]), CAST(:vectors AS boolean[]))
       AS new (user_key, user_no, user_id, events, has_vectors)
ON CONFLICT (namespace_no, user_key) DO UPDATE
   SET version = greatest(known.version + 1, excluded.version),
       next_seq = known.next_seq + excluded.next_seq - 1,
       has_vectors = known.has_vectors OR excluded.has_vectors
RETURNING user_key, user_no, user_id, next_seq"""
_MAX_KNOWN_USERS = 50_000  # ~4 MB when full
_BEGIN = f"""\
SELECT tick_base + {TICKS} * pg_current_xact_id()::text::bigint, names
  FROM heed.installation, heed.namespaces WHERE namespace_no = %s AND {IS_THERE}"""

# A commit waits for disks and standbys only where it has written something, and then for all that
# was committed before. A job that finds its work done already, by an attempt whose commit was not
# confirmed, must wait for that one.
_MARK = b"SELECT pg_logical_emit_message(true, 'heed', '')"
# After a worker was cut off, its rows may be locked until Citus has settled what it had prepared.
_PATIENCE = b"SET LOCAL lock_timeout = '5s'"


class PostgresTransaction:
    """Transaction of one job: its connection, its namespace and its tick."""

    by_key = True

    def __init__(
        self,
        connection: AsyncConnection,
        namespace_no: int,
        *,
        tick: int,
        names: int,
        interned: tuple[InternedNames, InternedNames],
        is_distributed: bool,
    ) -> None:
        self.connection = connection
        self.namespace_no = namespace_no
        self.is_distributed = is_distributed
        self.names = names  # the tick of the last deletion of interned names
        self.announced = (0, 0)  # new versions of the catalogue and of the keys
        self._tick = tick
        self._items, self._types = interned

    def tick(self) -> int:
        """Return the version of the changes.

        It is greater than that of each transaction that had ended when this one began.
        """
        return self._tick

    def last_number(self) -> int:
        """Return the greatest version that this transaction may give to a row."""
        return self._tick + TICKS - 1

    def has_changes(self) -> bool:
        """Return False: each job has a transaction of its own."""
        return False

    def scrub(self) -> None:
        """Do nothing: the server keeps deleted rows until it vacuums them."""

    async def run(self, job: Job[T]) -> T:
        """Run the statements of a job."""
        return await run_job(self.connection, self.namespace_no, job)

    async def execute(self, query: str, *values: Any) -> AsyncCursor:
        """Run a statement with the namespace's number before its other values."""
        return await self.connection.execute(
            query.encode(), (self.namespace_no, *values), binary=True
        )

    async def rows(self, query: str, *values: Any) -> Rows:
        """Run a statement as `execute` does, and return its rows."""
        return await (await self.execute(query, *values)).fetchall()

    # ------------------------------------------------------------------ names

    def item_numbers(self, item_ids: Iterable[str]) -> dict[str, int]:
        """Return the numbers of items; raises `Changed` where they must be learned first."""
        return self._items.numbers(self.names, item_ids)

    def type_numbers(self, types: Iterable[str]) -> dict[str, int]:
        """Return the numbers of event types, as `item_numbers` does."""
        return self._types.numbers(self.names, types)

    def add_item_names(self, item_ids: Sequence[str]) -> Job[None]:
        """Number the new ones of items in this order."""
        rows = yield Run(
            "SELECT item_id FROM heed.items WHERE $here AND item_id $in(ids)", ids=list(item_ids)
        )
        known = {item_id for (item_id,) in rows}
        new = list(dict.fromkeys(item_id for item_id in item_ids if item_id not in known))
        yield Do(_ADD_ITEMS, ids=new)

    def has_unseen(self) -> Job[bool]:
        """Report whether a worker may not show yet what was committed before this tick."""
        if not self.is_distributed:
            return False
        rows = yield Run(UNSEEN, tick=self._tick)
        return bool(rows[0][0])

    def renumber(self, _: str, numbers: Sequence[int]) -> Job[None]:  # noqa: ARG002
        """Record that names are deleted. A sequence gives no number again."""
        yield Do("UPDATE heed.namespaces SET names = :tick WHERE $here", tick=self._tick)

    # ------------------------------------------------------------------ users

    def lock_users(self, user_ids: Iterable[str]) -> Job[dict[str, UserRow]]:
        """Return the users that are stored, locked in the order of their keys."""
        wanted = set(user_ids)
        keys = sorted({user_key(user_id) for user_id in wanted})
        # A distributed database locks rows of one user in a statement.
        parts = [[key] for key in keys] if self.is_distributed else [keys]
        users: dict[str, UserRow] = {}
        for part in parts:
            rows = yield Run(_LOCK_USERS, keys=part)
            users |= {user_id: UserRow(*row) for user_id, *row in rows if user_id in wanted}
        return users

    def put_users(self, user_ids: Iterable[str]) -> Job[dict[str, int]]:
        """Give users a new version, and create the unknown ones; return their keys."""
        counts = Counter(dict.fromkeys(user_ids, 0))
        users, created = yield from self.put_counted_users(counts, set(), set())
        first = next(iter(users.values()))[0]
        yield from self.count(first, Tally(users=created, bytes=USER_BYTES * created))
        return {user_id: key for user_id, (key, _) in users.items()}

    def put_counted_users(
        self, counts: Counter[str], with_vectors: set[str], known: set[int]
    ) -> Job[tuple[dict[str, list[int]], int]]:
        """Give users, who are created where they are unknown, a new version and their seqs.

        Args:
            counts: seqs of each user.
            with_vectors: those who have events with vectors now.
            known: keys of users who are not looked for, since they were stored when last seen;
                these users are added. It is emptied where one of them is stored no more.

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
        unseen = [key for key in ordered if key not in known]
        stored: Rows = []
        if unseen:
            stored = yield Run(_FIND_USERS, keys=bigints(unseen))
        found = {key for (key,) in stored}
        numbers: dict[int, int] = dict.fromkeys(ordered, 0)
        new = [key for key in unseen if key not in found]
        if new:
            numbers |= zip(new, (yield from self.new_user_numbers(len(new))), strict=True)
        ids = [by_key[key] for key in ordered]
        rows = yield Run(
            _PUT_USERS,
            tick=self._tick,
            keys=bigints(ordered),
            numbers=bigints(list(numbers.values())),
            ids=ids,
            events=integers([counts[user_id] for user_id in ids]),
            vectors=[user_id in with_vectors for user_id in ids],
        )
        users: dict[str, list[int]] = {}
        created = 0
        for key, user_no, user_id, next_seq in rows:
            if user_id != by_key[key]:
                raise same_key(user_id, by_key[key])
            if user_no == 0:  # forgotten since they were looked for, or last seen
                known.clear()
                raise Changed
            created += user_no == numbers[key]
            users[user_id] = [key, next_seq - counts[user_id]]
        if len(known) + len(ordered) > _MAX_KNOWN_USERS:
            known.clear()
        known.update(ordered)
        return users, created

    def new_user_numbers(self, count: int) -> Job[Sequence[int]]:
        """Return numbers of users who are to be stored."""
        rows = yield Run(
            f"SELECT nextval('heed.user_numbers_{self.namespace_no}')"
            " FROM generate_series(1, :count)",
            count=count,
        )
        return [number for (number,) in rows]

    def count(self, user: int, tally: Tally) -> Job[None]:
        """Add a change to the counts. `user` is the key of any user of the change."""
        rows = [(0, 0, item_no, *counts) for item_no, counts in tally.items.items() if any(counts)]
        if tally.users or tally.bytes:
            rows.append((tally.users, tally.bytes, NO_ITEM, 0, 0))
        yield Insert(
            "tallies",
            "user_key users bytes item_no events dislikes",
            [(user, *row) for row in rows],
            key="user_key",
        )

    # ------------------------------------------------------------------ versions

    def move_keys(self) -> Job[None]:
        """Move the version of the keys, of which all processes hear after the commit."""
        rows = yield Run(
            "UPDATE heed.namespaces SET keys = greatest(keys + 1, :tick) WHERE $here"
            " RETURNING keys",
            tick=self._tick,
        )
        yield from self._announce(0, rows[0][0])

    def catalogue_versions(self, previous: int, later: Sequence[int]) -> list[int]:
        """Return versions of changed items. A transaction has `TICKS` of them."""
        first = max(self._tick, previous + 1)
        return [first + each for each in later]

    def move_catalogue(self, version: int, items: int, size: int) -> Job[None]:
        """Move the version of the catalogue, and add to its numbers of items and of bytes."""
        yield Do(
            "UPDATE heed.namespaces SET catalogue = :version, items = items + :items,"
            " item_bytes = item_bytes + :size WHERE $here",
            version=version,
            items=items,
            size=size,
        )
        yield from self._announce(version, 0)

    def finish_copy(self) -> Job[None]:
        """Tidy up after very many writes."""
        yield from fold()
        yield Do(_ANALYZE)

    def _announce(self, catalogue: int, keys: int) -> Job[None]:
        yield Do(NOTIFY)
        self.announced = max(self.announced[0], catalogue), max(self.announced[1], keys)


class Transactions:
    """Runs jobs in transactions of one namespace.

    A job runs to its end once it has begun, also when its caller is cancelled: so it has changed
    everything or nothing, and its connection is never lent with half of an answer in it.
    """

    def __init__(
        self,
        connections: Connections,
        notices: Notices,
        *,
        namespace: str,
        namespace_no: int,
        interned: tuple[InternedNames, InternedNames],
    ) -> None:
        self._connections = connections
        self._notices = notices
        self._interned = interned
        self._namespace = namespace
        self._namespace_no = namespace_no
        self._running: set[asyncio.Task[Any]] = set()
        self.commits = 0

    async def run(
        self,
        job: Callable[[PostgresTransaction], Awaitable[T]],
        *,
        prepare: Callable[[], Awaitable[None]] | None = None,
        alone: tuple[int, ...] = (),
        patience: float = LONG_TIMEOUT,
    ) -> T:
        """Run a job and commit it; the job may run several times, and counts once.

        Args:
            job: what to do.
            prepare: what to do before each attempt, outside of the transaction.
            alone: locks that no other transaction may hold meanwhile, in ascending order. They
                are taken before the tick, so that ticks of one lock's holders grow in the order of
                their commits.
            patience: seconds after which an attempt is given up.

        Raises what the job raises, and `Unavailable` where the transaction was not, or maybe not,
        committed.
        """
        task = asyncio.ensure_future(self._attempts(job, prepare, alone, patience))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def finish(self) -> None:
        """Wait for the jobs that run on this event loop."""
        loop = asyncio.get_running_loop()
        own = [task for task in self._running if task.get_loop() is loop]
        if own:
            await asyncio.wait(own)

    @property
    def running(self) -> int:
        """Number of jobs that run or wait for a connection."""
        return len(self._running)

    async def _attempts(
        self,
        job: Callable[[PostgresTransaction], Awaitable[T]],
        prepare: Callable[[], Awaitable[None]] | None,
        alone: tuple[int, ...],
        patience: float,
    ) -> T:
        for attempt in range(1, _ATTEMPTS + 1):
            if attempt > 2:
                await asyncio.sleep(_PAUSE * (attempt - 2))
            try:
                if prepare is not None:
                    await prepare()
                async with self._connections.connection(patience) as connection:
                    return await self._once(connection, job, alone)
            except Changed:
                continue
            except HeedError as error:
                if attempt == _ATTEMPTS or not _may_succeed(error, attempt):
                    raise
        raise Busy("other writes kept changing what this one relies on")

    async def _once(
        self,
        connection: AsyncConnection,
        job: Callable[[PostgresTransaction], Awaitable[T]],
        alone: tuple[int, ...],
    ) -> T:
        number, execute = self._namespace_no, connection.execute
        try:
            async with connection.pipeline():
                await execute("BEGIN")
                for lock in alone:
                    await execute(b"SELECT pg_advisory_xact_lock(%s, %s)", (lock, number))
                if NAMES not in alone:
                    await execute(b"SELECT pg_advisory_xact_lock_shared(%s, %s)", (NAMES, number))
                row = await (await execute(_BEGIN.encode(), (number,))).fetchone()
                if row is None:
                    raise NotFound("the namespace was removed")
                is_distributed = self._connections.is_distributed
                if is_distributed:
                    await execute(_PATIENCE)
                tick, names = row
                transaction = PostgresTransaction(
                    connection,
                    number,
                    tick=tick,
                    names=names,
                    interned=self._interned,
                    is_distributed=is_distributed,
                )
                result = await job(transaction)
                await execute(_MARK)
        except BaseException:
            with suppress(psycopg.Error):
                await execute("ROLLBACK")
            raise
        await _commit(connection)
        self.commits += 1
        catalogue, keys = transaction.announced
        self._notices.note(self._namespace, catalogue=catalogue, keys=keys)
        return result


def _may_succeed(error: HeedError, attempt: int) -> bool:
    """Report whether another attempt may succeed, after one that has changed nothing."""
    cause = error.__cause__
    if isinstance(error, Unconfirmed) or not isinstance(cause, psycopg.Error):
        return False
    # An idle connection may have been lost; where a new one was, the next attempt fails at once.
    return is_retried(cause) or (attempt == 1 and is_lost(cause))


async def _commit(connection: AsyncConnection) -> None:
    """Commit; raise `Unconfirmed` unless the server says that the transaction is safe and visible.

    A server warns, and does not fail, where it no longer waits for its standby, or where a worker
    of a distributed database was lost before it has committed what it has prepared.
    """
    unconfirmed: list[str | None] = []

    def note(diagnostic: Diagnostic) -> None:
        if diagnostic.severity_nonlocalized == "WARNING":
            unconfirmed.append(diagnostic.message_primary)

    connection.add_notice_handler(note)
    try:
        await connection.execute("COMMIT")
    except psycopg.Error as error:
        if is_disconnected(error):
            raise Unconfirmed(f"{explain(error).detail}; the write may have succeeded") from error
        raise
    finally:
        connection.remove_notice_handler(note)
    if unconfirmed:
        raise Unconfirmed(f"PostgreSQL does not confirm the write: {unconfirmed[0]}")


def same_key(first: str, second: str) -> Conflict:
    """Return the error for two users of one key."""
    return Conflict(
        f"user_id {second!r} cannot be stored: its 63-bit hash is that of {first!r}, which happens "
        "once in some billions of users; use another id for one of them"
    )
