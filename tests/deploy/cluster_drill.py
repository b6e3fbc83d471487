"""Drill of the cluster of docker-compose.yml: kills each container in turn, under load.

The cluster runs when this begins (`docker compose up --detach --wait balancer`). A container that
is killed by `docker compose kill` stays away until it is started again, after `--hold` seconds;
that of the published port is made to crash instead, which its restart policy mends. In the end
every event that was acknowledged must be stored, and none twice.
"""

from __future__ import annotations

import json
import subprocess
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tests.deploy.cluster_load import ClusterLoad, Summary
from tests.support.heed_process import ROOT

# Both nodes of the database, so that the leader is among them whichever it is, and the first of
# them once more, which by then follows or leads the other.
ORDER = (
    *("replica-1", "replica-2", "etcd-1", "etcd-2", "etcd-3"),
    *("postgres-1", "postgres-2", "postgres-1", "balancer"),
)
_PATIENCE = 180.0  # seconds until the cluster that is whole again counts as lost
_CALM = 2.0  # seconds without a failure after which it is well
# Kills all processes of a container but the first, which then ends.
_CRASH = ("exec", "-T", "{}", "sh", "-c", "kill -9 -1")

app = typer.Typer(add_completion=False)
out = Console()


def compose(*arguments: str, check: bool = True) -> str:
    """Run `docker compose` on the project's file, and return what it printed."""
    ended = subprocess.run(
        ["docker", "compose", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if check and ended.returncode:
        raise RuntimeError(f"docker compose {' '.join(arguments)}: {ended.stderr}")
    return ended.stdout


def members() -> list[dict[str, Any]]:
    """Return the nodes of the database as Patroni knows them, none if no node answers."""
    code = "import urllib.request as r; print(r.urlopen('{}', timeout=2).read().decode())"
    for node in ("postgres-1", "postgres-2"):
        command = code.format("http://127.0.0.1:8008/cluster")
        answer = compose("exec", "-T", node, "python3", "-c", command, check=False)
        if answer:
            found: list[dict[str, Any]] = json.loads(answer)["members"]
            return found
    return []


def leader() -> str:
    """Name the node of the database that takes writes."""
    return next((each["name"] for each in members() if each["role"] == "leader"), "")


def is_whole() -> bool:
    """Report whether all containers are healthy, and a standby has every commit."""
    lines = compose("ps", "--format", "{{.Service}} {{.Health}}").splitlines()
    health = dict(line.split(" ", 1) for line in lines if " " in line)
    return {health.get(name) for name in ORDER} == {"healthy"} and any(
        each["role"] in {"sync_standby", "quorum_standby"} for each in members()
    )


def wait_until_whole(load: ClusterLoad) -> None:
    """Wait until nothing of the cluster is missing, and requests succeed."""
    until = time.monotonic() + _PATIENCE
    while not (load.is_well(time.monotonic() - _CALM) and is_whole()):
        if time.monotonic() > until:
            raise RuntimeError("the cluster did not come back")
        time.sleep(0.5)


def show(summary: Summary) -> str:
    """Say in short what became of requests."""
    failed = ", ".join(f"{count} x {name}" for name, count in sorted(summary.failed.items()))
    degraded = f", {summary.degraded} degraded" if summary.degraded else ""
    return f"{summary.attempts}: {failed or 'none failed'}{degraded}; {summary.longest_gap:.1f} s"


@app.command()
def drill(
    names: Annotated[
        list[str] | None, typer.Argument(help="Containers to kill; each of the cluster if none.")
    ] = None,
    url: Annotated[str, typer.Option(help="Of the balancer.")] = "http://127.0.0.1:8080",
    hold: Annotated[float, typer.Option(help="Seconds that a killed container is away.")] = 30,
) -> None:
    """Kill each container of the cluster under load, and compare what is stored afterwards."""
    key = compose("exec", "-T", "replica-1", "cat", "/data/admin.key").strip()
    table = Table("killed", "questions; longest gap", "writes; longest gap", "whole again after")
    with ClusterLoad(url, key) as load:
        time.sleep(_CALM)
        for name in ("nothing", *(names or ORDER)):
            wait_until_whole(load)
            is_leader = name == leader()
            begin = time.monotonic()
            if name == "balancer":
                compose(*(part.format(name) for part in _CRASH), check=False)
            elif name != "nothing":
                compose("kill", name)
            time.sleep(hold)
            end = time.monotonic()
            if name not in {"nothing", "balancer"}:
                compose("start", name)
            wait_until_whole(load)
            questions, writes = (load.summarise(begin, end, writes=w) for w in (False, True))
            row = f"{name} (leader)" if is_leader else name
            cells = (row, show(questions), show(writes), f"{time.monotonic() - end:.0f} s")
            table.add_row(*cells)
            out.print(" | ".join(cells), soft_wrap=True)
    lost, doubled, unasked = 0, 0, 0
    for user, acknowledged in load.acknowledged.items():
        stored = load.stored(user)
        lost += len(acknowledged - set(stored))
        doubled += len(stored) - len(set(stored))
        unasked += len(set(stored) - load.sent[user])
    out.print(table)
    count = sum(map(len, load.acknowledged.values()))
    out.print(f"{count} events acknowledged: {lost} lost, {doubled} doubled, {unasked} never sent")
    if lost or doubled or unasked:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
