"""Command `heed check`: integrity of the stored data, and salvage of a damaged store."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.console import DATA, Data, err, out

if TYPE_CHECKING:
    from service.stores.sqlite.integrity.check import CheckResult
    from service.stores.sqlite.integrity.salvage import Gap


def check(
    data: Data = DATA,
    full: Annotated[
        bool,
        typer.Option("--full", help="Also check indexes and references row by row; takes longer."),
    ] = False,
    salvage: Annotated[
        Path | None,
        typer.Option(
            "--salvage",
            help="Copy everything readable of the store into a new one in this file, and report "
            "what is lost. Stop the service first; the old store stays as it is.",
        ),
    ] = None,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Accept a store that lacks acknowledged changes, or begin an empty one in place "
            "of a lost one.",
        ),
    ] = False,
) -> None:
    """Check the store, the models and the embeddings. Exit code 1 if anything is damaged.

    A running service goes on meanwhile. A store that is found intact takes writes again.
    """
    from service.runtime.data_layout import STORE_FILE
    from service.stores.sqlite.database_file import DatabaseFile
    from service.stores.sqlite.integrity.check import check_modes, check_store

    path = data / STORE_FILE
    if salvage is not None:
        _salvage(path, salvage)
        return
    if accept_loss:
        DatabaseFile(path, accept_loss=True)
        out.print(f"{path} is accepted as it is.", markup=False, soft_wrap=True)
    problems = sum(
        _print(findings)
        for findings in (
            check_store(path, full=full),
            _check_models(data),
            _check_embeddings(data),
            check_modes(data),
        )
    )
    if problems:
        err.print(
            f"{problems} problems. Restore a backup, or copy what is readable with "
            "`heed check --salvage FILE`.",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)


def _print(findings: Iterable[CheckResult]) -> int:
    """Print findings; return the number of problems."""
    problems = 0
    for finding in findings:
        problems += finding.level == "problem"
        out.print(f"{finding.level:<8}{finding.sentence}", markup=False, soft_wrap=True)
    return problems


def _check_models(data: Path) -> Iterable[CheckResult]:
    from service.domain.errors import HeedError
    from service.runtime.data_layout import MODELS_FOLDER
    from service.snapshots.versions.opening import open_registry
    from service.stores.sqlite.integrity.check import CheckResult

    if not (data / MODELS_FOLDER).exists():
        return
    registry = open_registry(data)
    try:
        current = registry.current()
    except HeedError as error:
        yield CheckResult("problem", f"{data / MODELS_FOLDER}/{error.detail}")
        current = None
    versions = registry.versions()
    for version in versions:
        if version.broken:
            yield CheckResult("problem", f"model {version.version}: {version.broken}")
        else:
            yield CheckResult("ok", f"model {version.version}: every file matches its manifest")
    if current is not None and current not in {version.version for version in versions}:
        yield CheckResult("problem", f"model {current} is current, and is missing")


def _check_embeddings(data: Path) -> Iterable[CheckResult]:
    from service.runtime.data_layout import EMBEDDINGS_FILE
    from service.snapshots.text_embeddings import is_intact
    from service.stores.sqlite.integrity.check import CheckResult

    path = data / EMBEDDINGS_FILE
    if path.exists():
        if is_intact(path):
            yield CheckResult("ok", f"{path}: its checksum matches")
        else:
            yield CheckResult(
                "note", f"{path} is damaged; texts are encoded again at the next start"
            )


def _salvage(path: Path, target: Path) -> None:
    from service.stores.sqlite.integrity import salvage

    done = salvage.salvage(path, target)
    for gap in done.gaps:
        out.print(f"lost    {_sentence(gap)}", markup=False, soft_wrap=True)
    for table, count in done.dropped.items():
        out.print(f"dropped {count:,} {table} that belong to lost rows", markup=False)
    rows = done.rows
    out.print(
        f"{rows['events']:,} events, {rows['users']:,} users and {rows['items']:,} items copied to "
        f"{target}; {path} stays as it is. To serve the copy, move it to {path} without the old "
        "log and mark, and check it with `heed check --full`.",
        markup=False,
        soft_wrap=True,
    )


def _sentence(gap: Gap) -> str:
    ends = [f"after {gap.after}" if gap.after else "", f"before {gap.before}" if gap.before else ""]
    place = " and ".join(filter(None, ends)) or "all rows"
    users = f", of users {' to '.join(map(repr, gap.users))}" if gap.users else ""
    return f"{gap.table}: rows with keys {place}{users}"
