"""Jobs as files, one JSON file each, with markers that request a cancellation and a lock.

The lock is one of the system (flock), which ends with the process that holds it: a killed training
leaves none behind. The service's runner and `heed train` take the same one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.domain.errors import NotFound
from service.domain.names import is_name, next_time, timestamped_name
from service.jobs.job import Job
from service.jobs.job_store import JobStore, TrainingLease, TrainingLock
from service.runtime import durable_files
from service.runtime.data_layout import RUNNER_LOCK
from service.stores.postgres.shared_parts import LeaseState

_INTERVAL = 0.1  # seconds between two looks for a marker


class FileJobStore(JobStore):
    """Reads and writes the jobs in `directory`, of which the newest `keep` are kept."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep
        durable_files.make_directory(directory)

    def create(self, options: Mapping[str, Any], created: int, started_by: str) -> Job:
        """`JobStore.create`."""
        names = self._ids()
        for name in names[: max(0, len(names) + 1 - self._keep)]:
            self._path(name).unlink(missing_ok=True)
            _cancel_path(self._directory, name).unlink(missing_ok=True)
        name = timestamped_name(next_time(created, names))
        job = Job(name, "queued", dict(options), created, started_by=started_by)
        with durable_files.translate_disk_full("the disk has no room for a job"):
            self.write(job)
        return job

    def write(self, job: Job) -> None:
        """`JobStore.write`, atomically and durably."""
        durable_files.replace(self._path(job.id), job.to_json())

    def read(self, job_id: str) -> Job:
        """`JobStore.read`."""
        check_id(job_id)
        try:
            return parse_job(job_id, self._path(job_id).read_bytes())
        except FileNotFoundError:
            raise NotFound(f"there is no job {job_id}") from None

    def latest(self, limit: int) -> list[Job]:
        """`JobStore.latest`."""
        return [self.read(job_id) for job_id in reversed(self._ids()[-limit:])]

    def unfinished(self) -> list[Job]:
        """`JobStore.unfinished`."""
        return [job for job in map(self.read, self._ids()) if not job.is_final]

    def request_cancellation(self, job_id: str) -> None:
        """`JobStore.request_cancellation`."""
        _cancel_path(self._directory, job_id).touch()

    def _ids(self) -> list[str]:
        """Return the ids of all jobs, oldest first."""
        return sorted(path.stem for path in self._directory.glob("*.json") if is_name(path.stem))

    def _path(self, job_id: str) -> Path:
        return self._directory / f"{job_id}.json"


class FileTrainingLock(TrainingLock):
    """Lock of the trainings over one data directory; `directory` is that of its jobs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def try_acquire(self) -> FileTrainingLease | None:
        """`TrainingLock.try_acquire`."""
        descriptor = durable_files.try_lock(self._directory / RUNNER_LOCK)
        return None if descriptor is None else FileTrainingLease(self._directory, descriptor)


class FileTrainingLease(TrainingLease):
    """A descriptor of the file that is locked."""

    interval = _INTERVAL

    def __init__(self, directory: Path, descriptor: int) -> None:
        self._directory = directory
        self._descriptor = descriptor

    def check(self, job_id: str) -> LeaseState:
        """`TrainingLease.check`."""
        return "cancelled" if _cancel_path(self._directory, job_id).exists() else "held"

    def release(self) -> None:
        """`TrainingLease.release`."""
        os.close(self._descriptor)


def check_id(job_id: str) -> None:
    """Raise NotFound for what cannot be the id of a job."""
    if not is_name(job_id):
        raise NotFound(f"there is no job {job_id[:80]!r}")


def parse_job(job_id: str, data: bytes) -> Job:
    """Parse the record of a job; a damaged one gives a failed job whose `error` says so."""
    try:
        job = Job.from_json(data)
        if job.id != job_id:
            raise ValueError(f"it describes the job {job.id!r}")
    except ValueError as error:
        return Job(job_id, "failed", {}, 0, error=f"its record is damaged: {error}")
    return job


def _cancel_path(directory: Path, job_id: str) -> Path:
    return directory / f"{job_id}.cancel"
