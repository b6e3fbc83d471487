"""Jobs that several machines share by way of the store, and their lock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.domain.errors import Busy, NotFound
from service.domain.names import next_time, timestamped_name
from service.jobs.job import Job
from service.jobs.job_files import check_id, parse_job
from service.jobs.job_store import JobStore, TrainingLease, TrainingLock
from service.stores.postgres.shared_parts import LeaseState, SharedJobs, SharedLease

_TRIES = 5  # to give a job an id that no other machine has just given
_INTERVAL = 2.0  # seconds between two renewals of a lease


class SharedJobStore(JobStore):
    """Reads and writes the jobs of a store, of which the newest `keep` are kept."""

    def __init__(self, shared: SharedJobs, keep: int) -> None:
        self._shared = shared
        self._keep = keep

    def create(self, options: Mapping[str, Any], created: int, started_by: str) -> Job:
        """`JobStore.create`."""
        for _ in range(_TRIES):
            names = [row.job_id for row in self._shared.latest(1)]
            name = timestamped_name(next_time(created, names))
            job = Job(name, "queued", dict(options), created, started_by=started_by)
            if self._shared.add(name, job.to_json(), self._keep):
                return job
        raise Busy("other machines keep taking the ids of jobs, or the namespace is removed")

    def write(self, job: Job) -> None:
        """`JobStore.write`. A job that has ended, or was found interrupted, stays as it is."""
        self._shared.write(job.id, job.to_json(), has_ended=job.is_final)

    def read(self, job_id: str) -> Job:
        """`JobStore.read`."""
        check_id(job_id)
        row = self._shared.read(job_id)
        if row is None:
            raise NotFound(f"there is no job {job_id}")
        return parse_job(*row)

    def latest(self, limit: int) -> list[Job]:
        """`JobStore.latest`."""
        return [parse_job(*row) for row in self._shared.latest(limit)]

    def unfinished(self) -> list[Job]:
        """`JobStore.unfinished`."""
        return [parse_job(*row) for row in self._shared.unfinished()]

    def request_cancellation(self, job_id: str) -> None:
        """`JobStore.request_cancellation`."""
        self._shared.request_cancellation(job_id)


class SharedTrainingLock(TrainingLock):
    """Lock of the trainings of a namespace over all machines.

    It is taken on this machine before it is in the database: whoever has only lost the lease still
    holds the lock of its own machine, by which it is told from a process that is gone.
    """

    def __init__(self, shared: SharedJobs) -> None:
        self._shared = shared

    def try_acquire(self) -> SharedTrainingLease | None:
        """`TrainingLock.try_acquire`."""
        lease = self._shared.try_lease()
        return None if lease is None else SharedTrainingLease(lease)


class SharedTrainingLease(TrainingLease):
    """A lease in the database, which runs out where its holder does not renew it."""

    interval = _INTERVAL

    def __init__(self, lease: SharedLease) -> None:
        self._lease = lease

    def check(self, job_id: str) -> LeaseState:
        """`TrainingLease.check`."""
        return self._lease.renew(job_id)

    def release(self) -> None:
        """`TrainingLease.release`."""
        self._lease.release()
