"""Runner of training jobs: one child process at a time, with progress that survives a restart.

    <root>/jobs/<id>.json     the job, replaced atomically as it proceeds
    <root>/jobs/<id>.cancel   requests cancellation, from any process
    <root>/jobs/runner.lock   held by the process that runs the current job, `heed train` too
    <root>/jobs/child.lock    held by that process and inherited by the training

With the runner's lock free, the child's tells an orphaned training from none.
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
from service.jobs.child_logs import log_child_line
from service.jobs.job import Job, JobState
from service.jobs.job_store import JobStore
from service.jobs.training_lock import conflict
from service.runtime import durable_files, tracing
from service.runtime.data_layout import JOBS_FOLDER, RUNNER_LOCK
from service.runtime.processes.child_process import ChildProcess, kill_holders

logger = logging.getLogger(__name__)

_POLL = 0.1  # seconds between two checks of the process and of requests to cancel
_SAVE_INTERVAL = 1.0  # seconds between two writes of progress to disk
_NICE = 10  # increment to this process's niceness for the training, which keeps requests fast
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class JobRunner:
    """Runs the training jobs of one data directory, which any number of processes share.

    Args:
        root: the data directory; its folder `jobs` is created when missing. A job whose service
            was killed is marked as failed on construction, and its process, if alive, killed.
        argv: builds the command line from a job's options. It may raise Invalid.
        on_success: awaited after a training succeeded and before its job is `succeeded`, so that
            clients that see this state see the new version too. Its exceptions fail the job.
        threads: threads of the training's numerical libraries.
        grace: seconds between SIGTERM and SIGKILL.
        keep: number of jobs kept.
    """

    def __init__(
        self,
        root: Path,
        argv: Callable[[Mapping[str, Any]], Sequence[str]],
        *,
        on_success: Callable[[Job], Awaitable[None]] | None = None,
        threads: int = 1,
        grace: float = 10.0,
        keep: int = 100,
    ) -> None:
        self._root = root / JOBS_FOLDER
        self._argv = argv
        self._on_success = on_success
        self._threads = threads
        self._grace = grace
        self._store = JobStore(self._root, keep)
        self._live: dict[str, Job] = {}  # the job that this process runs
        self._task: asyncio.Task[None] | None = None
        self._child: ChildProcess | None = None
        self._closing = False
        # Of the jobs that this process ran.
        self.ended: dict[JobState, int] = dict.fromkeys(("succeeded", "failed", "cancelled"), 0)
        self.last_seconds = 0.0
        self._began = 0.0  # when the running child began, by the monotonic clock; 0 without one
        self._recover()

    @property
    def is_running(self) -> bool:
        """True while this process runs a training."""
        return self._task is not None and not self._task.done()

    @property
    def running_for(self) -> float:
        """Seconds that the training of this process has run so far; 0 without one."""
        return time.monotonic() - self._began if self._began else 0.0

    async def start(self, options: Mapping[str, Any]) -> str:
        """Start a training and return the id of its job.

        Raises:
            Conflict: one is running, in this process or in another.
            Invalid: `argv` refuses the options.
            StoreFull: the disk has no room for the job's file.
            Unavailable: the service is shutting down.
        """
        if self._closing:
            raise Unavailable("the service is shutting down")
        argv = list(self._argv(options))
        with contextlib.ExitStack() as stack:
            # A process that reaps interrupted jobs holds the lock for a moment.
            if await self._claim(RUNNER_LOCK, stack, attempts=5) is None:
                raise await asyncio.to_thread(conflict, self._store)
            await asyncio.to_thread(self._reap)
            # A killed orphan takes a moment to end.
            lock = await self._claim("child.lock", stack, attempts=100)
            if lock is None:
                raise Conflict("an interrupted training has not ended yet; one runs at a time")
            who = f"the service, process {os.getpid()}"
            job = await asyncio.to_thread(self._store.create, options, _now(), who)
            if self._closing:  # since the check above: nothing would stop the new training
                raise Unavailable("the service is shutting down")
            self._live[job.id] = job
            logger.info("job started", extra={"job": job.id})
            self._task = asyncio.create_task(self._run(job.id, argv, lock, stack.pop_all()))
        return job.id

    async def get(self, job_id: str) -> Job:
        """Return the job as it is now. Raises NotFound."""
        if job_id in self._live:
            return self._live[job_id]
        return await asyncio.to_thread(self._read, job_id)

    async def latest(self, limit: int) -> list[Job]:
        """Return the newest jobs as they are now, newest first."""
        ids = await asyncio.to_thread(self._store.ids)
        return [await self.get(job_id) for job_id in reversed(ids[-limit:])]

    async def cancel(self, job_id: str) -> Job:
        """Request that a job be stopped, whichever process runs it; return it. Raises NotFound.

        An ended job does not change, and a training that completes meanwhile has succeeded.
        """
        job = await self.get(job_id)
        if not job.is_final:
            await asyncio.to_thread(self._store.request_cancellation, job_id)
        return job

    async def close(self) -> None:
        """Stop the training that this process runs: SIGTERM, and SIGKILL after `grace` seconds."""
        self._closing = True
        if self._task is not None:
            await asyncio.wait([self._task])

    def kill(self) -> None:
        """Kill the training that this process runs, without waiting; call it from any thread."""
        self._closing = True
        if self._child is not None:
            self._child.kill()

    # Running one job ----------------------------------------------------------------------------

    async def _run(
        self, job_id: str, argv: list[str], lock: int, stack: contextlib.ExitStack
    ) -> None:
        arrived = time.monotonic()  # nobody sets this clock, unlike that of the job's record
        with stack:
            try:
                done = await self._train(job_id, argv, lock)
                if done.state == "succeeded" and self._on_success and not self._closing:
                    done = await self._announce(done, self._on_success)
            except Exception:
                logger.exception("job %s", job_id)
                done = self._live[job_id].with_error("internal error; see the log", _now())
            except asyncio.CancelledError:
                del self._live[job_id]  # its file is found to be interrupted at the next start
                raise
            self._live[job_id] = done
            self.ended[done.state] = self.ended.get(done.state, 0) + 1
            self.last_seconds = time.monotonic() - arrived
            _log_end(done, self.last_seconds)
            tracing.record(
                "training",
                1000 * done.created,
                1000 * (done.finished or done.created),
                {"heed.job": done.id, "heed.job.state": done.state},
                ok=done.state != "failed",
            )
            if await asyncio.to_thread(self._write, done):
                del self._live[job_id]

    async def _train(self, job_id: str, argv: list[str], lock: int) -> Job:
        def on_stdout(line: str) -> None:
            self._live[job_id] = self._live[job_id].with_stdout(line)

        def on_stderr(line: str) -> None:
            text = log_child_line(line, job_id)
            self._live[job_id] = self._live[job_id].with_stderr(text)

        threads = dict.fromkeys(_THREADS, str(self._threads))
        try:
            child = await ChildProcess.spawn(
                argv,
                on_stdout=on_stdout,
                on_stderr=on_stderr,
                environment={**threads, "PYTHONUNBUFFERED": "1"},
                inherit=[lock],
                nice=_NICE,
            )
        except (OSError, ValueError) as error:
            return self._live[job_id].with_error(f"it could not be started: {error}", _now())
        self._child = child
        try:
            self._live[job_id] = dataclasses.replace(
                self._live[job_id], state="running", started=_now()
            )
            self._began = time.monotonic()
            return await self._follow(job_id, child)
        except BaseException:
            child.kill()
            await child.finish()  # reaps it
            raise
        finally:
            self._child, self._began = None, 0.0

    async def _follow(self, job_id: str, child: ChildProcess) -> Job:
        loop = asyncio.get_running_loop()
        stopped: JobState | None = None
        saved: Job | None = None
        due = loop.time()
        while not await child.exited(_POLL):
            if self._closing:
                stopped = "failed"
            elif self._store.is_cancellation_requested(job_id):
                stopped = "cancelled"
            if stopped is not None:
                await child.stop(self._grace)
            elif self._live[job_id] is not saved and loop.time() >= due:
                saved = self._live[job_id]
                await asyncio.to_thread(self._write, saved)
                due = loop.time() + _SAVE_INTERVAL
        code = await child.finish()
        return self._live[job_id].with_exit(code, _now(), stopped)

    async def _announce(self, job: Job, on_success: Callable[[Job], Awaitable[None]]) -> Job:
        try:
            await on_success(job)
        except HeedError as error:
            return job.with_error(f"trained, but not activated: {error}", _now())
        except Exception:
            logger.exception("job %s: the new version could not be activated", job.id)
            return job.with_error("trained, but not activated; see the log", _now())
        return dataclasses.replace(job, finished=_now())

    def _write(self, job: Job) -> bool:
        """Write a job's file if the disk lets it: a training goes on without."""
        try:
            self._store.write(job)
        except OSError as error:
            logger.warning("job %s: its file could not be written: %s", job.id, error)
            return False
        return True

    # Locks and files ----------------------------------------------------------------------------

    async def _claim(self, name: str, stack: contextlib.ExitStack, *, attempts: int) -> int | None:
        """Take a lock for as long as `stack` is open; None if it stays taken."""
        for _ in range(attempts):
            if (lock := _try_lock(self._root / name, stack)) is not None:
                return lock
            await asyncio.sleep(0.02)
        return None

    def _recover(self) -> bool:
        """Reap interrupted jobs, unless a process runs one; True when none does."""
        with contextlib.ExitStack() as stack:
            unclaimed = _try_lock(self._root / RUNNER_LOCK, stack) is not None
            if unclaimed:
                self._reap()
        return unclaimed

    def _reap(self) -> None:
        """Mark interrupted jobs as failed, and kill orphaned trainings.

        The caller must hold the runner's lock.
        """
        with contextlib.ExitStack() as stack:
            if _try_lock(self._root / "child.lock", stack) is None:
                kill_holders(self._root / "child.lock")
        for job in map(self._store.read, self._store.ids()):
            if not job.is_final:
                self._write(_interrupted(job))

    def _read(self, job_id: str) -> Job:
        job = self._store.read(job_id)
        if job.is_final:
            return job
        unclaimed = self._recover()
        job = self._store.read(job_id)  # it may have ended meanwhile
        return _interrupted(job) if unclaimed and not job.is_final else job


def _log_end(job: Job, seconds: float) -> None:
    """Log how a job ended; its error stays in its record, for it may quote the training's data."""
    fields = {
        "job": job.id,
        "state": job.state,
        "seconds": round(seconds, 3),
        "exit_code": job.exit_code,
        "version": (job.result or {}).get("version"),
    }
    logger.log(logging.ERROR if job.state == "failed" else logging.INFO, "job ended", extra=fields)


def _now() -> int:
    return time.time_ns() // 1000


def _interrupted(job: Job) -> Job:
    return job.with_error("interrupted: the process that ran it is gone", _now())


def _try_lock(path: Path, stack: contextlib.ExitStack) -> int | None:
    lock = durable_files.try_lock(path)
    if lock is not None:
        stack.callback(os.close, lock)
    return lock
