"""Training of a command as a job: exclusive, listed beside the service's own, and cancellable."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from service.domain.errors import HeedError
from service.jobs.job import Job
from service.jobs.job_records import JobRecords, TrainingLease
from service.runtime.logs import log_failure
from service.stores.base import Store
from service.stores.postgres.shared_parts import LeaseState

_log = logging.getLogger(__name__)


class LeaseWatch:
    """Checks a lease again and again, and remembers what it said last.

    Where the lease cannot be checked, the training goes on: it may be the only thing that still
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


_SAVE_INTERVAL = 1.0  # seconds between two writes of progress to disk
_ATTEMPTS = 10  # a process that marks interrupted jobs holds the lock for a moment
_PAUSE = 0.05  # seconds between two attempts
_INTERRUPTION = signal.SIGUSR1  # raises KeyboardInterrupt in the main thread
_GRACE = 3.0  # seconds for a cancelled training to end


class CommandJob:
    """The job of a training that runs in this process."""

    def __init__(self, records: JobRecords, lease: TrainingLease, job: Job) -> None:
        self._records = records
        self._job = job
        self._saved = 0.0
        self._ended = threading.Event()
        self._watch = LeaseWatch(lease, job.id)

    @property
    def stopped_for(self) -> str | None:
        """Return why the process was interrupted; None where nobody but its user did so."""
        return {
            "held": None,
            "cancelled": "the training was cancelled on request",
            "lost": "the database did not answer, and another machine may train now",
        }[self._watch.state]

    def take(self, message: Mapping[str, Any]) -> None:
        """Record a message of the training, in the form that `service.jobs.job` describes."""
        line = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY).decode()
        self._job = self._job.with_stdout(line)
        if time.monotonic() - self._saved >= _SAVE_INTERVAL:
            self._write()

    def watch(self) -> None:
        """Interrupt the process, as Ctrl-C does, once it must stop; end it if it goes on."""
        self._watch.run_in_thread(self._ended, self._stop)

    def _stop(self) -> None:
        # Not SIGINT, which is ignored in what a shell has started with `&`.
        os.kill(os.getpid(), _INTERRUPTION)
        if not self._ended.wait(_GRACE):  # in one long computation, without a line of Python
            self.end(KeyboardInterrupt())
            sys.stderr.write(f"error: {self.stopped_for}\n")
            sys.stderr.flush()
            os._exit(1)

    def end(self, error: BaseException | None) -> None:
        """Record how the training ended."""
        self._ended.set()
        now = time.time_ns() // 1000
        if error is None:
            self._job = self._job.with_exit(0, now, None)
        elif self.stopped_for is not None or isinstance(error, KeyboardInterrupt):
            self._job = self._job.with_exit(-signal.SIGINT, now, "cancelled")
        else:
            name = type(error).__name__  # the message may name files and servers
            detail = error.told if isinstance(error, HeedError) else f"{name}: see its output"
            self._job = self._job.with_error(detail, now)
        self._write()

    def _write(self) -> None:
        self._saved = time.monotonic()
        self._records.write(self._job)  # without which the training goes on


@contextlib.contextmanager
def command_job(
    data: Path, options: Mapping[str, Any], store: Store | None = None
) -> Iterator[CommandJob]:
    """Run a training in the block, and record it as a job.

    Args:
        data: the data directory.
        options: of the training.
        store: of the namespace. Where several machines share it, one of them trains at a time.

    Raises:
        Conflict: another training of the namespace is running.
        StoreFull: the disk has no room for the job's file.
        Unavailable: the database does not answer.
    """
    records = JobRecords(data, store)
    with contextlib.ExitStack() as stack:
        lease = _claim(records, stack)
        now = time.time_ns() // 1000
        who = f"heed train, process {os.getpid()} on {platform.node() or 'this machine'}"
        job = records.store.create(options, now, who)
        job = dataclasses.replace(job, state="running", started=now)
        running = CommandJob(records, lease, job)
        running.take({"stage": "starting"})
        before = signal.signal(_INTERRUPTION, signal.default_int_handler)
        stack.callback(signal.signal, _INTERRUPTION, before)
        threading.Thread(target=running.watch, name="heed-cancellation", daemon=True).start()
        try:
            yield running
        except BaseException as error:
            running.end(error)
            raise
        running.end(None)


def _claim(records: JobRecords, stack: contextlib.ExitStack) -> TrainingLease:
    for _ in range(_ATTEMPTS):
        lease = records.claim(stack)
        if lease is not None:
            return lease
        time.sleep(_PAUSE)
    raise records.conflict()
