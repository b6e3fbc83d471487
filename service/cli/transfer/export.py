"""Command `heed export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from service.cli.console import DATA, Data, open_store, out


def export(
    what: Annotated[
        Literal["items", "events", "users"],
        typer.Argument(help="The catalogue, all histories, or all profiles."),
    ],
    file: Annotated[Path, typer.Argument(help="NAME.jsonl, .jsonl.gz or .jsonl.xz")],
    data: Data = DATA,
) -> None:
    """Write stored records as JSONL, in the format that [bold]heed import[/] reads."""
    from service.datasets.files.record_files import export_records

    with open_store(data) as store, out.status(f"writing {what}"):
        scans = {"items": store.scan_items, "events": store.scan_events, "users": store.scan_users}
        count = export_records(file, scans[what]())
    out.print(f"{count:,} {what} written to {file}", markup=False, soft_wrap=True)
