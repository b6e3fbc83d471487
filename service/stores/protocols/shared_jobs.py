"""Records of jobs that the machines of an installation share, and the lease of the one that runs.

Time is the database's: the clocks of machines decide nothing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

LEASE_SECONDS = 20.0  # without a renewal, after which a lease may be taken over

LeaseState = Literal["held", "cancelled", "lost"]


class JobRow(NamedTuple):
    """A job's id and its document."""

    job_id: str
    document: bytes


class SharedLease(Protocol):
    """The right to run jobs of a namespace, while it is renewed. Methods block."""

    def renew(self, job_id: str) -> LeaseState:
        """Keep the lease for another LEASE_SECONDS.

        Returns:
            LeaseState: `lost` once it was taken over; `cancelled` where somebody has requested that
                the job be stopped; else `held`.

        Raises `Unavailable`. The next call may succeed: a lease that has run out is kept too, as
        long as nobody has taken it over.
        """
        ...

    def release(self) -> None:
        """Give the lease up. Raises nothing: without the database, it runs out."""
        ...


class SharedJobs(Protocol):
    """The jobs of a namespace. Methods block, and raise `Unavailable`."""

    def add(self, job_id: str, document: bytes, keep: int) -> bool:
        """Store a new job, and delete the oldest beyond `keep`; False where the id is taken."""
        ...

    def write(self, job_id: str, document: bytes, *, has_ended: bool) -> None:
        """Replace a job's document, unless the job has ended: what ended stays as it is."""
        ...

    def read(self, job_id: str) -> JobRow | None:
        """Return a job; None where there is none."""
        ...

    def latest(self, limit: int) -> list[JobRow]:
        """Return the jobs of the highest ids, the highest first."""
        ...

    def unfinished(self) -> list[JobRow]:
        """Return the jobs that have not ended."""
        ...

    def request_cancellation(self, job_id: str) -> None:
        """Have `SharedLease.renew` say that a job is to be stopped."""
        ...

    def try_lease(self) -> SharedLease | None:
        """Take the lease; None while another one has it.

        Nobody's lease runs out while the server is down, nor in the LEASE_SECONDS after its start.
        """
        ...
