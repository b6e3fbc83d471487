"""Records of the jobs of a namespace, kept true: what was interrupted is marked as failed.

    <data>/jobs/<id>.json     a job, unless machines share them in a database
    <data>/jobs/<id>.cancel   requests its cancellation, unless in a database
    <data>/jobs/runner.lock   held by the process of this machine that runs a job, `heed train` too
    <data>/jobs/child.lock    held by that process and inherited by the training

With the runner's lock free, the child's tells an orphaned training from none. Machines that share
jobs take a lease in the database besides the lock, which says whether another machine runs one.

The lock of this machine is one of the system (flock), which ends with the process that holds it: a
killed training leaves none behind. It is taken before the lease: whoever has only lost the lease
still holds it, by which it is told from a process that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from service.domain.errors import Busy, Conflict, HeedError, NotFound
from service.domain.names import is_name, next_time, timestamped_name
from service.domain.timestamps import to_rfc3339
from service.jobs.job import Job
from service.runtime import durable_files
from service.runtime.child_process import kill_holders
from service.runtime.data_layout import JOBS_FOLDER, RUNNER_LOCK
from service.runtime.logs import log_failure
from service.stores.base import Store
from service.stores.postgres.shared_parts import LeaseState, SharedJobs, SharedLease


class FileJobStore:
    """Reads and writes the jobs in `directory`, and keeps the newest `keep`."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep
        durable_files.make_directory(directory)

    def create(self, options: Mapping[str, Any], created: int, started_by: str) -> Job:
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
        durable_files.replace(self._path(job.id), job.to_json())

    def read(self, job_id: str) -> Job:
        check_id(job_id)
        try:
            return parse_job(job_id, self._path(job_id).read_bytes())
        except FileNotFoundError:
            raise NotFound(f"there is no job {job_id}") from None

    def latest(self, limit: int) -> list[Job]:
        return [self.read(job_id) for job_id in reversed(self._ids()[-limit:])]

    def unfinished(self) -> list[Job]:
        return [job for job in map(self.read, self._ids()) if not job.is_final]

    def request_cancellation(self, job_id: str) -> None:
        _cancel_path(self._directory, job_id).touch()

    def _ids(self) -> list[str]:
        return sorted(path.stem for path in self._directory.glob("*.json") if is_name(path.stem))

    def _path(self, job_id: str) -> Path:
        return self._directory / f"{job_id}.json"


class FileTrainingLease:
    """The lock of one data directory: a descriptor of the file that is locked."""

    interval = 0.1  # seconds between two looks for a marker

    def __init__(self, directory: Path, descriptor: int) -> None:
        self._directory = directory
        self._descriptor = descriptor

    def check(self, job_id: str) -> LeaseState:
        return "cancelled" if _cancel_path(self._directory, job_id).exists() else "held"

    def release(self) -> None:
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


_TRIES = 5  # to give a job an id that no other machine has just given
_RENEWAL = 2.0  # seconds between two renewals of a lease


class SharedJobStore:
    """Reads and writes the jobs of a store, and keeps the newest `keep`."""

    def __init__(self, shared: SharedJobs, keep: int) -> None:
        self._shared = shared
        self._keep = keep

    def create(self, options: Mapping[str, Any], created: int, started_by: str) -> Job:
        for _ in range(_TRIES):
            names = [row.job_id for row in self._shared.latest(1)]
            name = timestamped_name(next_time(created, names))
            job = Job(name, "queued", dict(options), created, started_by=started_by)
            if self._shared.add(name, job.to_json(), self._keep):
                return job
        raise Busy("other machines keep taking the ids of jobs, or the namespace is removed")

    def write(self, job: Job) -> None:
        """Replace a job. One that has ended, or was found interrupted, stays as it is."""
        self._shared.write(job.id, job.to_json(), has_ended=job.is_final)

    def read(self, job_id: str) -> Job:
        check_id(job_id)
        row = self._shared.read(job_id)
        if row is None:
            raise NotFound(f"there is no job {job_id}")
        return parse_job(*row)

    def latest(self, limit: int) -> list[Job]:
        return [parse_job(*row) for row in self._shared.latest(limit)]

    def unfinished(self) -> list[Job]:
        return [parse_job(*row) for row in self._shared.unfinished()]

    def request_cancellation(self, job_id: str) -> None:
        self._shared.request_cancellation(job_id)


class SharedTrainingLease:
    """A lease in the database, which runs out where its holder does not renew it."""

    interval = _RENEWAL

    def __init__(self, lease: SharedLease) -> None:
        self._lease = lease

    def check(self, job_id: str) -> LeaseState:
        return self._lease.renew(job_id)

    def release(self) -> None:
        self._lease.release()


KEPT = 100  # jobs
CHILD_LOCK = "child.lock"

_log = logging.getLogger(__name__)


JobStore = FileJobStore | SharedJobStore
# The right to run a training, until it is released or its holder has died. `check` blocks; it keeps
# the lease, and reports whether it was lost or the job is to be stopped.
TrainingLease = FileTrainingLease | SharedTrainingLease


class JobRecords:
    """Jobs of a namespace, and the right to run one. Methods block.

    Machines that share the `store` share the jobs. The folder `jobs` of the data directory is
    created when missing.
    """

    def __init__(self, data: Path, store: Store | None = None, keep: int = KEPT) -> None:
        self.folder = data / JOBS_FOLDER
        durable_files.make_directory(self.folder)
        self._is_written = True  # what was written last, as far as the log has been told
        shared = None if store is None else store.shared
        self.store: JobStore
        self._shared = None if shared is None else shared.jobs
        if self._shared is None:
            self.store = FileJobStore(self.folder, keep)
        else:
            self.store = SharedJobStore(self._shared, keep)

    def claim(self, stack: contextlib.ExitStack) -> TrainingLease | None:
        """Take the right to run a job for as long as `stack` is open; None if another one has it.

        Jobs whose process is gone are marked as failed, and orphaned trainings killed.
        """
        with contextlib.ExitStack() as own:
            descriptor = durable_files.try_lock(self.folder / RUNNER_LOCK)
            if descriptor is None:
                return None
            held: TrainingLease = FileTrainingLease(self.folder, descriptor)
            own.callback(held.release)
            self._kill_orphan()
            if self._shared is not None:
                lease = self._shared.try_lease()
                if lease is None:
                    return None
                held = SharedTrainingLease(lease)
                own.callback(held.release)
            for job in self.store.unfinished():
                self.write(interrupted(job))
            stack.enter_context(own.pop_all())
        return held

    def recover(self) -> bool:
        """Mark interrupted jobs, unless a process runs one; True when none does.

        Without the database, nobody can tell.
        """
        try:
            with contextlib.ExitStack() as stack:
                return self.claim(stack) is not None
        except HeedError as error:
            _log.warning("cannot tell whether a training runs: %s", error)
            return False

    def read(self, job_id: str) -> Job:
        job = self.store.read(job_id)
        if job.is_final:
            return job
        unclaimed = self.recover()
        job = self.store.read(job_id)  # it may have ended meanwhile
        return interrupted(job) if unclaimed and not job.is_final else job

    def latest(self, limit: int, running: Container[str] = ()) -> list[Job]:
        """The newest jobs, newest first; those in `running`, of this process, are not looked at."""
        jobs = self.store.latest(limit)
        if all(job.is_final or job.id in running for job in jobs) or not self.recover():
            return jobs
        jobs = self.store.latest(limit)
        return [job if job.is_final else interrupted(job) for job in jobs]

    def write(self, job: Job) -> bool:
        """Write a job if the disk, or the database, lets it: a training goes on without.

        The log says once that it does not.
        """
        try:
            self.store.write(job)
        except (OSError, HeedError) as error:
            if self._is_written:
                _log.warning("job %s: its record could not be written: %s", job.id, error)
            self._is_written = False
            return False
        self._is_written = True
        return True

    def conflict(self) -> Conflict:
        for job in self.store.latest(3):
            if not job.is_final:
                # Clients do not see the machine; `heed jobs list` does.
                by = (job.started_by or "the service").partition(" on ")[0]
                who = f"job {job.id}, of {by}"
                return Conflict(
                    f"a training is running since {to_rfc3339(job.created)} ({who}); one runs at "
                    f"a time: wait for it, or stop it with `heed jobs cancel {job.id}` or "
                    f"POST /v1/jobs/{job.id}/cancel"
                )
        return Conflict("a training is just being started by another process; one runs at a time")

    def _kill_orphan(self) -> None:
        """Kill a training whose service is gone. The caller holds the lock of this machine."""
        path = self.folder / CHILD_LOCK
        lock = durable_files.try_lock(path)
        if lock is None:
            kill_holders(path)
        else:
            os.close(lock)


def interrupted(job: Job) -> Job:
    now = time.time_ns() // 1000
    return job.with_error("interrupted: the process that ran it is gone", now)


class LeaseWatch:
    """Checks a lease again and again, and remembers what it said last.

    If the lease cannot be checked, the training goes on: it may be the only thing that still
    works, and the lease is kept as long as nobody else has taken it.
    """

    def __init__(self, lease: TrainingLease, job_id: str) -> None:
        self._lease = lease
        self._job_id = job_id
        self._is_known = True
        self.state: LeaseState = "held"

    async def run(self) -> None:
        """Check the lease until it is lost, or this task is cancelled."""
        while self.state != "lost":
            await asyncio.sleep(self._lease.interval)
            await asyncio.to_thread(self._check)

    def run_in_thread(self, ended: threading.Event, on_stop: Callable[[], None]) -> None:
        """Check the lease until the job has ended or is to be stopped, as `on_stop` is told."""
        while not ended.wait(self._lease.interval):
            self._check()
            if self.state != "held":
                on_stop()
                return

    def _check(self) -> None:
        try:
            self.state = self._lease.check(self._job_id)
            self._is_known = True
        except (HeedError, OSError) as error:
            if self._is_known:
                what = f"the lease of job {self._job_id} was not renewed; the training goes on"
                log_failure(_log, what, error)
            self._is_known = False
