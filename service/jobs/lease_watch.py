"""The lease of a running training, kept beside the work that it allows."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from service.domain.errors import HeedError
from service.jobs.job_store import TrainingLease
from service.runtime.logs import log_failure
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
