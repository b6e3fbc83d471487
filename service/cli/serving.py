"""Commands `heed serve`, and `heed demo`, which serves a public data set and trains beside."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from service.cli.console import DATA, Data, describe_error, open_store, out, set_threads
from service.cli.imports import import_dataset, open_movielens
from service.cli.training import train
from service.domain.errors import HeedError

if TYPE_CHECKING:
    from service.engine.engine import Engine
    from service.http.server import OnServing

_LOOK = 0.5  # seconds between two looks at a training
_SAY = 15.0  # seconds between two lines about it


def demo(
    data: Data = DATA,
    host: Annotated[str | None, typer.Option(help="Address to bind.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind.")] = None,
    dataset: Annotated[str, typer.Option(help="ml-100k or ml-1m.")] = "ml-100k",
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Import and train, and do not serve.")
    ] = False,
) -> None:
    """Fetch MovieLens, import it, serve it, and train a model beside.

    Until the model is trained, answers come from content and popularity; then it is served without
    a restart. Steps already done are skipped.
    """
    from service.domain.settings import Settings
    from service.snapshots.shared_registry import open_registry

    if not prepare:
        set_threads(1)  # as `_serve` does; the training has a process of its own
    with open_store(data) as store:
        if not asyncio.run(store.counts())["events"]:
            import_dataset(store, open_movielens(dataset, data))
        model = open_registry(data, store).current()
    if not prepare:
        # Lines for people: no line for each request of the page, unless that is asked for.
        _serve(
            on_serving=partial(_show, trains=model is None),
            data=data,
            host=host,
            port=port,
            access_log=None if "HEED_ACCESS_LOG" in os.environ else 0,
            log_format=None if "HEED_LOG_FORMAT" in os.environ else "console",
        )
    elif model is None:
        train(data, Settings.read().encoder)


async def _show(engine: Engine, console: Console, base: str, *, trains: bool) -> None:
    """Print requests to try; with `trains`, train in a job and say what is served at the end."""
    from service.cli.progress_bars import said
    from service.http.examples import suggest

    def say(text: str) -> None:
        console.print(text.rstrip(), markup=False, soft_wrap=True)

    for example in await suggest(engine):
        console.print(example.replace("BASE", base), highlight=False, markup=False, soft_wrap=True)
    if not trains:
        return
    try:
        job = await engine.jobs.get(await engine.jobs.start({}))
    except HeedError as error:
        say(f"\nNo training is started: {error.detail}")
        return
    say(
        "\nA model is trained beside, and served when it is ready; until then answers come from "
        f"content and popularity. Its progress: {base}/#/models"
    )
    clock, due, last = asyncio.get_running_loop().time, 0.0, None
    while not job.is_final:
        progress = job.progress or {"stage": "starting"}
        kind = progress["stage"], "eta_s" in progress
        if kind != last or clock() >= due:
            say(said(progress))
            due, last = clock() + _SAY, kind
        await asyncio.sleep(_LOOK)
        job = await engine.jobs.get(job.id)
    if job.result is None:
        say(f"No model was trained: {job.error or job.state}. Try again with heed train.")
        return
    version = job.result["version"]
    state = "served now" if engine.live.snapshot.version == version else "kept, and not served"
    say(f"The model {version} is {state}. {job.result.get('sentence', '')}")


def serve(
    data: Data = DATA,
    host: Annotated[str | None, typer.Option(help="Address to bind; HEED_HOST.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind; HEED_PORT.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Worker processes, best one for each core; HEED_WORKERS. They share the port and "
            "the memory of the loaded model; caches and limits are per worker."
        ),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option(
            "--insecure",
            help="Allow binding an address that other machines can reach although there is no "
            "API key, so that nothing authenticates them.",
        ),
    ] = None,
    first_key: Annotated[
        bool,
        typer.Option(
            "--first-key",
            help="Where there never was an API key, create one with all scopes, in the file "
            "admin.key of the data directory.",
        ),
    ] = False,
) -> None:
    """Serve over HTTP. All other settings are environment variables HEED_*."""
    _serve(
        with_first_key=first_key,
        data=data,
        host=host,
        port=port,
        insecure=insecure,
        workers=workers,
    )


def _serve(
    *,
    on_serving: OnServing | None = None,
    with_first_key: bool = False,
    **options: Path | str | int | None,
) -> None:
    """Serve with these settings; None = as the environment says."""
    # Requests run in parallel, one thread each; set before torch and FAISS are imported.
    set_threads(1)
    # Imported modules and loaded data stay: the collector would walk them again and again, in vain.
    # The server enables it once it serves.
    gc.disable()
    from service.domain.settings import Settings
    from service.http import server
    from service.runtime import logs

    gc.freeze()
    logs.configure("info")  # until the settings say how
    try:
        settings = Settings.read({k: v for k, v in options.items() if v is not None})
        logs.configure(settings.log_level, settings.log_format)
        server.run(settings, out, on_serving=on_serving, with_first_key=with_first_key)
    except (HeedError, OSError) as error:
        if not logs.is_json():
            raise
        logging.getLogger("heed").critical("%s", describe_error(error))
        raise SystemExit(1) from None
