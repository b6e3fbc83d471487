"""Protocols of the records of jobs, and of the right to run one: files, or a database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from service.jobs.job import Job
from service.stores.postgres.shared_parts import LeaseState


class JobStore(Protocol):
    """Reads and writes jobs, of which the newest are kept. Methods block.

    All may raise `Unavailable` where the jobs are in a database.
    """

    def create(self, options: Mapping[str, Any], created: int, started_by: str) -> Job:
        """Store a queued job with a new id, and delete the oldest jobs beyond those kept.

        Raises:
            StoreFull: the disk is full.
        """
        ...

    def write(self, job: Job) -> None:
        """Replace a job. One writer at a time. Raises OSError."""
        ...

    def read(self, job_id: str) -> Job:
        """Read a job; a damaged record gives a failed job whose `error` says so.

        Raises NotFound, without opening anything when `job_id` is not a valid name.
        """
        ...

    def latest(self, limit: int) -> list[Job]:
        """Return the newest jobs, newest first."""
        ...

    def unfinished(self) -> list[Job]:
        """Return the jobs that have not ended, oldest first."""
        ...

    def request_cancellation(self, job_id: str) -> None:
        """Ask the process that runs the job, whichever it is, to stop it."""
        ...


class TrainingLease(Protocol):
    """The right to run a training, until it is released or its holder has died."""

    @property
    def interval(self) -> float:
        """Return the seconds after which `check` is to be called again."""
        ...

    def check(self, job_id: str) -> LeaseState:
        """Keep the lease; report whether it was lost, or the job is to be stopped. Blocks.

        Raises `Unavailable` where that is not known now; the training goes on.
        """
        ...

    def release(self) -> None:
        """Give the lease up."""
        ...


class TrainingLock(Protocol):
    """Lock by which one training of a namespace runs at a time."""

    def try_acquire(self) -> TrainingLease | None:
        """Take the lock; None while another training has it. Blocks."""
        ...
