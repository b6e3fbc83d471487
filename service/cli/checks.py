"""Commands `heed check`, `heed doctor` and `heed health`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.console import (
    DATA,
    Data,
    Namespace,
    describe_error,
    err,
    open_store,
    out,
    set_threads,
)
from service.domain.errors import Invalid
from service.domain.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from service.stores.values import CheckResult

_NOT_OF_A_DATABASE = (
    "HEED_STORE is a PostgreSQL database: --salvage and --accept-loss are for the file of a store. "
    "Promote a standby, recover the server from its base backup and log, or restore a backup into "
    "an empty database (heed restore); where there is none, save what can be read with heed copy "
    "--from URL --to DIRECTORY"
)


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
            help="Accept a store that lacks acknowledged changes or whose copy has not finished, "
            "or begin an empty one in place of a lost one.",
        ),
    ] = False,
) -> None:
    """Check the store, the models and the embeddings. Exit code 1 if anything is damaged.

    A running service goes on meanwhile. A store that is found intact takes writes again. With
    HEED_STORE the namespace's records and models in the database are checked.
    """
    from service.domain.settings import Settings
    from service.runtime.data_layout import STORE_FILE, namespace_of
    from service.stores.opening import is_shared
    from service.stores.postgres.check import check_database
    from service.stores.sqlite.check import check_modes, check_store
    from service.stores.sqlite.database_file import DatabaseFile

    url = Settings.read().store
    if is_shared(url):
        if salvage is not None or accept_loss:
            raise Invalid("", _NOT_OF_A_DATABASE)
        _conclude(
            check_database(url, namespace_of(data), full=full),
            _check_shared_models(data),
            _check_embeddings(data),
            check_modes(data),
            todo="Restore a backup into another database, or look at the server with pg_amcheck.",
        )
        return
    path = data / STORE_FILE
    if salvage is not None:
        _salvage(path, salvage)
        return
    if accept_loss:
        DatabaseFile(path, accept_loss=True)
        asyncio.run(_accept_copy(path))
        out.print(f"{path} is accepted as it is.", markup=False, soft_wrap=True)
    _conclude(
        check_store(path, full=full),
        _check_models(data),
        _check_embeddings(data),
        check_modes(data),
        todo="Restore a backup, or copy what is readable with `heed check --salvage FILE`.",
    )


async def _accept_copy(path: Path) -> None:
    from service.stores.sqlite.store import SQLiteStore

    store = SQLiteStore(path, is_target=True)
    try:
        record = await (bulk := store.bulk()).copy_record()
        if record is not None and not record.is_whole:
            await bulk.mark_copy(is_whole=True)
    finally:
        await store.close()


def _conclude(*checks: Iterable[CheckResult], todo: str) -> None:
    """Print the findings of all checks, and end with exit code 1 if there is a problem."""
    problems = 0
    for findings in checks:
        try:
            for finding in findings:
                problems += finding.level == "problem"
                out.print(f"{finding.level:<8}{finding.sentence}", markup=False, soft_wrap=True)
        except PermissionError as error:  # the other checks go on
            problems += 1
            out.print(f"{'problem':<8}{describe_error(error)}", markup=False, soft_wrap=True)
    if problems:
        err.print(f"{problems} problems. {todo}", markup=False, soft_wrap=True)
        raise typer.Exit(1)


def _check_models(data: Path) -> Iterable[CheckResult]:
    from service.domain.errors import HeedError
    from service.runtime.data_layout import MODELS_FOLDER
    from service.snapshots.shared_registry import open_registry
    from service.stores.values import CheckResult

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


def _check_shared_models(data: Path) -> Iterable[CheckResult]:
    """Check the versions in the database; damaged copies of this machine are fetched again."""
    from contextlib import closing

    from service.domain.errors import Corrupt, HeedError
    from service.snapshots.shared_registry import KIND
    from service.snapshots.version_files import check_chunks, parse_manifest
    from service.stores.values import CheckResult

    try:
        with open_store(data) as store:
            files = store.shared.files(KIND)
            active = files.last_activation().name
            for stored in files.sets():
                try:
                    manifest = parse_manifest(stored.description, stored.name)
                    with closing(files.read(stored.name)) as chunks:
                        for _ in check_chunks(manifest, chunks):
                            pass
                except Corrupt as error:
                    yield CheckResult("problem", f"model {stored.name}: {error.detail}")
                    continue
                yield CheckResult("ok", f"model {stored.name}: every file matches its manifest")
            if active is not None and files.find(active) is None:
                yield CheckResult("problem", f"model {active} is current, and is missing")
    except HeedError as error:
        yield CheckResult("problem", f"the models were not checked: {error.detail}")


def _check_embeddings(data: Path) -> Iterable[CheckResult]:
    from service.runtime.data_layout import EMBEDDINGS_FILE
    from service.snapshots.text_embeddings import is_intact
    from service.stores.values import CheckResult

    path = data / EMBEDDINGS_FILE
    if path.exists():
        if is_intact(path):
            yield CheckResult("ok", f"{path}: its checksum matches")
        else:
            damage = "is damaged; texts are encoded again at the next start"
            yield CheckResult("note", f"{path} {damage}")


def _salvage(path: Path, target: Path) -> None:
    from service.stores.sqlite.check import salvage

    done = salvage(path, target)
    for gap in done.gaps:
        ends = [
            *([f"after {gap.after}"] if gap.after else []),
            *([f"before {gap.before}"] if gap.before else []),
        ]
        place = " and ".join(ends) or "all rows"
        users = f", of users {' to '.join(map(repr, gap.users))}" if gap.users else ""
        sentence = f"lost    {gap.table}: rows with keys {place}{users}"
        out.print(sentence, markup=False, soft_wrap=True)
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


_COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}


def doctor(
    data: Data = DATA,
    namespace: Namespace = DEFAULT_NAMESPACE,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON instead of a table.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Check every page of stores over 256 MiB too.")
    ] = False,
    backup_days: Annotated[
        int, typer.Option(min=1, help="Age in days from which on a backup is old.")
    ] = 7,
) -> None:
    """Find what is wrong with this installation, and say what to do.

    Checks the stores, models, events, settings (HEED_*), disk, clock, permissions and backups, and
    the hit rate of the cache if the service runs; with HEED_STORE the server of the database, its
    replication and its sessions too. It only reads, and the service may be running.

    The exit code is 1 if there is an error or a warning; notes leave it at 0.
    """
    set_threads(1)
    from service.maintenance.doctor import diagnose
    from service.runtime.data_layout import find_namespace
    from service.stores.opening import is_shared

    # Other than other commands, it neither migrates a database nor fails without one.
    is_database = is_shared(os.environ.get("HEED_STORE", ""))
    folder = data if is_database else find_namespace(data, namespace)
    findings = diagnose(folder, os.environ, namespace=namespace, full=full, backup_days=backup_days)
    if as_json:
        typer.echo(json.dumps([each._asdict() for each in findings], indent=1))
    elif not findings:
        out.print("Nothing is wrong.")
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(show_lines=True)
        for name in ("severity", "what", "why it matters", "what to do"):
            table.add_column(name, overflow="fold")
        for each in findings:
            where = "" if each.namespace in (None, "default") else f"{each.namespace}: "
            table.add_row(
                Text(f"{each.severity}\n{each.code}", _COLOURS[each.severity]),
                Text(where + each.what),
                Text(each.why),
                Text(each.todo),
            )
        out.print(table)
    if any(each.severity != "note" for each in findings):
        raise typer.Exit(1)


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
