"""Runner of training jobs: one child process at a time, with progress that survives a restart."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from service.domain.errors import Busy, Conflict, HeedError, Unavailable
from service.jobs.job import Job, JobState
from service.jobs.job_records import CHILD_LOCK, JobRecords, LeaseWatch, TrainingLease
from service.runtime import durable_files, tracing
from service.runtime.child_process import ChildProcess
from service.runtime.logs import log_failure
from service.stores.base import Store

_training_log = logging.getLogger("heed.training")

_LEVELS = {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}
# Set again when the line is logged, or names that records have already.
_OWN = frozenset({"event", "level", "logger", "timestamp", "exception", "name", "message", "job"})


def log_child_line(line: str, job_id: str) -> str:
    """Log a line of stderr that is a log line of `service.runtime.logs`; return its text.

    Any other line is returned as it is and not logged: what libraries and Python print may quote
    the data.
    """
    event = _parse(line)
    if event is None:
        return line
    text = str(event["event"])
    fields = {f"training_{name}": value for name, value in event.items() if name not in _OWN}
    fields["job"] = job_id
    if exception := event.get("exception"):
        fields["exception"] = exception
        text = f"{text}: {str(exception).splitlines()[-1]}"
    level = _LEVELS.get(str(event["level"]), logging.INFO)
    _training_log.log(level, "%s", event["event"], extra=fields)
    return text


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = orjson.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"event", "level"} <= event.keys() else None


logger = logging.getLogger(__name__)

_POLL = 0.1  # seconds between two checks of the process and of requests to cancel
_SAVE_INTERVAL = 1.0  # seconds between two writes of progress to disk
_NICE = 10  # increment to this process's niceness for the training, which keeps requests fast
_LOST = "interrupted: the database did not answer, and another machine may train now"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class JobRunner:
    """Runs the training jobs of one namespace, which any number of processes share.

    A job whose service was killed is marked as failed on construction, and its process, if alive,
    killed. `argv` builds the command line from a job's options, and may raise Invalid. Machines
    that share the `store` share the jobs, of which one at a time runs. `on_success` is awaited
    after a training succeeded and before its job is `succeeded`, so that clients that see this
    state see the new version too; its exceptions fail the job. `grace` is the seconds between
    SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        root: Path,
        argv: Callable[[Mapping[str, Any]], Sequence[str]],
        *,
        store: Store | None = None,
        on_success: Callable[[Job], Awaitable[None]] | None = None,
        threads: int = 1,
        grace: float = 10.0,
    ) -> None:
        self._argv = argv
        self._file = store if store is not None and store.shared is None else None
        self._on_success = on_success
        self._threads = threads
        self._grace = grace
        self._records = JobRecords(root, store)
        self._live: dict[str, Job] = {}  # the job that this process runs
        self._task: asyncio.Task[None] | None = None
        self._child: ChildProcess | None = None
        self._closing = False
        # Counted over the jobs that this process ran.
        self.ended: dict[JobState, int] = dict.fromkeys(("succeeded", "failed", "cancelled"), 0)
        self.last_seconds = 0.0
        self._began = 0.0  # when the running child began, by the monotonic clock; 0 without one
        self._records.recover()

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def running_for(self) -> float:
        """Seconds that the training of this process has run; 0 without one."""
        return time.monotonic() - self._began if self._began else 0.0

    async def start(self, options: Mapping[str, Any]) -> str:
        """Start a training and return the id of its job.

        Raises Conflict while one runs, in this process or another; Invalid where `argv` refuses the
        options; StoreFull; Unavailable while the service shuts down or the database does not
        answer.
        """
        if self._closing:
            raise Busy("the service is shutting down")
        argv = list(self._argv(options))
        stack = contextlib.ExitStack()
        try:
            lease = await self._claim(stack)
            # The locked folder may belong to a later namespace of the same name.
            if self._file is not None and (problem := await self._file.problem()) is not None:
                raise Unavailable(problem)
            # A killed orphan takes a moment to end.
            child_lock = await self._claim_child(stack)
            if child_lock is None:
                raise Conflict("an interrupted training has not ended yet; one runs at a time")
            create = self._records.create
            job = await asyncio.to_thread(create, options, _now(), "the service")
            if self._closing:  # since the check above: nothing would stop the new training
                raise Busy("the service is shutting down")
        except BaseException:
            await asyncio.shield(asyncio.to_thread(stack.close))
            raise
        self._live[job.id] = job
        logger.info("job started", extra={"job": job.id})
        self._task = asyncio.create_task(self._run(job.id, argv, lease, child_lock, stack))
        return job.id

    async def get(self, job_id: str) -> Job:
        if job_id in self._live:
            return self._live[job_id]
        return await asyncio.to_thread(self._records.read, job_id)

    async def latest(self, limit: int) -> list[Job]:
        jobs = await asyncio.to_thread(self._records.latest, limit, frozenset(self._live))
        return [self._live.get(job.id, job) for job in jobs]

    async def cancel(self, job_id: str) -> Job:
        """Request that a job be stopped, whichever process runs it; return it. Raises NotFound.

        An ended job does not change, and a training that completes meanwhile has succeeded.
        """
        job = await self.get(job_id)
        if not job.is_final:
            await asyncio.to_thread(self._records.request_cancellation, job_id)
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
        self,
        job_id: str,
        argv: list[str],
        lease: TrainingLease,
        child_lock: int,
        stack: contextlib.ExitStack,
    ) -> None:
        arrived = time.monotonic()  # nobody sets this clock, unlike that of the job's record
        watch = LeaseWatch(lease, job_id)
        watching = asyncio.create_task(watch.run())
        try:
            try:
                done = await self._train(job_id, argv, watch, child_lock)
                if done.state == "succeeded" and self._on_success and not self._closing:
                    done = await self._announce(done, self._on_success)
            except HeedError as error:
                log_failure(logger, f"job {job_id} failed", error)
                done = self._live[job_id].with_error(error.told, _now())
            except Exception:
                logger.exception("job %s", job_id)
                done = self._live[job_id].with_error("internal error; see the log", _now())
            except asyncio.CancelledError:
                del self._live[job_id]  # its record is found to be interrupted at the next start
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
            if await asyncio.to_thread(self._records.write, done):
                del self._live[job_id]
        finally:
            watching.cancel()
            await asyncio.shield(asyncio.to_thread(stack.close))

    async def _train(self, job_id: str, argv: list[str], watch: LeaseWatch, child_lock: int) -> Job:
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
                inherit=[child_lock],
                nice=_NICE,
            )
        except (OSError, ValueError) as error:
            logger.error("job %s could not be started: %s", job_id, error)
            return self._live[job_id].with_error("it could not be started; see the log", _now())
        self._child = child
        try:
            self._live[job_id] = dataclasses.replace(
                self._live[job_id], state="running", started=_now()
            )
            self._began = time.monotonic()
            return await self._follow(job_id, child, watch)
        except BaseException:
            child.kill()
            await child.finish()  # reaps it
            raise
        finally:
            self._child, self._began = None, 0.0

    async def _follow(self, job_id: str, child: ChildProcess, watch: LeaseWatch) -> Job:
        loop = asyncio.get_running_loop()
        stopped: JobState | None = None
        saved: Job | None = None
        due = loop.time()
        while not await child.exited(_POLL):
            if self._closing or watch.state == "lost":
                stopped = "failed"
            elif watch.state == "cancelled":
                stopped = "cancelled"
            if stopped is not None:
                await child.stop(self._grace)
            elif self._live[job_id] is not saved and loop.time() >= due:
                now = self._live[job_id]
                if await asyncio.to_thread(self._records.write, now):
                    saved = now
                due = loop.time() + _SAVE_INTERVAL
        ended = self._live[job_id].with_exit(await child.finish(), _now(), stopped)
        return ended.with_error(_LOST, _now()) if watch.state == "lost" else ended

    async def _announce(self, job: Job, on_success: Callable[[Job], Awaitable[None]]) -> Job:
        try:
            await on_success(job)
        except HeedError as error:
            logger.error("job %s: trained, but not activated: %s", job.id, error)
            return job.with_error(f"trained, but not activated: {error.told}", _now())
        except Exception:
            logger.exception("job %s: the new version could not be activated", job.id)
            return job.with_error("trained, but not activated; see the log", _now())
        return dataclasses.replace(job, finished=_now())

    # Locks --------------------------------------------------------------------------------------

    async def _claim(self, stack: contextlib.ExitStack) -> TrainingLease:
        own = contextlib.ExitStack()
        claiming = asyncio.ensure_future(asyncio.to_thread(self._records.claim_training, own))
        try:
            lease = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            claiming.add_done_callback(lambda done: done.cancelled() or done.exception())
            claiming.add_done_callback(lambda _: own.close())
            raise
        stack.enter_context(own)
        return lease

    async def _claim_child(self, stack: contextlib.ExitStack) -> int | None:
        """Take the lock that the training inherits; None if it stays taken."""
        for _ in range(100):
            lock = durable_files.try_lock(self._records.folder / CHILD_LOCK)
            if lock is not None:
                stack.callback(os.close, lock)
                return lock
            await asyncio.sleep(0.02)
        return None


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
