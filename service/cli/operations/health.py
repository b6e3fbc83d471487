"""Command `heed health`: whether a running service is ready."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.console import out


def health(
    url: Annotated[
        str | None,
        typer.Option(help="Address of the service. By default this machine's, on HEED_PORT."),
    ] = None,
) -> None:
    """Ask a running service whether it is ready: exit code 0 when it is, 1 when not."""
    from service.runtime.health_check import check, local_url

    is_ready, sentence = check((url or local_url()).rstrip("/"))
    out.print(sentence, markup=False)
    if not is_ready:
        raise typer.Exit(1)
