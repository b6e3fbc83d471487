"""One training at a time over a data directory, whoever starts it: `heed train` or the service."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.heed_process import HeedProcess
from tests.support.server import Server
from tests.support.tiny import World
from tests.support.waiting import eventually

LONG = {"epochs": 1000}


@pytest.fixture
def server(world: World, tmp_path: Path) -> Iterator[Server]:
    """The small world, served."""
    with Server(world.copy(tmp_path / "data")) as server:
        yield server


def heed(server: Server, *arguments: object, name: str) -> HeedProcess:
    """Run a command of `heed` on the data of a server."""
    log = server.data.with_name(f"{name}.log")
    return HeedProcess(*arguments, "--data", server.data, log=log)


def running(server: Server) -> dict[str, Any]:
    """Return the newest job, once it runs an epoch."""
    found: list[dict[str, Any]] = []

    def has_begun() -> bool:
        with server.client() as http:
            found[:] = http.get("/v1/jobs?limit=1").json()["jobs"]
        (job,) = found or [{"state": "", "progress": None}]
        return job["state"] == "running" and "epoch" in (job["progress"] or {})

    eventually(has_begun)
    return found[0]


def test_trainings_of_commands_and_service_exclude_each_other(server: Server) -> None:
    """A second training is refused with what runs; a killed one leaves no lock."""
    first = heed(server, "train", "--epochs", 1000, name="first")
    job = running(server)
    assert job["state"] == "running"
    assert job["started_by"].startswith(f"heed train, process {first.pid} on ")
    first.send(signal.SIGSTOP)  # so small a training would end meanwhile

    second = heed(server, "train", name="second")
    assert second.wait() == 1
    with server.client() as http:
        refused = http.post("/v1/models/train", json={"options": LONG})
    assert refused.status_code == 409
    for said in (" ".join(second.log().split()), refused.json()["detail"]):
        assert f"a training is running since {job['created']} (job {job['job_id']}" in said
        assert f"heed jobs cancel {job['job_id']}" in said

    first.send(signal.SIGKILL)
    first.wait()
    with server.client() as http:
        assert http.get(f"/v1/jobs/{job['job_id']}").json()["state"] == "failed"
        answer = http.post("/v1/models/train", json={"options": LONG})
        assert answer.status_code == 202
        assert http.post(answer.headers["location"] + "/cancel", json={}).status_code == 202


class Deaf:
    """Ignores SIGINT, as what a shell has started with `&`; a picklable callable.

    With a file, the training is in one computation as soon as the file exists: its main thread runs
    no line of Python.
    """

    def __init__(self, computing: Path | None) -> None:
        self._computing = computing

    def __call__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._computing is not None:
            from service.training import train_and_publish

            vars(train_and_publish)["hold_out"] = self._compute

    def _compute(self, _log: object) -> None:
        assert self._computing is not None
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        self._computing.touch()
        time.sleep(60)


@pytest.mark.parametrize("computes", [False, True])
def test_a_training_in_the_background_is_cancelled(server: Server, computes: bool) -> None:
    """`heed jobs cancel` ends a training that ignores SIGINT, also in a long computation."""
    computing = server.data.with_name("computing") if computes else None
    training = HeedProcess(
        "train", "--epochs", 1000, "--data", server.data,
        log=server.data.with_name("training.log"), prepare=Deaf(computing),
    )  # fmt: skip
    if computing is not None:
        eventually(computing.exists)
    with server.client() as http:
        job = running(server) if computing is None else http.get("/v1/jobs").json()["jobs"][0]
    assert heed(server, "jobs", "cancel", job["job_id"], name="cancel").wait() == 0
    assert training.wait() == 1
    assert "the training was cancelled on request" in training.log()
    with server.client() as http:
        assert http.get(f"/v1/jobs/{job['job_id']}").json()["state"] == "cancelled"
