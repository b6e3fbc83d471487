"""One training at a time over a data directory, whoever starts it: `heed train` or the service."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.heed_process import HeedProcess
from tests.support.server import Server
from tests.support.tiny import World
from tests.support.workers import eventually

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
