"""Trainings of machines that share a database: one at a time, seen and stopped from everywhere."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from service.domain.errors import Conflict, NotFound, Unavailable
from service.jobs.job import Job
from service.jobs.runner import JobRunner
from service.runtime.data_layout import MODELS_FOLDER
from service.snapshots.registry import Registry
from service.stores.postgres import shared_parts as jobs_module
from service.stores.postgres.store import PostgresStore
from tests.service.jobs.test_runner import (
    DEAF,
    ON_ALARM,
    PROLOGUE,
    SUCCEED,
    argv,
    end_of,
    hanging,
    is_dead,
    until,
)
from tests.support.heed_process import ROOT
from tests.support.postgres_server import PostgresServer
from tests.support.replicas import ReplicaProcess, served
from tests.support.tiny import World

Machine = Callable[..., JobRunner]


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module.SharedLease, "interval", 0.1)


@contextmanager
def machines(url: str, namespace: str, folder: Path) -> Iterator[Machine]:
    """Open the trainings of machines by their names, each with a data directory of its own."""
    stores: list[PostgresStore] = []

    def opened(name: str, **settings: Any) -> JobRunner:
        stores.append(PostgresStore(url, namespace=namespace))
        return JobRunner(folder / name, argv, store=stores[-1], grace=0.2, **settings)

    yield opened
    for store in stores:
        asyncio.run(store.close())


@pytest.fixture
def machine(url: str, namespace: str, tmp_path: Path) -> Iterator[Machine]:
    with machines(url, namespace, tmp_path) as opened:
        yield opened


def test_one_training_at_a_time_over_all_machines(machine: Machine) -> None:
    """Of concurrent starts on several machines one succeeds; the others say what runs."""
    runners = [machine(name) for name in "abc"]

    async def main() -> None:
        starts = [runner.start({"code": "hang()"}) for runner in runners for _ in range(2)]
        results = await asyncio.gather(*starts, return_exceptions=True)
        (job_id,) = (result for result in results if isinstance(result, str))
        assert sum(isinstance(result, Conflict) for result in results) == 5
        with pytest.raises(Conflict, match=f"job {job_id}, of the service, process"):
            await machine("d").start({"code": SUCCEED})
        for runner in runners:
            await runner.close()
        assert (await end_of(runners[0], await runners[0].start({"code": SUCCEED}))).is_final
        assert (await end_of(runners[1], await runners[1].start({"code": SUCCEED}))).is_final

    with pytest.raises(Unavailable, match="shutting down"):
        asyncio.run(main())


def test_every_machine_lists_and_shows_all_jobs(machine: Machine) -> None:
    first, second = machine("a"), machine("b")
    code = 'say(stage="fit", epoch=1, epochs=2, loss=0.5); say(result={"version": "v1"})'

    async def main() -> None:
        ids = []
        for runner in (first, second, first):
            ids.append(await runner.start({"code": code}))
            await end_of(runner, ids[-1])
        done = await known_end(second, ids[-1])
        assert done.progress == {"stage": "fit", "epoch": 1, "epochs": 2, "loss": 0.5}
        assert (done.state, done.result) == ("succeeded", {"version": "v1"})
        for runner in (first, second, machine("c")):
            assert [job.id for job in await runner.latest(9)] == ids[::-1]
            assert [job.id for job in await runner.latest(2)] == ids[:0:-1]
        with pytest.raises(NotFound):
            await second.get("nothing")
        with pytest.raises(NotFound):
            await second.get("../nothing")

    asyncio.run(main())


async def known_end(runner: JobRunner, job_id: str) -> Job:
    """Return a job once it has ended, as far as another machine knows."""

    async def ended() -> Job | None:
        job = await runner.get(job_id)
        return job if job.is_final else None

    found = await until(ended)
    assert found is not None
    return found


@pytest.mark.parametrize("code", ["hang()", DEAF])
def test_cancellation_from_another_machine(machine: Machine, code: str) -> None:
    """A training is stopped, killed if need be, by a request on a machine that does not run it."""
    first, second = machine("a"), machine("b")

    async def main() -> None:
        job_id, pid = await hanging(first, code)

        async def progress() -> Mapping[str, Any] | None:
            return (await second.get(job_id)).progress

        assert await until(progress) == {"stage": "fit", "pid": pid}
        assert (await second.cancel(job_id)).state == "running"
        job = await end_of(first, job_id)
        assert (job.state, job.error) == ("cancelled", "cancelled on request")
        assert is_dead(pid)
        seen = await known_end(second, job_id)
        assert seen.state == "cancelled"
        assert (await second.cancel(job_id)) == seen  # once more changes nothing
        assert (await end_of(second, await second.start({"code": SUCCEED}))).state == "succeeded"

    asyncio.run(main())


@contextmanager
def running(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program, which is killed if it has not ended when the block does, or fails."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


SERVICE = """
import asyncio, sys
from pathlib import Path
from service.jobs.runner import JobRunner
from service.stores.postgres import shared_parts
from service.stores.postgres.store import PostgresStore

shared_parts.LEASE_SECONDS = 3.0

async def main():
    store = PostgresStore(sys.argv[1], namespace=sys.argv[2])
    argv = lambda options: [sys.executable, "-c", options["code"]]
    runner = JobRunner(Path(sys.argv[3]), argv, store=store)
    job_id = await runner.start({"code": sys.argv[4]})
    while not (job := await runner.get(job_id)).progress:
        await asyncio.sleep(0.02)
    print(job_id, job.progress["pid"], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_killed_machine_leaves_an_interrupted_job(
    url: str, namespace: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGKILL of a service its lease runs out: others mark the job, and may train.

    When the machine is started again it kills what is left of its training, whoever trains then.
    """
    monkeypatch.setattr(jobs_module, "LEASE_SECONDS", 3.0)

    async def main(service: subprocess.Popen[str]) -> None:
        assert service.stdout is not None
        job_id, pid = service.stdout.readline().split()
        second = machine("b")

        # The machine that runs a job knows it sooner than its record says it.
        async def is_running(other: JobRunner, job_id: str) -> bool:
            return (await other.get(job_id)).state == "running"

        assert await until(lambda: is_running(second, job_id))
        with pytest.raises(Conflict, match=job_id):
            await second.start({"code": SUCCEED})
        service.kill()
        service.wait()
        job = await known_end(second, job_id)
        assert (job.state, job.error) == ("failed", "interrupted: the process that ran it is gone")
        next_job, _ = await hanging(second)
        assert not is_dead(int(pid))
        restarted = machine("a")
        assert await until(lambda: asyncio.to_thread(is_dead, int(pid)))
        assert await restarted.get(job_id) == job
        assert [each.id for each in await restarted.latest(9)] == [next_job, job_id]
        assert await until(lambda: is_running(restarted, next_job))
        await second.close()

    with running(SERVICE, url, namespace, str(tmp_path / "a"), PROLOGUE + DEAF) as service:
        asyncio.run(main(service))


def test_a_machine_that_has_lost_its_lease_stops_training(url: str, machine: Machine) -> None:
    runner = machine("a")

    async def main() -> None:
        job_id, pid = await hanging(runner)
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE heed.job_leases SET holder = gen_random_uuid()")
        job = await end_of(runner, job_id)
        assert job.state == "failed"
        assert "another machine may train now" in str(job.error)
        assert is_dead(pid)

    asyncio.run(main())


def test_a_training_goes_on_without_the_database(tmp_path: Path) -> None:
    with (
        PostgresServer() as server,
        machines(server.create_database(), "default", tmp_path) as machine,
    ):
        first, second = machine("a"), machine("b")

        async def main() -> None:
            job_id, pid = await hanging(first, ON_ALARM)
            await asyncio.to_thread(server.stop)
            with pytest.raises(Unavailable):
                await second.get(job_id)
            with pytest.raises(Unavailable):
                await second.start({"code": SUCCEED})
            assert (await first.get(job_id)).state == "running"
            await asyncio.to_thread(server.start)

            async def is_running() -> bool:  # whose record could not be written until now
                return (await second.get(job_id)).state == "running"

            assert await until(is_running)
            with pytest.raises(Conflict, match=job_id):
                await second.start({"code": SUCCEED})
            os.kill(pid, signal.SIGALRM)
            assert (await end_of(first, job_id)).state == "succeeded"
            assert (await known_end(second, job_id)).state == "succeeded"
            assert (await end_of(second, await second.start({"code": SUCCEED}))).is_final

        asyncio.run(main())


COMMAND = """
import signal, sys, time
from pathlib import Path
from service.jobs.command_job import command_job
from service.stores.postgres.store import PostgresStore

# Where the tests run in the background of a shell, SIGINT is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
store = PostgresStore(sys.argv[1], namespace=sys.argv[2])
try:
    with command_job(Path(sys.argv[3]), {}, store) as job:
        print("trains", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    print(job.stopped_for, flush=True)
"""


def test_the_command_takes_the_same_lease(
    url: str, namespace: str, machine: Machine, tmp_path: Path
) -> None:
    """While `heed train` runs on a machine, services on others refuse to train, and can stop it."""

    async def main(command: subprocess.Popen[str]) -> None:
        assert command.stdout is not None
        assert command.stdout.readline() == "trains\n"
        service = machine("b")
        with pytest.raises(Conflict, match=f"of heed train, process {command.pid}\\)"):
            await service.start({"code": SUCCEED})
        (job,) = await service.latest(9)
        assert job.state == "running"
        await service.cancel(job.id)
        assert await asyncio.to_thread(command.stdout.readline) == (
            "the training was cancelled on request\n"
        )
        assert (await known_end(service, job.id)).state == "cancelled"
        assert (await end_of(service, await service.start({"code": SUCCEED}))).is_final

    with running(COMMAND, url, namespace, str(tmp_path / "a")) as command:
        asyncio.run(main(command))


PUBLISH = """
import json, sys
from pathlib import Path
from service.snapshots.registry import Registry
from service.snapshots.shared_registry import open_registry
from service.stores.postgres.store import PostgresStore

url, namespace, data, trained, version = {arguments!r}
store = PostgresStore(url, namespace=namespace)
files = Registry(Path(trained)).load(version)
open_registry(Path(data), store).publish(files, {{}}, version=version, activate=False)
print(json.dumps({{"result": {{"version": version}}}}))
"""


def test_what_one_machine_trains_all_serve(
    url: str, namespace: str, world: World, tmp_path: Path
) -> None:
    trained = str(world.data / MODELS_FOLDER)
    arguments = (url, namespace, str(tmp_path / "a"), trained, world.first)
    code = PUBLISH.format(arguments=arguments)

    async def main() -> None:
        async with served(url, namespace, tmp_path / "a") as live:

            async def serve(job: Job) -> None:
                await live.activate(str((job.result or {})["version"]))

            runner = JobRunner(
                tmp_path / "a",
                lambda options: [sys.executable, "-c", str(options["code"])],
                store=live._store,
                on_success=serve,
            )
            job = await end_of(runner, await runner.start({"code": code}))
            assert (job.state, job.error) == ("succeeded", None)
            assert live.snapshot.version == world.first

    with ReplicaProcess(url, namespace, tmp_path / "b") as other:
        other.wait(lambda said: said == {"version": "untrained", "fault": None})
        asyncio.run(main())
        other.wait(lambda said: said == {"version": world.first, "fault": None})
    own = Registry(tmp_path / "b" / MODELS_FOLDER)
    assert own.load(world.first) == Registry(world.data / MODELS_FOLDER).load(world.first)
