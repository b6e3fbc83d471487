"""Command line of the fault matrix: injects each fault, and prints a table of what held.

Needs Linux, `strace`, `mkfs.ext4` and libfaketime (Debian: faketime); faults of the disk need root,
for they mount file systems.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.faults import damage, durability, failover, outages, replicas, serving, skew
from tests.faults.matrix import Fault, Setup, Verdict
from tests.support import stepped_clock, tiny

FAULTS = (
    Fault("kill", "SIGKILL amid writes", "nothing acknowledged is lost", durability.killed),
    Fault("power", "loss of power", "nothing acknowledged is lost", durability.power, True),
    Fault("sync", "EIO of fsync", "no acknowledgement after it", durability.sync_fails),
    Fault("full", "disk full", "507 or 503, reads answered, recovers", durability.full_disk, True),
    Fault("damage", "damaged files", "found, or without effect", damage.damaged),
    Fault("leave", "clients that leave", "no other user's data", serving.disconnected),
    Fault("hostile", "large and slow requests", "refused, others answered", serving.hostile),
    Fault("order", "duplicates, order, 64 writers", "as one clean pass", serving.order),
    Fault("skew", "a clock that is set", "as one clean pass, no timer notices", skew.skew),
    Fault("churn", "search amid changes", "every answer of one version", serving.churn),
    Fault("swaps", "swaps, dead workers, stop", "no failed request", serving.swaps),
    Fault("failover", "PostgreSQL's primary killed", "0 acknowledged lost", failover.by_hand),
    Fault("patroni", "the same, with Patroni", "0 acknowledged lost", failover.by_patroni),
    Fault("hung", "PostgreSQL hangs or is slow", "p99 ≤ deadline + 50 ms", outages.hung),
    Fault("mixed", "clients leave as it hangs", "no other user's data", outages.mixed),
    Fault("crossed", "reads at another replica", "every write is read", replicas.crossed),
    Fault("exhausted", "no connection is free", "503 or 429, recovers", replicas.exhausted),
    Fault("soak", "long load", "no growth", serving.soak),
)

app = typer.Typer(add_completion=False)
out = Console()


@app.command()
def faults(
    names: Annotated[
        list[str] | None, typer.Argument(help="Rows: " + ", ".join(f.name for f in FAULTS) + ".")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
    scale: Annotated[
        float, typer.Option(help="Factor of repetitions and durations; 1 for the matrix.")
    ] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")] = None,
) -> None:
    """Inject faults into real processes, disks and files, and check what Heed promises."""
    known = {fault.name: fault for fault in FAULTS}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is no row; rows are {', '.join(known)}")
    chosen = [known[name] for name in names] if names else [*FAULTS]
    _check_tools(chosen)
    table = Table("fault", "promise", "", "what was seen", "weaker mode", title=f"seed {seed}")
    done: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="heed-faults-") as folder:
        world = _world(Path(folder))
        for fault in chosen:
            began = time.monotonic()
            with out.status(f"{fault.title} (seed {seed})"):
                place = Path(folder) / fault.name
                place.mkdir()
                verdict = done[fault.name] = fault.run(Setup(place, seed, scale, world))
            shutil.rmtree(place, ignore_errors=True)
            mark = "[green]held[/]" if verdict.proven else "[red]BROKEN[/]"
            table.add_row(fault.title, fault.promise, mark, verdict.figure, verdict.weaker or "–")
            out.print(
                f"{fault.name}: {mark} {verdict.figure}"
                f"{'; ' + verdict.weaker if verdict.weaker else ''}"
                f" ({time.monotonic() - began:.0f} s)",
                soft_wrap=True,
                highlight=False,
            )
    out.print(table)
    if json_file is not None:
        rows = {name: vars(verdict) for name, verdict in done.items()}
        json_file.write_text(json.dumps({"seed": seed, "scale": scale, "rows": rows}, indent=1))
    if not all(verdict.proven for verdict in done.values()):
        raise typer.Exit(1)


def _world(folder: Path) -> tiny.World:
    data = folder / "world"
    with out.status("training two small models"):
        tiny.populate(data)
        first = tiny.train(data)
        second = tiny.train(data, seed=1, activate=False)
    return tiny.World(data, first, second)


def _check_tools(chosen: list[Fault]) -> None:
    wanted = {"kill": ["strace"], "sync": ["strace"], "power": ["mkfs.ext4"]}
    for fault in chosen:
        if fault.needs_root and os.geteuid():
            raise typer.BadParameter(f"{fault.name} mounts a file system: run it as root")
        for tool in wanted.get(fault.name, ()):
            if shutil.which(tool) is None:
                raise typer.BadParameter(f"{fault.name} needs {tool}: install it first")
        if fault.name == "skew" and stepped_clock.library() is None:
            raise typer.BadParameter("skew needs libfaketime: install faketime first")


if __name__ == "__main__":
    app()
