"""Records of the jobs of a namespace, kept true: what was interrupted is marked as failed.

    <data>/jobs/<id>.json     a job, unless machines share them in a database
    <data>/jobs/<id>.cancel   requests its cancellation, unless in a database
    <data>/jobs/runner.lock   held by the process of this machine that runs a job, `heed train` too
    <data>/jobs/child.lock    held by that process and inherited by the training

With the runner's lock free, the child's tells an orphaned training from none. Machines that share
jobs take a lease in the database besides the lock, which says whether another machine runs one.

The lock of this machine is one of the system (flock), which ends with the process that holds it: a
killed training leaves none behind. It is taken before the lease: whoever has only lost the lease
still holds it, which distinguishes it from a process that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
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
from service.stores.postgres.shared_parts import JobRow, LeaseState, SharedLease

KEPT = 100  # jobs
CHILD_LOCK = "child.lock"
_TRIES = 5  # to give a job an id that no other machine has just given
_CLAIMS = 10  # tries: a process that marks interrupted jobs has the lock for a moment
_PAUSE = 0.02  # seconds between two tries

_log = logging.getLogger(__name__)


class FileJobs:
    """The jobs in a folder, as `SharedJobs` has those of a database."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, job_id: str, document: bytes, keep: int) -> bool:
        for old in self._ids()[keep - 1 :]:
            self._path(old).unlink(missing_ok=True)
            _cancel_path(self._folder, old).unlink(missing_ok=True)
        with durable_files.translate_disk_full("the disk has no room for a job"):
            self.write(job_id, document)
        return True

    def write(self, job_id: str, document: bytes, *, has_ended: bool = False) -> None:  # noqa: ARG002
        durable_files.replace(self._path(job_id), document)

    def read(self, job_id: str) -> JobRow | None:
        try:
            return JobRow(job_id, self._path(job_id).read_bytes())
        except FileNotFoundError:
            return None

    def latest(self, limit: int) -> list[JobRow]:
        return [row for name in self._ids()[:limit] if (row := self.read(name)) is not None]

    def unfinished(self) -> list[JobRow]:
        """Return all jobs: only their documents say which have ended."""
        return self.latest(KEPT)

    def request_cancellation(self, job_id: str) -> None:
        _cancel_path(self._folder, job_id).touch()

    def _ids(self) -> list[str]:
        names = (path.stem for path in self._folder.glob("*.json"))
        return sorted(filter(is_name, names), reverse=True)

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.json"


class FileLease:
    """The lock of one data directory: a descriptor of the file that is locked."""

    interval = 0.1  # seconds between two looks for a marker

    def __init__(self, folder: Path, descriptor: int) -> None:
        self._folder = folder
        self._descriptor = descriptor

    def renew(self, job_id: str) -> LeaseState:
        return "cancelled" if _cancel_path(self._folder, job_id).exists() else "held"

    def release(self) -> None:
        os.close(self._descriptor)


def _cancel_path(folder: Path, job_id: str) -> Path:
    return folder / f"{job_id}.cancel"


# The right to run a training, until it is released or its holder has died. `renew` blocks; it keeps
# the lease, and reports whether it was lost or the job is to be stopped.
TrainingLease = FileLease | SharedLease


def parse_job(job_id: str, data: bytes) -> Job:
    """Parse the record of a job; a damaged one gives a failed job whose `error` says so."""
    try:
        job = Job.from_json(data)
        if job.id != job_id:
            raise ValueError(f"it describes the job {job.id!r}")
    except ValueError as error:
        return Job(job_id, "failed", {}, 0, error=f"its record is damaged: {error}")
    return job


class JobRecords:
    """Jobs of a namespace, and the right to run one. Methods block.

    Machines that share the `store` share the jobs. The folder `jobs` of the data directory is
    created when missing.
    """

    def __init__(self, data: Path, store: Store | None = None) -> None:
        self.folder = data / JOBS_FOLDER
        durable_files.make_directory(self.folder)
        self._is_written = True  # what was written last, as far as the log has been told
        shared = None if store is None else store.shared
        self._shared = None if shared is None else shared.jobs
        self._rows = self._shared or FileJobs(self.folder)

    def create(self, options: Mapping[str, Any], created: int, program: str) -> Job:
        """Record a new job of a program, whose process is this one. Raises StoreFull, Busy."""
        who = f"{program}, process {os.getpid()} on {platform.node() or 'this machine'}"
        for _ in range(_TRIES):
            names = [row.job_id for row in self._rows.latest(1)]
            name = timestamped_name(next_time(created, names))
            job = Job(name, "queued", dict(options), created, started_by=who)
            if self._rows.add(name, job.to_json(), KEPT):
                return job
        raise Busy("other machines keep taking the ids of jobs, or the namespace is removed")

    def request_cancellation(self, job_id: str) -> None:
        self._rows.request_cancellation(job_id)

    def claim(self, stack: contextlib.ExitStack) -> TrainingLease | None:
        """Take the right to run a job for as long as `stack` is open; None if another one has it.

        Jobs whose process is gone are marked as failed, and orphaned trainings killed.
        """
        with contextlib.ExitStack() as own:
            descriptor = durable_files.try_lock(self.folder / RUNNER_LOCK)
            if descriptor is None:
                return None
            held: TrainingLease = FileLease(self.folder, descriptor)
            own.callback(held.release)
            self._kill_orphan()
            if self._shared is not None:
                lease = self._shared.try_lease()
                if lease is None:
                    return None
                held = lease
                own.callback(held.release)
            for job in (parse_job(*row) for row in self._rows.unfinished()):
                if not job.is_final:
                    self.write(interrupted(job))
            stack.enter_context(own.pop_all())
        return held

    def claim_training(self, stack: contextlib.ExitStack) -> TrainingLease:
        """Take the right to run a job, as `claim` does. Raises Conflict: what runs, since when."""
        for _ in range(_CLAIMS):
            lease = self.claim(stack)
            if lease is not None:
                return lease
            time.sleep(_PAUSE)
        for job in self._latest(3):
            if not job.is_final:
                # Clients do not see the machine; `heed jobs list` does.
                by = (job.started_by or "the service").partition(" on ")[0]
                raise Conflict(
                    f"a training is running since {to_rfc3339(job.created)} (job {job.id}, of "
                    f"{by}); one runs at a time: wait for it, or stop it with `heed jobs cancel "
                    f"{job.id}` or POST /v1/jobs/{job.id}/cancel"
                )
        raise Conflict("a training is just being started by another process; one runs at a time")

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
        job = self._read(job_id)
        if job.is_final:
            return job
        unclaimed = self.recover()
        job = self._read(job_id)  # it may have ended meanwhile
        return interrupted(job) if unclaimed and not job.is_final else job

    def latest(self, limit: int, running: Container[str] = ()) -> list[Job]:
        """The newest jobs, newest first; those in `running`, of this process, are not looked at."""
        jobs = self._latest(limit)
        if all(job.is_final or job.id in running for job in jobs) or not self.recover():
            return jobs
        return [job if job.is_final else interrupted(job) for job in self._latest(limit)]

    def write(self, job: Job) -> bool:
        """Write a job if the disk, or the database, lets it: a training goes on without.

        In a database a job that has ended, or was found interrupted, stays as it is. The log says
        once that nothing could be written.
        """
        try:
            self._rows.write(job.id, job.to_json(), has_ended=job.is_final)
        except (OSError, HeedError) as error:
            if self._is_written:
                _log.warning("job %s: its record could not be written: %s", job.id, error)
            self._is_written = False
            return False
        self._is_written = True
        return True

    def _read(self, job_id: str) -> Job:
        if not is_name(job_id):
            raise NotFound(f"there is no job {job_id[:80]!r}")
        row = self._rows.read(job_id)
        if row is None:
            raise NotFound(f"there is no job {job_id}")
        return parse_job(*row)

    def _latest(self, limit: int) -> list[Job]:
        return [parse_job(*row) for row in self._rows.latest(limit)]

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

    If the lease cannot be checked, the training goes on: it may be the only thing that still works,
    and the lease is kept until somebody else takes it.
    """

    def __init__(self, lease: TrainingLease, job_id: str) -> None:
        self._lease = lease
        self._job_id = job_id
        self._is_known = True
        self.state: LeaseState = "held"

    async def run(self) -> None:
        while self.state != "lost":
            await asyncio.sleep(self._lease.interval)
            await asyncio.to_thread(self._check)

    def run_in_thread(self, ended: threading.Event, on_stop: Callable[[], None]) -> None:
        """Check the lease until the job has ended; call `on_stop` once it must be stopped."""
        while not ended.wait(self._lease.interval):
            self._check()
            if self.state != "held":
                on_stop()
                return

    def _check(self) -> None:
        try:
            self.state = self._lease.renew(self._job_id)
            self._is_known = True
        except (HeedError, OSError) as error:
            if self._is_known:
                what = f"the lease of job {self._job_id} was not renewed; the training goes on"
                log_failure(_log, what, error)
            self._is_known = False
