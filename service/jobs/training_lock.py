"""Lock of a data directory by which one training runs at a time, and its refusal of others.

The service's runner and `heed train` take the same lock. It is a lock of the system (flock), which
ends with the process that holds it: a killed training leaves none behind.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from service.domain.errors import Conflict
from service.domain.timestamps import to_rfc3339
from service.jobs.job_store import JobStore
from service.runtime import durable_files
from service.runtime.data_layout import RUNNER_LOCK

_ATTEMPTS = 10  # a process that reaps interrupted jobs holds the lock for a moment
_PAUSE = 0.05  # seconds between two attempts


def conflict(store: JobStore) -> Conflict:
    """Return the error of a second training: what runs, since when and how to stop it."""
    for job_id in store.ids()[:-4:-1]:
        job = store.read(job_id)
        if not job.is_final:
            who = f"job {job_id}, of {job.started_by or 'the service'}"
            return Conflict(
                f"a training is running since {to_rfc3339(job.created)} ({who}); one runs at a "
                f"time: wait for it, or stop it with `heed jobs cancel {job_id}` or "
                f"POST /v1/jobs/{job_id}/cancel"
            )
    return Conflict("a training is just being started by another process; one runs at a time")


@contextlib.contextmanager
def training_lock(folder: Path, store: JobStore) -> Iterator[None]:
    """Hold the lock in the folder of jobs. Raises `Conflict` when a training is running."""
    for _ in range(_ATTEMPTS):
        lock = durable_files.try_lock(folder / RUNNER_LOCK)
        if lock is not None:
            break
        time.sleep(_PAUSE)
    else:
        raise conflict(store)
    try:
        yield
    finally:
        os.close(lock)
