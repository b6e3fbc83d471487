"""Training in a background process, one at a time, with progress that outlives this process.

    <root>/jobs/<id>.json     the job, replaced atomically as it goes on
    <root>/jobs/<id>.cancel   someone, in any process, wants it cancelled
    <root>/jobs/runner.lock   held by the process that looks after the running job
    <root>/jobs/child.lock    held by that process and by the training itself, which inherits it

The second lock tells an orphan, a training whose service was killed, from no training at all.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from service.domain.errors import Conflict, HeedError, Unavailable
from service.jobs.job import Job, State
from service.jobs.job_store import JobFiles
from service.runtime import durable_files
from service.runtime.child_process import Child, kill_holders

logger = logging.getLogger(__name__)

_TICK = 0.1  # seconds between looks at the process and at the wish to cancel
_SAVE = 1.0  # seconds between two writes of progress to disk
_SHUT_DOWN = "interrupted: the service was shut down"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Jobs:
    """The training jobs of one data directory, shared by any number of processes.

    Args:
        root: the data directory; `jobs` in it is made when missing. A job that was running when
            its service was killed is marked as failed here, and its process, if alive, killed.
        argv: the command line for a job's options. It may raise Invalid.
        on_success: awaited after a training succeeded and before its job says so, so that
            whoever sees `succeeded` sees the new version too. What it raises fails the job.
        threads: how many threads the training's numerical libraries may use.
        nice: what is added to this process' niceness for the training, to keep serving responsive.
        grace: seconds between SIGTERM and SIGKILL.
        keep: how many jobs are remembered.
        clock: microseconds UTC.
    """

    def __init__(
        self,
        root: Path,
        argv: Callable[[Mapping[str, Any]], Sequence[str]],
        *,
        on_success: Callable[[Job], Awaitable[None]] | None = None,
        threads: int = 1,
        nice: int = 10,
        grace: float = 10.0,
        keep: int = 100,
        clock: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._root = root / "jobs"
        self._argv = argv
        self._on_success = on_success
        self._threads = threads
        self._nice = nice
        self._grace = grace
        self._files = JobFiles(self._root, keep)
        self._clock = clock
        self._live: dict[str, Job] = {}  # the one that this process looks after
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._recover()

    async def start(self, options: Mapping[str, Any]) -> str:
        """Start a training; the job's id.

        Raises:
            Conflict: one is running, in this process or in another.
            Invalid: the options are not JSON, or `argv` refuses them.
            StoreFull: there is no room for the job's record.
            Unavailable: the service is shutting down.
        """
        if self._closing:
            raise Unavailable("the service is shutting down")
        argv = list(self._argv(options))
        with contextlib.ExitStack() as stack:
            await self._claim_runner(stack)
            await asyncio.to_thread(self._bury)
            lock = await self._claim_child(stack)
            job = await asyncio.to_thread(self._files.create, options, self._clock())
            if self._closing:  # it began meanwhile, and nobody would stop what starts now
                raise Unavailable("the service is shutting down")
            self._live[job.id] = job
            self._task = asyncio.create_task(self._run(job.id, argv, lock, stack.pop_all()))
        return job.id

    async def get(self, job_id: str) -> Job:
        """The job as it is now. Raises NotFound."""
        if job_id in self._live:
            return self._live[job_id]
        return await asyncio.to_thread(self._look, job_id)

    async def recent(self, limit: int = 20) -> list[Job]:
        """The newest jobs first."""
        names = await asyncio.to_thread(self._files.names)
        return [await self.get(name) for name in names[::-1][:limit]]

    async def wait(self, job_id: str) -> Job:
        """The job when it has ended. Raises NotFound."""
        while True:
            job = await self.get(job_id)
            if job.final:
                return job
            await asyncio.sleep(_TICK)

    async def cancel(self, job_id: str) -> Job:
        """Stop a job, whichever process runs it; the job when it has ended. Raises NotFound.

        A job that has ended stays as it is, and one that ends well meanwhile has succeeded.
        """
        job = await self.get(job_id)
        if not job.final:
            await asyncio.to_thread(self._files.wish_to_cancel, job_id)
        return await self.wait(job_id)

    async def close(self) -> None:
        """Stop the training that this process runs: SIGTERM, and SIGKILL after `grace` seconds."""
        self._closing = True
        if self._task is not None:
            await asyncio.wait([self._task])

    # The life of one job ------------------------------------------------------------------------

    async def _run(
        self, job_id: str, argv: list[str], lock: int, stack: contextlib.ExitStack
    ) -> None:
        with stack:
            try:
                done = await self._train(job_id, argv, lock)
                if done.state == "succeeded" and self._on_success and not self._closing:
                    done = await self._announce(done, self._on_success)
            except Exception:
                logger.exception("job %s", job_id)
                done = self._live[job_id].failed("an error of the service's own", self._clock())
            except asyncio.CancelledError:
                del self._live[job_id]  # what is on disk is found to be interrupted
                raise
            self._live[job_id] = done
            if await self._save(done):
                del self._live[job_id]

    async def _train(self, job_id: str, argv: list[str], lock: int) -> Job:
        def hear(line: str) -> None:
            self._live[job_id] = self._live[job_id].heard(line)

        def note(line: str) -> None:
            self._live[job_id] = self._live[job_id].noted(line)

        threads = dict.fromkeys(_THREADS, str(self._threads))
        try:
            child = await Child.spawn(
                argv,
                out=hear,
                err=note,
                environment={**threads, "PYTHONUNBUFFERED": "1"},
                inherit=[lock],
                nice=self._nice,
            )
        except (OSError, ValueError) as error:
            return self._live[job_id].failed(f"it could not be started: {error}", self._clock())
        try:
            self._live[job_id] = dataclasses.replace(
                self._live[job_id], state="running", started=self._clock()
            )
            return await self._follow(job_id, child)
        except BaseException:
            child.kill()
            await child.finish()  # a moment, and no zombie stays
            raise

    async def _follow(self, job_id: str, child: Child) -> Job:
        loop = asyncio.get_running_loop()
        stopped: State | None = None
        saved: Job | None = None
        due = loop.time()
        while not await child.exited(_TICK):
            if self._closing:
                stopped = "failed"
            elif self._files.is_cancelled(job_id):
                stopped = "cancelled"
            if stopped is not None:
                await child.stop(self._grace)
            elif self._live[job_id] is not saved and loop.time() >= due:
                saved = self._live[job_id]
                await self._save(saved)
                due = loop.time() + _SAVE
        code = await child.finish()
        reason = "cancelled on request" if stopped == "cancelled" else _SHUT_DOWN
        return self._live[job_id].ended(code, self._clock(), stopped=stopped, reason=reason)

    async def _announce(self, job: Job, on_success: Callable[[Job], Awaitable[None]]) -> Job:
        try:
            await on_success(job)
        except HeedError as error:
            return job.failed(f"trained, but not taken into service: {error}", self._clock())
        except Exception:
            logger.exception("job %s: the new version could not be taken into service", job.id)
            return job.failed("trained, but not taken into service: see the log", self._clock())
        return dataclasses.replace(job, finished=self._clock())

    async def _save(self, job: Job) -> bool:
        try:
            await asyncio.to_thread(self._files.write, job)
        except OSError as error:
            logger.warning("job %s: its record could not be written: %s", job.id, error)
            return False
        return True

    # Locks and files ----------------------------------------------------------------------------

    async def _claim_runner(self, stack: contextlib.ExitStack) -> None:
        for _ in range(5):  # one that looks after the dead has it for a moment
            if _take(self._root / "runner.lock", stack) is not None:
                return
            await asyncio.sleep(0.02)
        running = [job.id for job in await self.recent(3) if not job.final]
        which = f" (job {running[0]})" if running else ""  # its record may not be written yet
        raise Conflict(f"a training is running{which}; one runs at a time")

    async def _claim_child(self, stack: contextlib.ExitStack) -> int:
        for _ in range(100):  # an orphan that was killed takes a moment to die
            if (lock := _take(self._root / "child.lock", stack)) is not None:
                return lock
            await asyncio.sleep(0.02)
        raise Conflict("a training that was interrupted has not ended yet; one runs at a time")

    def _recover(self) -> bool:
        """Bury the dead; False when someone looks after a job, which then lives."""
        with contextlib.ExitStack() as stack:
            alone = _take(self._root / "runner.lock", stack) is not None
            if alone:
                self._bury()
        return alone

    def _bury(self) -> None:
        """Mark jobs that nobody looks after as failed, and kill what is left of them.

        Call it with the runner's lock.
        """
        with contextlib.ExitStack() as stack:
            if _take(self._root / "child.lock", stack) is None:
                kill_holders(self._root / "child.lock")
        for job in map(self._files.read, self._files.names()):
            if not job.final:
                try:
                    self._files.write(self._interrupted(job))
                except OSError as error:
                    logger.warning("job %s: cannot be marked as interrupted: %s", job.id, error)

    def _look(self, job_id: str) -> Job:
        job = self._files.read(job_id)
        if job.final:
            return job
        alone = self._recover()
        job = self._files.read(job_id)  # it may have ended meanwhile
        return self._interrupted(job) if alone and not job.final else job

    def _interrupted(self, job: Job) -> Job:
        return job.failed("interrupted: the service that ran it is gone", self._clock())


def _take(path: Path, stack: contextlib.ExitStack) -> int | None:
    lock = durable_files.try_lock(path)
    if lock is not None:
        stack.callback(os.close, lock)
    return lock
