"""Jobs and their lease in a PostgreSQL database."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any

from psycopg import Connection

from service.domain.errors import HeedError
from service.stores.postgres.database.connections import Connections
from service.stores.postgres.database.transaction import IS_THERE, Rows
from service.stores.protocols.shared_jobs import (
    LEASE_SECONDS,
    JobRow,
    LeaseState,
    SharedJobs,
    SharedLease,
)

_log = logging.getLogger(__name__)

# A removal waits until the row of its namespace is free.
_ADD = f"""\
INSERT INTO heed.jobs (namespace_no, job_id, document)
SELECT namespace_no, %(job)s, %(document)b::bytea FROM heed.namespaces
 WHERE namespace_no = %(no)s AND {IS_THERE} FOR KEY SHARE
ON CONFLICT DO NOTHING"""  # noqa: S608
_FORGET = """\
DELETE FROM heed.jobs WHERE namespace_no = %(no)s AND job_id IN (
  SELECT job_id FROM heed.jobs WHERE namespace_no = %(no)s ORDER BY job_id DESC OFFSET %(keep)s)"""
_WRITE = """\
UPDATE heed.jobs SET document = %(document)b::bytea, has_ended = %(ended)s
 WHERE namespace_no = %(no)s AND job_id = %(job)s AND NOT has_ended"""
_READ = "SELECT job_id, document FROM heed.jobs WHERE namespace_no = %(no)s AND job_id = %(job)s"
_LATEST = """\
SELECT job_id, document FROM heed.jobs WHERE namespace_no = %(no)s
 ORDER BY job_id DESC LIMIT %(limit)s"""
_UNFINISHED = """\
SELECT job_id, document FROM heed.jobs WHERE namespace_no = %(no)s AND NOT has_ended
 ORDER BY job_id"""
_CANCEL = """\
UPDATE heed.jobs SET is_cancelled = true WHERE namespace_no = %(no)s AND job_id = %(job)s"""

_TAKE = f"""\
INSERT INTO heed.job_leases AS lease (expires, namespace_no, holder)
SELECT clock_timestamp() + make_interval(secs => %(seconds)s), namespace_no, %(holder)s
  FROM heed.namespaces WHERE namespace_no = %(no)s AND {IS_THERE} FOR KEY SHARE
ON CONFLICT (namespace_no) DO UPDATE SET expires = excluded.expires, holder = excluded.holder
 WHERE lease.expires < clock_timestamp()
   AND pg_postmaster_start_time() < clock_timestamp() - make_interval(secs => %(seconds)s)
RETURNING holder"""  # noqa: S608
_RENEW = """\
UPDATE heed.job_leases SET expires = clock_timestamp() + make_interval(secs => %(seconds)s)
 WHERE namespace_no = %(no)s AND holder = %(holder)s
RETURNING EXISTS (
  SELECT FROM heed.jobs WHERE namespace_no = %(no)s AND job_id = %(job)s AND is_cancelled)"""
_RELEASE = "DELETE FROM heed.job_leases WHERE namespace_no = %(no)s AND holder = %(holder)s"
_IS_LEASED = """\
SELECT FROM heed.job_leases WHERE namespace_no = %(no)s AND expires > clock_timestamp()"""


def is_leased(connection: Connection, namespace_no: int) -> bool:
    """Report whether a job of a namespace runs on any machine."""
    return bool(_rows(connection, _IS_LEASED, {"no": namespace_no}))


class PostgresJobs(SharedJobs):
    """The jobs of one namespace of a database."""

    def __init__(self, connections: Connections, namespace_no: int) -> None:
        self._connections = connections
        self._no = namespace_no

    def add(self, job_id: str, document: bytes, keep: int) -> bool:
        """`SharedJobs.add`."""
        values = {"no": self._no, "job": job_id, "document": document, "keep": keep}
        with self._connections.session() as connection:
            is_new = connection.execute(_ADD.encode(), values).rowcount > 0
            if is_new:
                connection.execute(_FORGET.encode(), values)
        return is_new

    def write(self, job_id: str, document: bytes, *, has_ended: bool) -> None:
        """`SharedJobs.write`."""
        values = {"no": self._no, "job": job_id, "document": document, "ended": has_ended}
        with self._connections.session() as connection:
            connection.execute(_WRITE.encode(), values)

    def read(self, job_id: str) -> JobRow | None:
        """`SharedJobs.read`."""
        found = self._found(_READ, {"job": job_id})
        return found[0] if found else None

    def latest(self, limit: int) -> list[JobRow]:
        """`SharedJobs.latest`."""
        return self._found(_LATEST, {"limit": limit})

    def unfinished(self) -> list[JobRow]:
        """`SharedJobs.unfinished`."""
        return self._found(_UNFINISHED, {})

    def request_cancellation(self, job_id: str) -> None:
        """`SharedJobs.request_cancellation`."""
        with self._connections.session() as connection:
            connection.execute(_CANCEL.encode(), {"no": self._no, "job": job_id})

    def try_lease(self) -> PostgresLease | None:
        """`SharedJobs.try_lease`."""
        lease = PostgresLease(self._connections, self._no)
        return lease if lease.take() else None

    def _found(self, query: str, values: Mapping[str, Any]) -> list[JobRow]:
        with self._connections.session() as connection:
            return [JobRow(*row) for row in _rows(connection, query, {"no": self._no, **values})]


class PostgresLease(SharedLease):
    """A row that says who runs jobs of a namespace, and until when at least."""

    def __init__(self, connections: Connections, namespace_no: int) -> None:
        self._connections = connections
        self._values = {"no": namespace_no, "holder": uuid.uuid4(), "seconds": LEASE_SECONDS}

    def take(self) -> bool:
        """Take the lease; False while another one has it."""
        with self._connections.session() as connection:
            return bool(_rows(connection, _TAKE, self._values))

    def renew(self, job_id: str) -> LeaseState:
        """`SharedLease.renew`."""
        with self._connections.session() as connection:
            found = _rows(connection, _RENEW, {**self._values, "job": job_id})
        if not found:
            return "lost"
        return "cancelled" if found[0][0] else "held"

    def release(self) -> None:
        """`SharedLease.release`."""
        try:
            with self._connections.session() as connection:
                connection.execute(_RELEASE.encode(), self._values)
        except HeedError as error:
            _log.warning("the lease of a training was not given up, and runs out: %s", error)


def _rows(connection: Connection, query: str, values: Mapping[str, Any]) -> Rows:
    return connection.execute(query.encode(), values, binary=True).fetchall()
