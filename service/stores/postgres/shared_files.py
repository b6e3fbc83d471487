"""Sets of files in a PostgreSQL database, which machines fetch from it chunk by chunk.

A set is written in one short transaction for each chunk, and is there once its row says that it is
complete. The next writer deletes what an interrupted one left.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import psycopg
from psycopg import Connection, errors

from service.domain.errors import Busy, Conflict, Corrupt, HeedError, NotFound
from service.stores.jobs import FILES, Rows
from service.stores.postgres.connections import Connections
from service.stores.postgres.schema import IS_THERE

CHUNK_BYTES = 2 << 20  # of a chunk, at most

FileChunk = tuple[str, bytes]
"""The name of a file, and the next bytes of it."""


class FileSet(NamedTuple):
    """A complete set: its name, what its writer said of it, and the bytes of all its files."""

    name: str
    description: bytes
    size: int


class Activation(NamedTuple):
    """The active set, and counters that only grow."""

    number: int  # of activations so far
    name: str | None  # None: there was none
    removals: int  # of sets so far


_log = logging.getLogger(__name__)

_PAUSE = 0.2  # seconds between two tries to take a lock
_ABANDONED_AFTER = 600.0  # seconds without a chunk after which an upload is taken for interrupted
_QUICK = 5.0  # seconds for the question that is asked all the time
_DELETED_CHUNKS = 64  # in one transaction

_FIND = """\
SELECT name, description, size FROM heed.file_sets
 WHERE namespace_no = %(no)s AND kind = %(kind)s AND name = %(name)s AND state = 'complete'"""
_LIST = """\
SELECT name, description, size FROM heed.file_sets
 WHERE namespace_no = %(no)s AND kind = %(kind)s AND state = 'complete' ORDER BY written, set_no"""
_REMOVED = """\
SELECT name FROM heed.file_sets
 WHERE namespace_no = %(no)s AND kind = %(kind)s AND state = 'removed'"""
_IS_TAKEN = """\
SELECT FROM heed.file_sets
 WHERE namespace_no = %(no)s AND kind = %(kind)s AND name = %(name)s
   AND state IN ('complete', 'removed')"""

_BEGIN = f"""\
INSERT INTO heed.file_sets (set_no, namespace_no, kind, name, description)
SELECT nextval('heed.file_set_numbers'), namespace_no, %(kind)s, %(name)s, %(description)b::bytea
  FROM heed.namespaces WHERE namespace_no = %(no)s AND {IS_THERE} FOR KEY SHARE
RETURNING set_no"""
# A writer that stood still for so long that its set was abandoned adds nothing any more.
_ADD_CHUNK = """\
WITH kept AS (
  UPDATE heed.file_sets
     SET chunks = chunks + 1, size = size + %(size)s, written = clock_timestamp()
   WHERE namespace_no = %(no)s AND set_no = %(set)s AND state = 'incomplete' RETURNING set_no)
INSERT INTO heed.file_chunks (set_no, namespace_no, chunk_no, file, digest, data)
SELECT set_no, %(no)s, %(chunk)s, %(file)s, %(digest)s, %(data)b::bytea FROM kept"""
_COMPLETE = """\
UPDATE heed.file_sets SET state = 'complete', written = clock_timestamp()
 WHERE namespace_no = %(no)s AND set_no = %(set)s AND state = 'incomplete'"""
_ABANDON = """\
UPDATE heed.file_sets SET state = 'abandoned'
 WHERE namespace_no = %(no)s AND set_no = %(set)s AND state = 'incomplete'"""

_OPEN = """\
SELECT set_no, chunks FROM heed.file_sets
 WHERE namespace_no = %(no)s AND kind = %(kind)s AND name = %(name)s AND state = 'complete'"""
_CHUNK = """\
SELECT file, digest, data FROM heed.file_chunks
 WHERE namespace_no = %(no)s AND set_no = %(set)s AND chunk_no = %(chunk)s"""
_IS_COMPLETE = """\
SELECT FROM heed.file_sets
 WHERE namespace_no = %(no)s AND set_no = %(set)s AND state = 'complete'"""

_LOCK = f"""\
SELECT pg_advisory_xact_lock(%(lock)s, namespace_no) FROM heed.namespaces
 WHERE namespace_no = %(no)s AND {IS_THERE} FOR KEY SHARE"""
_ACTIVATE = """\
INSERT INTO heed.active_sets AS active (number, removals, namespace_no, kind, name)
VALUES (1, 0, %(no)s, %(kind)s, %(name)s)
ON CONFLICT (namespace_no, kind) DO UPDATE SET number = active.number + 1, name = excluded.name
RETURNING number, name, removals"""
_ACTIVE = """\
SELECT number, name, removals FROM heed.active_sets
 WHERE namespace_no = %(no)s AND kind = %(kind)s"""
_REMOVE = """\
UPDATE heed.file_sets SET state = 'removed', description = ''
 WHERE namespace_no = %(no)s AND kind = %(kind)s AND name = %(name)s AND state = 'complete'
   AND NOT EXISTS (
     SELECT FROM heed.active_sets
      WHERE namespace_no = %(no)s AND kind = %(kind)s AND name = %(name)s)"""
_COUNT_REMOVAL = """\
INSERT INTO heed.active_sets AS active (number, removals, namespace_no, kind, name)
VALUES (0, 1, %(no)s, %(kind)s, NULL)
ON CONFLICT (namespace_no, kind) DO UPDATE SET removals = active.removals + 1"""
_DROP = """\
UPDATE heed.file_sets SET state = 'abandoned'
 WHERE namespace_no = %(no)s AND kind = %(kind)s AND name = %(name)s AND state = 'complete'"""
_TRY_MAKING = "SELECT pg_try_advisory_lock(%(key)s)"
_TRIM = """\
UPDATE heed.file_sets SET state = 'abandoned'
 WHERE namespace_no = %(no)s AND state = 'complete' AND set_no IN (
   SELECT set_no FROM (
     SELECT set_no, sum(size) OVER (ORDER BY written DESC, set_no DESC) AS bytes
       FROM heed.file_sets
      WHERE namespace_no = %(no)s AND kind = %(kind)s AND state = 'complete') AS sizes
    WHERE bytes > %(most)s)"""

_ABANDON_OLD = """\
UPDATE heed.file_sets SET state = 'abandoned'
 WHERE namespace_no = %(no)s AND state = 'incomplete'
   AND written < clock_timestamp() - make_interval(secs => %(after)s)"""
_FIND_DELETED = """\
SELECT set_no FROM heed.file_sets
 WHERE namespace_no = %(no)s AND (state = 'abandoned' OR state = 'removed' AND chunks > 0)"""
_DELETE_CHUNKS = """\
DELETE FROM heed.file_chunks
 WHERE namespace_no = %(no)s AND set_no = %(set)s AND chunk_no IN (
   SELECT chunk_no FROM heed.file_chunks
    WHERE namespace_no = %(no)s AND set_no = %(set)s LIMIT %(most)s)"""
_DELETE_ABANDONED = """\
DELETE FROM heed.file_sets
 WHERE namespace_no = %(no)s AND set_no = %(set)s AND state = 'abandoned'"""
_EMPTY_REMOVED = """\
UPDATE heed.file_sets SET chunks = 0, size = 0
 WHERE namespace_no = %(no)s AND set_no = %(set)s AND state = 'removed'"""


class SharedFiles:
    """Sets of files of one kind in one namespace of a database.

    A set is written once, and never changes: a machine that has fetched it may keep it. One set at
    a time is the active one. All methods but `active` wait for the database, for a bounded time:
    call them off the event loop. All but `making` raise `Unavailable` where it does not answer.
    """

    def __init__(self, connections: Connections, namespace_no: int, kind: str) -> None:
        self._connections = connections
        self._of = {"no": namespace_no, "kind": kind}

    def put(self, name: str, description: bytes, chunks: Iterable[FileChunk]) -> None:
        """Store a set, which is complete, and durable, when this returns.

        An interrupted writer leaves no set; its chunks are deleted later.

        Args:
            name: 1 to 200 bytes of UTF-8.
            description: any bytes.
            chunks: of the files, one after the other; CHUNK_BYTES each at most.

        Raises `Conflict` where there is, or once was, a set of this name, and what `chunks` raises.
        """
        of = {**self._of, "name": name}
        with self._connections.session() as connection:
            self._sweep(connection)
            if run_query(connection, _IS_TAKEN, of):
                raise self._taken(name)
            begun = run_query(connection, _BEGIN, {**of, "description": description})
            if not begun:
                raise NotFound("the namespace was removed")
            set_of = {**of, "set": begun[0][0]}
            try:
                for chunk, (file, data) in enumerate(chunks):
                    digest = hashlib.sha256(data).digest()
                    values = {"chunk": chunk, "file": file, "digest": digest, "data": data}
                    added = {**set_of, **values, "size": len(data)}
                    self._check_kept(connection.execute(_ADD_CHUNK.encode(), added).rowcount, name)
                self._check_kept(connection.execute(_COMPLETE.encode(), set_of).rowcount, name)
            except errors.UniqueViolation:  # of another machine, which was faster
                self._abandon(connection, set_of)
                raise self._taken(name) from None
            except BaseException:
                self._abandon(connection, set_of)
                raise

    def find(self, name: str) -> FileSet | None:
        """Return the set of a name; None where there is none, or it was removed."""
        with self._connections.session() as connection:
            found = run_query(connection, _FIND, {**self._of, "name": name})
        return FileSet(*found[0]) if found else None

    def sets(self) -> list[FileSet]:
        """Return all sets, in the order in which they were completed."""
        with self._connections.session() as connection:
            return [FileSet(*row) for row in run_query(connection, _LIST, self._of)]

    def read(self, name: str) -> Generator[FileChunk, None, None]:
        """Yield the chunks of a set as they were put, each verified.

        Close the generator where it is not exhausted.

        Raises:
            NotFound: there is no such set, or it was removed meanwhile.
            Corrupt: naming the chunk that is missing, or not what was put.
        """
        with self._connections.session() as connection:
            opened = run_query(connection, _OPEN, {**self._of, "name": name})
            if not opened:
                raise self._missing(name)
            ((number, chunks),) = opened
            set_of = {**self._of, "set": number}
            for chunk in range(chunks):
                found = run_query(connection, _CHUNK, {**set_of, "chunk": chunk})
                file, digest, data = found[0] if found else ("", b"", b"")
                if not found or hashlib.sha256(data).digest() != digest:
                    if not run_query(connection, _IS_COMPLETE, set_of):
                        raise self._missing(name)  # removed meanwhile
                    what = f"chunk {chunk} of {chunks}"
                    fault = f"{what} ({file}) is damaged" if found else f"{what} is missing"
                    raise Corrupt(f"{self._of['kind']} {name} in PostgreSQL: {fault}")
                yield file, data

    def activate(self, name: str) -> Activation:
        """Make a set the active one, again if it is already. Raises `NotFound`."""
        of = {**self._of, "name": name}
        with self._connections.session() as connection, connection.transaction():
            self._lock(connection)
            if not run_query(connection, _FIND, of):
                raise self._missing(name)
            return Activation(*run_query(connection, _ACTIVATE, of)[0])

    def last_activation(self) -> Activation:
        """Return the last activation, with number 0 where there was none."""
        with self._connections.session() as connection:
            found = run_query(connection, _ACTIVE, self._of)
        return Activation(*found[0]) if found else Activation(0, None, 0)

    async def active(self) -> Activation:
        """Return what `last_activation` does, without blocking the event loop. Cheap."""
        async with self._connections.connection(_QUICK) as connection:
            row = await (await connection.execute(_ACTIVE.encode(), self._of)).fetchone()
        return Activation(0, None, 0) if row is None else Activation(*row)

    def remove(self, name: str) -> bool:
        """Remove a set unless it is active; False where it is, or where there is no such set.

        Its name is never used again, since machines may still hold files under it.
        """
        of = {**self._of, "name": name}
        with self._connections.session() as connection:
            with connection.transaction():
                self._lock(connection)
                is_removed = connection.execute(_REMOVE.encode(), of).rowcount > 0
                if is_removed:
                    connection.execute(_COUNT_REMOVAL.encode(), of)
            self._sweep(connection)
        return is_removed

    def removed(self) -> set[str]:
        """Return the names of all sets that were removed."""
        with self._connections.session() as connection:
            return {row[0] for row in run_query(connection, _REMOVED, self._of)}

    def drop(self, name: str) -> None:
        """Delete a set. Other than after `remove`, its name may be used again."""
        with self._connections.session() as connection:
            connection.execute(_DROP.encode(), {**self._of, "name": name})
            self._sweep(connection)

    def trim(self, most_bytes: int) -> None:
        """Drop the sets that were completed first until the others have `most_bytes` at most."""
        with self._connections.session() as connection:
            connection.execute(_TRIM.encode(), {**self._of, "most": most_bytes})
            self._sweep(connection)

    @contextmanager
    def making(self, name: str, patience: float) -> Iterator[None]:
        """Exclude other machines that would make the same set, until the block ends.

        Another one that makes it is waited for, for `patience` seconds at most. The exclusion ends
        with its process. Raises nothing: without the database, each machine makes its own.
        """
        named = f"{self._of['no']} {self._of['kind']} {name}".encode()
        key = int.from_bytes(hashlib.sha256(named).digest()[:8], signed=True)
        until = time.monotonic() + patience
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(self._connections.session())
                # The lock is the session's, and so ends with the process that holds it.
                while not run_query(connection, _TRY_MAKING, {"key": key})[0][0]:
                    if time.monotonic() > until:
                        break
                    time.sleep(_PAUSE)
            except (HeedError, psycopg.Error) as error:
                _log.warning("cannot tell whether another machine is making %s: %s", name, error)
            yield

    def _lock(self, connection: Connection) -> None:
        """Keep sets from being activated and removed until the transaction ends."""
        if not connection.execute(_LOCK.encode(), {**self._of, "lock": FILES}).rowcount:
            raise NotFound("the namespace was removed")

    def _sweep(self, connection: Connection) -> None:
        """Delete the chunks of sets that are none, or no longer, in short transactions."""
        connection.execute(_ABANDON_OLD.encode(), {**self._of, "after": _ABANDONED_AFTER})
        for (number,) in run_query(connection, _FIND_DELETED, self._of):
            of = {**self._of, "set": number, "most": _DELETED_CHUNKS}
            while connection.execute(_DELETE_CHUNKS.encode(), of).rowcount:
                pass
            connection.execute(_EMPTY_REMOVED.encode(), of)
            connection.execute(_DELETE_ABANDONED.encode(), of)

    def _abandon(self, connection: Connection, set_of: Mapping[str, Any]) -> None:
        # Without a connection, the next writer finds it.
        with suppress(psycopg.Error):
            connection.execute(_ABANDON.encode(), set_of)
            self._sweep(connection)

    def _check_kept(self, rows: int, name: str) -> None:
        if not rows:
            kind = self._of["kind"]
            raise Busy(f"the upload of {kind} {name} to PostgreSQL stood still for too long")

    def _taken(self, name: str) -> HeedError:
        problem = "is, or once was, in PostgreSQL already; it is never written again"
        return Conflict(f"{self._of['kind']} {name} {problem}")

    def _missing(self, name: str) -> HeedError:
        return NotFound(f"there is no {self._of['kind']} {name} in PostgreSQL")


def run_query(connection: Connection, query: str, values: Mapping[str, Any]) -> Rows:
    """Run a statement, and return its rows in binary format."""
    return connection.execute(query.encode(), values, binary=True).fetchall()
