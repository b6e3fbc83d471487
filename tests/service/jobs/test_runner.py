"""Training jobs as real processes: success, failure, limits, cancellation and crashes."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from service.domain.errors import Conflict, Invalid, ModelRejected, NotFound, StoreFull, Unavailable
from service.jobs import job_records
from service.jobs import runner as jobs_module
from service.jobs.job import LOG_LINES, LOG_WIDTH, Job
from service.jobs.job_records import JobRecords
from service.jobs.runner import JobRunner
from service.runtime import child_process, durable_files
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore

T = TypeVar("T")
REPOSITORY = Path(__file__).parents[3]
PATIENCE = 3_600  # seconds, far below an age of 1970

PROLOGUE = """
import json, os, signal, subprocess, sys, time
def say(**message):  # not by print, which a signal must not interrupt to print itself
    os.write(1, json.dumps(message).encode() + b"\\n")
def hang():
    say(stage="fit", pid=os.getpid())
    time.sleep(60)
"""
SUCCEED = 'say(result={"version": "v1"})'
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); hang()"


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def argv(options: Mapping[str, Any]) -> list[str]:
    """A training that runs the code in its options."""
    return [sys.executable, "-I", "-S", "-c", PROLOGUE + str(options["code"])]


def ended(root: Path, code: str, **settings: Any) -> Job:
    """The job that runs `code`, when it has ended."""

    async def main() -> Job:
        jobs = JobRunner(root, argv, **settings)
        job = await end_of(jobs, await jobs.start({"code": code}))
        await jobs.close()
        return job

    return asyncio.run(main())


async def end_of(jobs: JobRunner, job_id: str) -> Job:
    """Return the job once it has ended."""
    while True:
        job = await jobs.get(job_id)
        if job.is_final:
            return job
        await asyncio.sleep(0.02)


def job_ids(root: Path) -> list[str]:
    """Return the ids of all jobs, oldest first."""
    return sorted(path.stem for path in (root / "jobs").glob("*.json"))


async def until(seen: Callable[[], Awaitable[T]]) -> T:
    """Return the first true value of `seen`, polled for at most 20 s."""
    async with asyncio.timeout(20):
        while True:
            if value := await seen():
                return value
            await asyncio.sleep(0.02)


async def hanging(jobs: JobRunner, code: str = "hang()") -> tuple[str, int]:
    """Start a job that hangs; return its id and process id."""
    job_id = await jobs.start({"code": code})

    async def progress() -> Mapping[str, Any] | None:
        return (await jobs.get(job_id)).progress

    return job_id, int((await until(progress) or {})["pid"])


def is_reaped(pid: int) -> bool:
    """True when there is no such process, not even a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def is_dead(pid: int) -> bool:
    """True when the process runs no more; an orphan may wait for its new parent to notice."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def on_disk(root: Path, job_id: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((root / f"jobs/{job_id}.json").read_text())
    return document


# What a training says -----------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_training_succeeds(tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """A successful job records progress, metrics and result, which survive a restart."""
    code = """
say(stage="fit", epoch=1, epochs=2, step=5, steps=10, loss=1.5, eta_s=3.0)
say(stage="fit", epoch=2, epochs=2, loss=0.5, validation={"hr": 0.25})
print("warming up")
sys.stderr.write("careful\\n")
say(stage="publish")
say(result={"version": "v1", "metrics": {"hr": 0.31}})
"""
    seen: list[tuple[str, str]] = []

    async def main() -> Job:
        async def announce(job: Job) -> None:
            public = await jobs.get(job.id)
            seen.append((job.state, public.state))

        jobs = JobRunner(tmp_path, argv, on_success=announce)
        job_id = await jobs.start({"code": code})
        assert (await jobs.get(job_id)).state in {"queued", "running"}
        job = await end_of(jobs, job_id)
        await jobs.close()
        return job

    with asyncio.Runner(loop_factory=loop) as runner:
        job = runner.run(main())
    assert seen == [("succeeded", "running")]
    assert (job.state, job.error, job.exit_code) == ("succeeded", None, 0)
    assert job.progress == {"stage": "publish"}
    assert job.metrics == {"hr": 0.31}
    assert job.result == {"version": "v1", "metrics": {"hr": 0.31}}
    assert (job.log, job.stderr) == (("warming up",), ("careful",))
    assert job.started is not None
    assert job.finished is not None
    assert job.created < job.started < job.finished
    again = JobRunner(tmp_path, argv)
    assert asyncio.run(again.get(job.id)) == job


@pytest.mark.parametrize(
    ("code", "error", "exit_code"),
    [
        ('say(error="no events to train on")', "no events to train on", 0),
        ('say(error="worse than v0"); sys.exit(2)', "worse than v0", 2),
        (SUCCEED + '; say(error="then it broke")', "then it broke", 0),
        (SUCCEED + "; sys.exit(3)", "the training process ended with exit code 3", 3),
        ("sys.exit('out of cheese')", "ended with exit code 1; heed jobs show", 1),
        ("pass", "ended without a result", 0),
        ('say(result="v1")', "ended without a result", 0),
        ("os.kill(os.getpid(), 9)", "was killed (SIGKILL), most likely because memory ran out", -9),
        ("os.kill(os.getpid(), 11)", "was ended by signal 11", -11),
    ],
)
def test_a_training_fails(tmp_path: Path, code: str, error: str, exit_code: int) -> None:
    """A process that ends without a result makes the job failed, with the reason, on disk too."""

    async def never(job: Job) -> None:
        raise AssertionError(job)

    job = ended(tmp_path, code, on_success=never)
    assert job.state == "failed"
    assert error in str(job.error)
    assert job.exit_code == exit_code
    assert on_disk(tmp_path, job.id)["state"] == "failed"


def test_a_command_that_does_not_exist_fails(tmp_path: Path) -> None:
    """A command that cannot be started makes the job failed, and the next job can start."""

    async def main() -> None:
        jobs = JobRunner(tmp_path, lambda options: [str(options["program"])])
        for program in ("/no/such/program", "nul\0"):
            job = await end_of(jobs, await jobs.start({"program": program}))
            assert job.state == "failed"
            assert "could not be started" in str(job.error)

    asyncio.run(main())


def test_output_of_a_job_is_bounded(tmp_path: Path) -> None:
    code = """
out = sys.stdout.buffer
out.write(bytes(range(256)) * 40 + b"\\n")
out.write(b"x" * 3_000_000 + b"\\n")
out.write(b"[" * 100_000 + b"\\n")
for text in ['{"stage": "fit", "loss": null, "step": 1}', '{"stage": "fit", "loss": NaN}',
             '{"stage": "fit", "eta_s": 1e999}', '{"stage": 5}', "[1]",
             '{"stage": "bad \\\\ud800"}', '{"result": {"half', "null", "7" * 5000, "", "   "]:
    out.write(text.encode() + b"\\n")
out.flush()
sys.stderr.buffer.write(b"\\xff" * 1_000_000)
say(result={"version": "v1"})
out.write(b"no newline at the end")
"""
    job = ended(tmp_path, code)
    assert job.state == "succeeded"
    assert job.progress == {"stage": "fit", "loss": None, "step": 1}
    assert job.log[-1] == "no newline at the end"
    assert '{"stage": 5}' in job.log
    assert "[1]" in job.log
    assert len(job.log) <= LOG_LINES
    assert all(len(line) <= LOG_WIDTH for line in (*job.log, *job.stderr))
    json.dumps(on_disk(tmp_path, job.id), allow_nan=False, ensure_ascii=False).encode()


def test_lines_do_not_depend_on_how_they_arrive(tmp_path: Path) -> None:
    """Lines are complete and in order, however the process splits its writes."""
    generator = random.Random(11)
    data = bytes(generator.choice(b"ab\n") for _ in range(600)) + b"x" * 400 + b"\nend"
    code = f"""
rest, sizes = {data!r}, {[generator.randrange(1, 70) for _ in range(600)]!r}
for size in sizes:
    os.write(1, rest[:size])
    rest = rest[size:]
    time.sleep(0.0005)
"""
    expected = [line.decode() for line in data.split(b"\n") if line]
    assert list(ended(tmp_path, code).log) == expected[-LOG_LINES:]


def test_training_process_is_niced_and_isolated(tmp_path: Path) -> None:
    code = """
while os.getpriority(os.PRIO_PROCESS, 0) == OWN < 19:
    time.sleep(0.01)
say(result={"nice": os.getpriority(os.PRIO_PROCESS, 0), "session": os.getsid(0) == os.getpid(),
            "threads": os.environ["OMP_NUM_THREADS"], "stdin": sys.stdin.read(),
            "descriptors": len(os.listdir("/proc/self/fd"))})
"""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    job = ended(tmp_path, code.replace("OWN", str(own)), threads=3)
    # Three streams, the lock, and the listing's own.
    assert job.result == {
        "nice": min(19, own + 10),
        "session": True,
        "threads": "3",
        "stdin": "",
        "descriptors": 5,
    }


@pytest.mark.parametrize(
    ("error", "told"),
    [(ModelRejected("the metric is worse"), "the metric is worse"), (KeyError("x"), "see the log")],
)
def test_a_version_that_cannot_be_loaded_fails_the_job(
    tmp_path: Path, error: Exception, told: str
) -> None:
    async def refuse(job: Job) -> None:
        raise error

    job = ended(tmp_path, SUCCEED, on_success=refuse)
    assert job.state == "failed"
    assert told in str(job.error)
    assert job.result == {"version": "v1"}


# One at a time, and stopping ----------------------------------------------------------------------


def test_one_training_at_a_time(tmp_path: Path) -> None:
    """Of concurrent starts in several services on one directory exactly one succeeds."""

    async def main() -> None:
        services = [JobRunner(tmp_path, argv) for _ in range(3)]
        starts = [service.start({"code": "hang()"}) for service in services for _ in range(2)]
        results = await asyncio.gather(*starts, return_exceptions=True)
        (job_id,) = (result for result in results if isinstance(result, str))
        assert sum(isinstance(result, Conflict) for result in results) == 5
        with pytest.raises(Conflict, match=f"job {job_id}"):
            await services[0].start({"code": SUCCEED})
        for service in services:
            await service.close()
        after = JobRunner(tmp_path, argv)
        assert (await end_of(after, await after.start({"code": SUCCEED}))).state == "succeeded"

    asyncio.run(main())


@pytest.mark.parametrize("code", ["hang()", DEAF])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_cancellation(tmp_path: Path, code: str, elsewhere: bool) -> None:
    """A job is cancelled from any service, by SIGKILL if SIGTERM is ignored, and is reaped."""

    async def main() -> None:
        jobs = JobRunner(tmp_path, argv, grace=0.2)
        job_id, pid = await hanging(jobs, code)
        await (JobRunner(tmp_path, argv) if elsewhere else jobs).cancel(job_id)
        job = await end_of(jobs, job_id)
        assert (job.state, job.error) == ("cancelled", "cancelled on request")
        assert job.exit_code == (-signal.SIGKILL if code == DEAF else -signal.SIGTERM)
        assert is_reaped(pid)
        assert await jobs.cancel(job_id) == job  # once more changes nothing

        async def is_stored() -> bool:  # a thread writes the file
            return bool(on_disk(tmp_path, job_id)["state"] == "cancelled")

        assert await until(is_stored)
        assert (await end_of(jobs, await jobs.start({"code": SUCCEED}))).state == "succeeded"
        with pytest.raises(NotFound):
            await jobs.cancel("nothing")

    asyncio.run(main())


def test_a_success_cannot_be_cancelled_away(tmp_path: Path) -> None:
    """A process that reports its result on SIGTERM makes the job succeeded."""
    code = f"signal.signal(signal.SIGTERM, lambda *_: ({SUCCEED}, os._exit(0))); hang()"

    async def main() -> None:
        jobs = JobRunner(tmp_path, argv)
        job_id, _ = await hanging(jobs, code)
        await jobs.cancel(job_id)
        assert (await end_of(jobs, job_id)).state == "succeeded"

    asyncio.run(main())


@pytest.mark.parametrize("code", ["hang()", DEAF])
def test_shutdown_leaves_nothing_behind(tmp_path: Path, code: str) -> None:
    """Closing kills the process and its children, fails the job and refuses new jobs."""
    family = "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    family += "print(other.pid, flush=True)\n"

    async def main() -> None:
        jobs = JobRunner(tmp_path, argv, grace=0.2)
        job_id, pid = await hanging(jobs, family + code)
        other = int((await jobs.get(job_id)).log[0])
        await jobs.close()
        job = await jobs.get(job_id)
        assert (job.state, job.error) == ("failed", "interrupted: the service was shut down")
        assert is_reaped(pid)
        assert await until(lambda: asyncio.to_thread(is_dead, other))
        with pytest.raises(Unavailable):
            await jobs.start({"code": SUCCEED})
        await jobs.close()

    asyncio.run(main())


def test_a_cancelled_loop_kills_the_training(tmp_path: Path) -> None:
    async def main() -> tuple[str, int]:
        return await hanging(JobRunner(tmp_path, argv), DEAF)

    job_id, pid = asyncio.run(main())
    assert is_reaped(pid)
    job = asyncio.run(JobRunner(tmp_path, argv).get(job_id))
    assert job.state == "failed"
    assert "interrupted" in str(job.error)


def test_open_pipe_of_a_daemon_delays_the_job_by_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_DRAIN_TIMEOUT", 0.1)
    code = """
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                          start_new_session=True)
say(result={"pid": daemon.pid})
"""
    job = ended(tmp_path, code)
    assert job.state == "succeeded"
    assert job.result is not None
    assert not is_dead(job.result["pid"])
    os.kill(job.result["pid"], signal.SIGKILL)


def test_stragglers_in_the_group_go_with_the_training(tmp_path: Path) -> None:
    code = """
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
say(result={"pid": other.pid})
"""
    job = ended(tmp_path, code)
    assert job.state == "succeeded"
    result = job.result or {}
    assert asyncio.run(until(lambda: asyncio.to_thread(is_dead, result["pid"])))


# Restarts -----------------------------------------------------------------------------------------


SERVICE = """
import asyncio, sys
from pathlib import Path
from service.jobs.runner import JobRunner

async def main():
    jobs = JobRunner(Path(sys.argv[1]), lambda options: [sys.executable, "-c", options["code"]])
    job_id = await jobs.start({"code": sys.argv[2]})
    while not (job := await jobs.get(job_id)).progress:
        await asyncio.sleep(0.02)
    print(job_id, job.progress["pid"], flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_service_leaves_an_interrupted_job(tmp_path: Path) -> None:
    service = subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(tmp_path), PROLOGUE + DEAF],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )

    async def main() -> None:
        assert service.stdout is not None
        job_id, pid = service.stdout.readline().split()
        watcher = JobRunner(tmp_path, argv)
        assert (await watcher.get(job_id)).state in {"queued", "running"}
        assert await until(lambda: asyncio.to_thread(on_disk(tmp_path, job_id).get, "progress"))
        assert (await watcher.get(job_id)).state == "running"
        with pytest.raises(Conflict):
            await watcher.start({"code": SUCCEED})
        service.kill()
        service.wait()
        assert not is_dead(int(pid))  # deaf, and it has not written to the pipe that is gone
        job = await watcher.get(job_id)
        assert (job.state, job.error) == ("failed", "interrupted: the process that ran it is gone")
        restarted = JobRunner(tmp_path, argv)
        assert await restarted.get(job_id) == job
        done = await end_of(restarted, await restarted.start({"code": SUCCEED}))
        assert done.state == "succeeded"
        assert is_dead(int(pid))

    with service:
        asyncio.run(main())


def test_damaged_job_record_is_logged_and_skipped(tmp_path: Path) -> None:
    whole = ended(tmp_path, SUCCEED)
    path = tmp_path / f"jobs/{whole.id}.json"
    data = path.read_bytes()
    generator = random.Random(5)
    jobs = JobRunner(tmp_path, argv)
    for cut in [*range(0, len(data), 7), *(["x"] * 50)]:
        if isinstance(cut, int):
            path.write_bytes(data[:cut])
        else:
            path.write_bytes(generator.randbytes(40))
        job = asyncio.run(jobs.get(whole.id))
        assert job.state == "failed"
        assert "damaged" in str(job.error)
    path.write_bytes(data.replace(whole.id.encode(), b"another"))
    assert "another" in str(asyncio.run(jobs.get(whole.id)).error)
    assert ended(tmp_path, SUCCEED).state == "succeeded"


def test_ids_cannot_leave_the_directory(tmp_path: Path) -> None:
    """An id with a path is not found, even if a job file exists there."""
    job = ended(tmp_path, SUCCEED)
    canary = tmp_path / "canary.json"
    canary.write_bytes((tmp_path / f"jobs/{job.id}.json").read_bytes())
    jobs = JobRunner(tmp_path, argv)
    for job_id in ("../canary", f"../jobs/{job.id}", f"{job.id}\n", "", ".", "\0", "\ud800", "A"):
        with pytest.raises(NotFound):
            asyncio.run(jobs.get(job_id))
        with pytest.raises(NotFound):
            asyncio.run(jobs.cancel(job_id))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["canary.json", "jobs"]


def test_refused_start_leaves_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(options: Mapping[str, Any]) -> list[str]:
        if "code" not in options:
            raise Invalid("/code", "is required")
        return argv(options)

    async def main() -> None:
        jobs = JobRunner(tmp_path, picky)
        with pytest.raises(Invalid, match="/code"):
            await jobs.start({})
        with monkeypatch.context() as full:
            full.setattr(durable_files, "write", no_room)
            with pytest.raises(StoreFull):
                await jobs.start({"code": SUCCEED})
        assert job_ids(tmp_path) == []
        assert (await end_of(jobs, await jobs.start({"code": SUCCEED}))).state == "succeeded"

    asyncio.run(main())


def test_a_disk_that_fills_up_does_not_stop_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job succeeds although its progress cannot be written to a full disk."""

    async def main() -> None:
        jobs = JobRunner(tmp_path, argv)
        job_id, pid = await hanging(jobs, ON_ALARM)
        monkeypatch.setattr(durable_files, "write", no_room)
        os.kill(pid, signal.SIGALRM)
        assert (await end_of(jobs, job_id)).state == "succeeded"

    asyncio.run(main())


ON_ALARM = f"signal.signal(signal.SIGALRM, lambda *_: ({SUCCEED}, os._exit(0))); hang()"


def no_room(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


# A clock that is set ----------------------------------------------------------------------------


def test_jobs_are_in_the_order_of_their_starts_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_records, "KEPT", 2)
    records = JobRecords(tmp_path)
    times = (10**15 + 7, 10**15, 10**15 - 10**9, 5)
    created = [records.create({}, at, "a test").id for at in times]
    assert [job.id for job in records.latest(9)] == created[:1:-1]


def test_a_training_runs_for_some_time_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        jobs = JobRunner(tmp_path, argv)
        job_id, _ = await hanging(jobs)
        monkeypatch.setattr(jobs_module, "_now", lambda: 5)
        assert 0 < jobs.running_for < PATIENCE
        await jobs.cancel(job_id)
        await end_of(jobs, job_id)
        assert 0 < jobs.last_seconds < PATIENCE
        assert jobs.running_for == 0

    asyncio.run(main())


def test_no_training_starts_in_the_next_namespace_of_the_name(tmp_path: Path) -> None:
    """A runner of a removed namespace leaves the folder of its successor alone."""

    async def main() -> None:
        folder = tmp_path / "acme"
        store = SQLiteStore(folder / STORE_FILE)
        runner = JobRunner(folder, argv, store=store)
        folder.rename(tmp_path / "removed")
        successor = SQLiteStore(folder / STORE_FILE)
        JobRunner(folder, argv, store=successor)
        try:
            with pytest.raises(Unavailable):
                await runner.start({"code": SUCCEED})
            assert await runner.latest(1) == []
        finally:
            await runner.close()
            await store.close()
            await successor.close()

    asyncio.run(main())
