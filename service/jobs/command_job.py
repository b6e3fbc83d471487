"""Training of a command as a job: exclusive, listed beside the service's own, and cancellable."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from service.domain.errors import HeedError
from service.jobs.job import Job
from service.jobs.job_store import JobStore
from service.jobs.runner import JobRunner
from service.jobs.training_lock import training_lock
from service.runtime.data_layout import JOBS_FOLDER

_log = logging.getLogger(__name__)

_POLL = 0.5  # seconds between two looks whether the job shall be cancelled
_SAVE_INTERVAL = 1.0  # seconds between two writes of progress to disk
_KEEP = 100  # jobs


class CommandJob:
    """The job of a training that runs in this process."""

    def __init__(self, store: JobStore, job: Job) -> None:
        self._store = store
        self._job = job
        self._saved = 0.0
        self._ended = threading.Event()
        self.is_cancelled = False

    def take(self, message: Mapping[str, Any]) -> None:
        """Record a message of the training, in the form that `service.jobs.job` describes."""
        line = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY).decode()
        self._job = self._job.with_stdout(line)
        if time.monotonic() - self._saved >= _SAVE_INTERVAL:
            self._write()

    def watch(self) -> None:
        """Interrupt the process, as Ctrl-C does, once a cancellation is requested."""
        while not self._ended.wait(_POLL):
            if self._store.is_cancellation_requested(self._job.id):
                self.is_cancelled = True
                os.kill(os.getpid(), signal.SIGINT)
                return

    def end(self, error: BaseException | None) -> None:
        """Record how the training ended."""
        self._ended.set()
        now = time.time_ns() // 1000
        if error is None:
            self._job = self._job.with_exit(0, now, None)
        elif self.is_cancelled or isinstance(error, KeyboardInterrupt):
            self._job = self._job.with_exit(-signal.SIGINT, now, "cancelled")
        else:
            detail = error.detail if isinstance(error, HeedError) else repr(error)
            self._job = self._job.with_error(detail, now)
        self._write()

    def _write(self) -> None:
        self._saved = time.monotonic()
        try:
            self._store.write(self._job)
        except OSError as error:  # the training goes on without
            _log.warning("job %s: its file could not be written: %s", self._job.id, error)


@contextlib.contextmanager
def command_job(data: Path, options: Mapping[str, Any]) -> Iterator[CommandJob]:
    """Run a training of a data directory in the block, and record it as a job.

    Raises:
        Conflict: another training of the directory is running.
        StoreFull: the disk has no room for the job's file.
    """
    JobRunner(data, lambda _: ())  # marks what was interrupted, and ends an orphaned training
    folder = data / JOBS_FOLDER
    store = JobStore(folder, _KEEP)
    with training_lock(folder, store):
        now = time.time_ns() // 1000
        who = f"heed train, process {os.getpid()} on {platform.node() or 'this machine'}"
        job = dataclasses.replace(store.create(options, now, who), state="running", started=now)
        running = CommandJob(store, job)
        running.take({"stage": "starting"})
        threading.Thread(target=running.watch, name="heed-cancellation", daemon=True).start()
        try:
            yield running
        except BaseException as error:
            running.end(error)
            raise
        running.end(None)
