"""Training of a command as a job: exclusive, listed beside the service's own, and cancellable."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from service.domain.errors import HeedError
from service.jobs.job import Job
from service.jobs.job_records import JobRecords, LeaseWatch, TrainingLease
from service.stores.base import Store

_SAVE_INTERVAL = 1.0  # seconds between two writes of progress to disk
_INTERRUPTION = signal.SIGUSR1  # raises KeyboardInterrupt in the main thread
_GRACE = 3.0  # seconds for a cancelled training to end


class CommandJob:
    def __init__(self, records: JobRecords, lease: TrainingLease, job: Job) -> None:
        self._records = records
        self._job = job
        self._saved = 0.0
        self._ended = threading.Event()
        self._watch = LeaseWatch(lease, job.id)

    @property
    def stopped_for(self) -> str | None:
        """Why the process was interrupted; None where nobody but its user did so."""
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

    Raises Conflict while another training of the namespace runs, on any machine that shares its
    store; StoreFull for a full disk, Unavailable without the database.
    """
    records = JobRecords(data, store)
    with contextlib.ExitStack() as stack:
        lease = records.claim_training(stack)
        now = time.time_ns() // 1000
        job = records.create(options, now, "heed train")
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
