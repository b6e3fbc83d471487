"""Jobs and their lease in a PostgreSQL database."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from psycopg import Connection

from service.domain.errors import HeedError
from service.stores.postgres.connections import Connections
from service.stores.postgres.schema import IS_THERE
from service.stores.postgres.shared_files import SharedFiles, run_query

LEASE_SECONDS = 20.0  # without a renewal, after which a lease may be taken over

LeaseState = Literal["held", "cancelled", "lost"]


class JobRow(NamedTuple):
    """A job's id and its document."""

    job_id: str
    document: bytes


_log = logging.getLogger(__name__)

# A removal waits until the row of its namespace is free.
_ADD = f"""\
INSERT INTO heed.jobs (namespace_no, job_id, document)
SELECT namespace_no, %(job)s, %(document)b::bytea FROM heed.namespaces
 WHERE namespace_no = %(no)s AND {IS_THERE} FOR KEY SHARE
ON CONFLICT DO NOTHING"""
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
RETURNING holder"""
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
    return bool(run_query(connection, _IS_LEASED, {"no": namespace_no}))


class SharedJobs:
    """The jobs of one namespace of a database."""

    def __init__(self, connections: Connections, namespace_no: int) -> None:
        self._connections = connections
        self._no = namespace_no

    def add(self, job_id: str, document: bytes, keep: int) -> bool:
        """Store a new job, and delete the oldest beyond `keep`; False where the id is taken."""
        values = {"no": self._no, "job": job_id, "document": document, "keep": keep}
        with self._connections.session() as connection:
            is_new = connection.execute(_ADD.encode(), values).rowcount > 0
            if is_new:
                connection.execute(_FORGET.encode(), values)
        return is_new

    def write(self, job_id: str, document: bytes, *, has_ended: bool) -> None:
        """Replace a job's document, unless the job has ended: what ended stays as it is."""
        values = {"no": self._no, "job": job_id, "document": document, "ended": has_ended}
        with self._connections.session() as connection:
            connection.execute(_WRITE.encode(), values)

    def read(self, job_id: str) -> JobRow | None:
        """Return a job; None where there is none."""
        found = self._found(_READ, {"job": job_id})
        return found[0] if found else None

    def latest(self, limit: int) -> list[JobRow]:
        """Return the jobs of the highest ids, the highest first."""
        return self._found(_LATEST, {"limit": limit})

    def unfinished(self) -> list[JobRow]:
        """Return the jobs that have not ended."""
        return self._found(_UNFINISHED, {})

    def request_cancellation(self, job_id: str) -> None:
        """Have `SharedLease.renew` say that a job is to be stopped."""
        with self._connections.session() as connection:
            connection.execute(_CANCEL.encode(), {"no": self._no, "job": job_id})

    def try_lease(self) -> SharedLease | None:
        """Take the lease; None while another one has it.

        Nobody's lease runs out while the server is down, nor in the LEASE_SECONDS after its start.
        """
        lease = SharedLease(self._connections, self._no)
        return lease if lease.take() else None

    def _found(self, query: str, values: Mapping[str, Any]) -> list[JobRow]:
        with self._connections.session() as connection:
            return [
                JobRow(*row) for row in run_query(connection, query, {"no": self._no, **values})
            ]


class SharedLease:
    """A row that says who runs jobs of a namespace, and until when at least."""

    interval = 2.0  # seconds between two renewals

    def __init__(self, connections: Connections, namespace_no: int) -> None:
        self._connections = connections
        self._values = {"no": namespace_no, "holder": uuid.uuid4(), "seconds": LEASE_SECONDS}

    def take(self) -> bool:
        """Take the lease; False while another one has it."""
        with self._connections.session() as connection:
            return bool(run_query(connection, _TAKE, self._values))

    def renew(self, job_id: str) -> LeaseState:
        """Keep the lease for another LEASE_SECONDS.

        Returns:
            LeaseState: `lost` once it was taken over; `cancelled` where somebody has requested that
                the job be stopped; else `held`.

        Raises `Unavailable`. The next call may succeed: a lease that has run out is kept too, as
        long as nobody has taken it over.
        """
        with self._connections.session() as connection:
            found = run_query(connection, _RENEW, {**self._values, "job": job_id})
        if not found:
            return "lost"
        return "cancelled" if found[0][0] else "held"

    def release(self) -> None:
        """Give the lease up. Raises nothing: without the database, it runs out."""
        try:
            with self._connections.session() as connection:
                connection.execute(_RELEASE.encode(), self._values)
        except HeedError as error:
            _log.warning("the lease of a training was not given up, and runs out: %s", error)


class SharedParts:
    """The files and jobs that the machines of one namespace share, beside its records."""

    def __init__(self, connections: Connections, namespace_no: int) -> None:
        self._connections = connections
        self._namespace_no = namespace_no

    def files(self, kind: str) -> SharedFiles:
        """Return the sets of files of a kind: a word of lower-case letters."""
        return SharedFiles(self._connections, self._namespace_no, kind)

    @property
    def jobs(self) -> SharedJobs:
        """Return the records of trainings, of which one at a time runs."""
        return SharedJobs(self._connections, self._namespace_no)
