"""Records of the jobs of a namespace, kept true: what was interrupted is marked as failed.

    <data>/jobs/<id>.json     a job, unless machines share them in a database
    <data>/jobs/<id>.cancel   requests its cancellation, likewise
    <data>/jobs/runner.lock   held by the process of this machine that runs a job, `heed train` too
    <data>/jobs/child.lock    held by that process and inherited by the training

With the runner's lock free, the child's tells an orphaned training from none. Machines that share
jobs take a lease in the database besides the lock, which says whether another machine runs one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Container
from pathlib import Path

from service.domain.errors import Conflict, HeedError
from service.domain.timestamps import to_rfc3339
from service.jobs.job import Job
from service.jobs.job_files import FileJobStore, FileTrainingLock
from service.jobs.job_store import JobStore, TrainingLease, TrainingLock
from service.jobs.shared_jobs import SharedJobStore, SharedTrainingLock
from service.runtime import durable_files
from service.runtime.data_layout import JOBS_FOLDER
from service.runtime.processes.child_process import kill_holders
from service.stores.base import Store

KEPT = 100  # jobs
CHILD_LOCK = "child.lock"

_log = logging.getLogger(__name__)


class JobRecords:
    """Jobs of a namespace, and the right to run one. Methods block.

    Args:
        data: the data directory; its folder `jobs` is created when missing.
        store: of the namespace. Where several machines share it, they share the jobs.
        keep: number of jobs kept.
    """

    def __init__(self, data: Path, store: Store | None = None, keep: int = KEPT) -> None:
        self.folder = data / JOBS_FOLDER
        durable_files.make_directory(self.folder)
        self._is_written = True  # what was written last, as far as the log has been told
        shared = None if store is None else store.shared
        self.store: JobStore
        self._of_machine = FileTrainingLock(self.folder)
        self._of_all: TrainingLock | None
        if shared is None:
            self.store, self._of_all = FileJobStore(self.folder, keep), None
        else:
            self.store = SharedJobStore(shared.jobs, keep)
            self._of_all = SharedTrainingLock(shared.jobs)

    def claim(self, stack: contextlib.ExitStack) -> TrainingLease | None:
        """Take the right to run a job for as long as `stack` is open; None if another one has it.

        Jobs whose process is gone are marked as failed, and orphaned trainings killed.
        """
        with contextlib.ExitStack() as own:
            held: TrainingLease | None = self._of_machine.try_acquire()
            if held is None:
                return None
            own.callback(held.release)
            self._kill_orphan()
            if self._of_all is not None:
                held = self._of_all.try_acquire()
                if held is None:
                    return None
                own.callback(held.release)
            for job in self.store.unfinished():
                self.write(interrupted(job))
            stack.enter_context(own.pop_all())
        return held

    def recover(self) -> bool:
        """Mark interrupted jobs, unless a process runs one; True when none does.

        Without the database, nobody knows.
        """
        try:
            with contextlib.ExitStack() as stack:
                return self.claim(stack) is not None
        except HeedError as error:
            _log.warning("whether a training runs is not known: %s", error)
            return False

    def read(self, job_id: str) -> Job:
        """Return a job as it is now. Raises NotFound."""
        job = self.store.read(job_id)
        if job.is_final:
            return job
        unclaimed = self.recover()
        job = self.store.read(job_id)  # it may have ended meanwhile
        return interrupted(job) if unclaimed and not job.is_final else job

    def latest(self, limit: int, running: Container[str] = ()) -> list[Job]:
        """Return the newest jobs as they are now, newest first.

        Args:
            limit: the most jobs.
            running: ids of jobs that this process runs, which are not looked at closely.
        """
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
        """Return the error of a second training: what runs, since when and how to stop it."""
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
    """Return a job as failed since the process that ran it is gone."""
    now = time.time_ns() // 1000
    return job.with_error("interrupted: the process that ran it is gone", now)
