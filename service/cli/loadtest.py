"""`heed loadtest`: how a running service holds up under a load, and up to which."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from service.cli.console import JsonFile, err, out, set_threads, write_json
from service.domain.errors import Invalid


def loadtest(
    url: Annotated[str, typer.Option(help="Of a running service.")] = "http://127.0.0.1:8000",
    rate: Annotated[
        float, typer.Option(min=0.01, help="Requests a second; where a ramp begins.")
    ] = 50.0,
    duration: Annotated[
        float, typer.Option(min=0.1, help="Seconds; of each step of a ramp.")
    ] = 30.0,
    warmup: Annotated[
        float, typer.Option(min=0, help="Seconds of the same load before, which do not count.")
    ] = 2.0,
    arrivals: Annotated[
        Literal["poisson", "constant"],
        typer.Option(help="poisson: at random, as many users come; constant: evenly spaced."),
    ] = "poisson",
    mix: Annotated[
        str, typer.Option(help="Shares of score, recommend, search and events.")
    ] = "score=4,recommend=2,search=3,events=1",
    header: Annotated[
        list[str] | None,
        typer.Option(help='Of every request, such as "Authorization: Bearer …"; may be repeated.'),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="File that holds an API key; otherwise HEED_API_KEY is one."),
    ] = None,
    users: Annotated[int, typer.Option(min=1, help="How many users ask, drawn at random.")] = 200,
    targets: Annotated[int, typer.Option(min=1, max=1000, help="Items of a score.")] = 100,
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="Items of a recommendation or a search.")
    ] = 20,
    slo_ms: Annotated[
        float | None,
        typer.Option(min=0.001, help="Objective: answered with success in so many milliseconds."),
    ] = None,
    slo_percentile: Annotated[
        float, typer.Option(min=1, max=100, help="Of how many percent of all requests.")
    ] = 99.0,
    ramp: Annotated[
        bool,
        typer.Option(
            "--ramp",
            help="Raise the rate until the objective breaks, and say the highest that held; "
            "without --slo-ms, 50.",
        ),
    ] = False,
    max_rate: Annotated[float, typer.Option(min=1, help="Where a ramp ends.")] = 10_000.0,
    connections: Annotated[
        int, typer.Option(min=1, help="Most requests with the server at once; more wait.")
    ] = 500,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds after it was due when a request has failed.")
    ] = 10.0,
    silence: Annotated[
        float, typer.Option(min=0.5, help="Seconds without any answer that end the test.")
    ] = 10.0,
    write_to_users: Annotated[
        bool,
        typer.Option(
            "--write-to-users",
            help="Send events for the users that ask, not for users of the test's own.",
        ),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave what was written in the service.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    json_file: JsonFile = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write a page with plots here.")
    ] = None,
) -> None:
    """Load a running service over HTTP, and say how long its answers took and what failed.

    An open loop: requests leave on schedule whether or not earlier ones came back, and latency
    counts from when each was due, so that whoever would have met a stall of the server sees it.

    Users, items and words of titles come from the service itself. Events are written for users
    named loadtest-…, who are forgotten at the end; with --write-to-users, for users who are there,
    and each event is deleted at the end. Ctrl-C ends the load and reports what there is.

    Ends with 1 where an objective did not hold or the server stopped answering.

    An API key needs the scopes read and write, and admin for the server's memory to be reported.

    [dim]heed loadtest --rate 100 --duration 60 --html report.html[/]
    [dim]heed loadtest --ramp --slo-ms 50 --slo-percentile 99[/]
    """
    for option, path in (("--json", json_file), ("--html", html)):
        if path is not None and not path.parent.is_dir():
            raise Invalid(option, f"there is no folder {path.parent}; make it first")
    set_threads(1)
    from service.loadtest.options import Options, Slo, parse_headers, parse_url, read_key
    from service.loadtest.report import render_page
    from service.loadtest.runner import run

    headers = parse_headers(header or ())
    if not any(name.lower() == "authorization" for name, _ in headers):
        headers += read_key(key_file, os.environ.get("HEED_API_KEY"))
    report = run(
        out,
        Options(
            url=parse_url(url),
            rate=rate,
            duration=duration,
            warmup=warmup,
            arrivals=arrivals,
            mix=mix,
            headers=headers,
            users=users,
            targets=targets,
            limit=limit,
            connections=connections,
            timeout=timeout,
            silence=silence,
            slo=Slo(slo_percentile, (slo_ms or 50.0) / 1e3) if ramp or slo_ms else None,
            ramp=ramp,
            most=max_rate,
            write_to_users=write_to_users,
            keep=keep,
            seed=seed,
        ),
    )
    write_json(json_file, report)
    if html is not None:
        html.write_text(render_page(report), encoding="utf-8")
        out.print(f"{html} written.")
    if report["ended"] == "silent":
        err.print("[bold red]error:[/] the server stopped answering")
        raise typer.Exit(1)
    if report["ended"] == "stopped":
        raise typer.Exit(130)
    objective = (
        report["ramp"]["held"]
        if "ramp" in report
        else report["load"].get("slo", {}).get("held", True)
    )
    raise typer.Exit(int(not objective))
