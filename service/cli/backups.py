"""Commands `heed backup`, `heed restore`, `heed copy` and `heed export`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from service.cli.administration import read_ledger
from service.cli.console import (
    DATA,
    Data,
    JsonFile,
    Namespace,
    open_store,
    out,
    put_requests_first,
    set_threads,
    write_json,
)
from service.domain.errors import Conflict, Invalid
from service.domain.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from service.maintenance.backup_manifest import BackupManifest
    from service.maintenance.copying import StoreCopy
    from service.maintenance.store_places import StorePlace

_RECORDED = ("encoder", "embedding_dim", "keyword_fields")  # settings that belong to the data


def backup(
    target: Annotated[
        Path,
        typer.Argument(help="Folder of the backup: missing, empty, or an earlier backup."),
    ],
    data: Data = DATA,
    rest: Annotated[
        float,
        typer.Option(
            min=0,
            help="Time to rest after each MiB of the store, as a multiple of the time that the MiB "
            "took; 0 copies as fast as possible.",
        ),
    ] = 1.0,
) -> None:
    """Back up the data directory, or the database of HEED_STORE, also while it is served.

    Everything that was acknowledged before the command began is in the backup: events, items,
    users, scenarios and keys of all namespaces, the models and what search was fitted to. Settings
    (HEED_*) and downloads are not. A database is backed up as of one moment, and its backup has
    the form of a data directory's: either can be restored from it.

    A TARGET that holds an earlier backup is brought up to date: models that are there already are
    not copied again. Until the command succeeds, the earlier backup remains whole.

    Try a backup with [bold]heed restore TARGET --drill[/].
    """
    put_requests_first()
    set_threads(1)
    from service.cli.progress_bars import bars
    from service.domain.settings import Settings
    from service.maintenance.backup import back_up

    settings = Settings.read({"data": data})
    recorded = {name: getattr(settings, name) for name in _RECORDED}
    with bars(out) as progress:
        manifest = back_up(
            data, target, settings=recorded, store=settings.store, rest=rest, progress=progress
        )
    for reason in manifest.left_out:
        out.print(f"warning: a model was left out: {reason}", markup=False, soft_wrap=True)
    _describe(manifest)
    out.print(f"Backed up to {target}, {manifest.size / 1e6:,.1f} MB", markup=False, soft_wrap=True)


def restore(
    source: Annotated[Path, typer.Argument(help="Folder of a backup.")],
    data: Data = DATA,
    drill: Annotated[
        bool,
        typer.Option(
            "--drill",
            help="Restore into a temporary directory, answer a question from it, and remove it; "
            "--data stays as it is.",
        ),
    ] = False,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Where the temporary directory is made, of --drill and for HEED_STORE; default: "
            "TMPDIR."
        ),
    ] = None,
    forget_ledger: Annotated[
        Path | None,
        typer.Option(
            "--forget-ledger",
            help="Forget again, before the data may be used, the users whom this ledger names: a "
            "file of heed forgotten list --json, or the data directory that is replaced.",
        ),
    ] = None,
) -> None:
    """Restore a backup into an empty data directory, or into the empty database of HEED_STORE.

    Every file is verified before the first is written, and the restored content is compared with
    the backup's digests. --data must be missing or empty: data are never overwritten. So must the
    database be; files of one machine only come to --data then. A restore into a database
    that was interrupted goes on when the command is run again.

    To go back to a backup, stop the service, move the data directory away (or create another
    database), restore, and start.
    """
    set_threads(1)
    from service.cli.progress_bars import bars
    from service.domain.settings import Settings
    from service.maintenance import restore as drills
    from service.maintenance.store_places import parse_place
    from service.stores.opening import is_shared

    settings = Settings.read({"data": data})
    if drill:
        with bars(out) as progress:
            result = drills.drill(source, settings, work=work, progress=progress)
        _describe(result.manifest)
        for name, items in result.answers.items():
            out.print(f"{name}: a question was answered with {items} items")
        out.print(f"The drill succeeded in {result.seconds:.1f} s; nothing of it is left")
        return
    again = None if forget_ledger is None else _Forgetting(forget_ledger)
    with bars(out) as progress:
        if is_shared(settings.store):
            place = parse_place(settings.store).name  # without a password
            manifest = drills.restore_to_database(
                source, settings.store, data, work=work, before_use=again, progress=progress
            )
        else:
            place = str(data)
            manifest = drills.restore(source, data, before_use=again, progress=progress)
    _describe(manifest)
    out.print(f"Restored to {place}", markup=False, soft_wrap=True)
    if again is None:
        out.print(
            "Users who were forgotten after that time are in it again: run heed forgotten apply "
            "before you serve it, or restore with --forget-ledger.",
            soft_wrap=True,
        )
    else:
        out.print(f"{again.users:,} users with {again.events:,} events were forgotten again")
    if encoder := manifest.settings.get("encoder"):
        out.print(f"It was served with HEED_ENCODER={encoder}", markup=False, soft_wrap=True)


class _Forgetting:
    """Forgets users of restored namespaces, by the ledger of each or by one file for all.

    Raises:
        Invalid: there is no ledger.
    """

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self.users = self.events = 0

    def __call__(self, data: Path, folder: Path) -> None:
        from service.runtime.data_layout import STORE_FILE
        from service.stores.sqlite.store import SQLiteStore

        ledger = self._ledger
        if ledger.is_dir():
            ledger = ledger / folder.relative_to(data)
            if not (ledger / STORE_FILE).exists():
                return  # a namespace that was removed since
        entries = read_ledger(ledger)

        async def forget() -> None:
            store = SQLiteStore(folder / STORE_FILE)
            try:
                done = await store.forget_again(entries)
                await store.clean_up()
            finally:
                await store.close()
            self.users += done.users
            self.events += done.events

        asyncio.run(forget())


def _describe(manifest: BackupManifest) -> None:
    from service.domain.timestamps import to_rfc3339

    out.print(
        f"Content as of {to_rfc3339(manifest.created)}, by Heed {manifest.heed}",
        markup=False,
        soft_wrap=True,
    )
    for name, content in manifest.namespaces.items():
        tables = (content.digests or {}).items()
        counts = ", ".join(f"{each.records:,} {table}" for table, each in tables)
        model = content.model or "none"
        out.print(
            f"{name}: {counts or f'schema version {content.schema}'}; {len(content.models)} "
            f"models, in use: {model}",
            markup=False,
            soft_wrap=True,
        )


def copy(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="Data directory (or sqlite:DIRECTORY, or the file of a store), or "
            "postgresql://USER@HOST/DATABASE; a password is read from PGPASSFILE or ~/.pgpass.",
        ),
    ],
    target: Annotated[
        str,
        typer.Option("--to", metavar="TARGET", help="A place of the same kinds; it must be empty."),
    ],
    namespace: Namespace = DEFAULT_NAMESPACE,
    all_namespaces: Annotated[
        bool,
        typer.Option("--all-namespaces", help="Copy every namespace of SOURCE, under its name."),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Copy a store to another: from SQLite to PostgreSQL, back, or between two of a kind.

    Everything is copied that a store holds: events with their ids and order, items with
    embeddings, profiles, all versions of scenarios, API keys, the ledger of forgotten users, and
    imports, which can be undone at TARGET too. Models and what else is in the data directory are
    not copied: move them yourself.

    Stop the service of SOURCE first: what is written meanwhile makes the stores differ, and TARGET
    is not served then. An interrupted command goes on where it stopped when it is run again. The
    exit code is 0 once counts and digests of both are the same.
    """
    put_requests_first()
    from service.maintenance.store_places import parse_place

    ours, theirs = parse_place(source), parse_place(target)
    names = ours.namespaces() if all_namespaces else [namespace]
    if all_namespaces and not names:
        raise Invalid("", f"--from: there is no store in {ours.name}")
    report: dict[str, Any] = {}
    differing: list[str] = []
    for name in names:  # all, before the first is copied
        asyncio.run(_begin(ours, theirs, name, with_keys=all_namespaces))
    # A service opens `default` first, which is whole only when all are.
    for name in sorted(names, key=lambda name: name == DEFAULT_NAMESPACE):
        started = time.monotonic()
        done = asyncio.run(_copy(ours, theirs, name))
        seconds = time.monotonic() - started
        _describe_copy(name, done, seconds)
        differing += [f"{name}: {table}" for table in done.differing]
        report[name] = {
            "seconds": round(seconds, 1),
            "copied": {"users": done.users, "events": done.events},
            "tables": {
                each.name: {"source": each.source._asdict(), "target": each.target._asdict()}
                for each in done.tables
            },
        }
    write_json(json_file, {"namespaces": report, "differing": differing})
    if differing:
        out.print(
            f"{ours.name} and {theirs.name} differ in {', '.join(differing)}: something was "
            "written meanwhile. Stop the service, and copy to an empty place.",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)
    out.print(f"{theirs.name} holds what {ours.name} does.", markup=False, soft_wrap=True)
    out.print(
        "Not copied, since they are in the data directory and not in the store: models, fitted "
        "search parameters, records of trainings, caches and settings.",
        soft_wrap=True,
    )


async def _begin(ours: StorePlace, theirs: StorePlace, name: str, *, with_keys: bool) -> None:
    from service.maintenance.copying import begin_copy

    origin, own_id = ours.identity(name), ours.namespace_id(name)
    if with_keys and theirs.namespace_id(name) not in (None, own_id):
        raise Conflict(
            f"{theirs.name} has a namespace {name} of its own, which keys of {ours.name} do not "
            "open: remove it there, so that the copy creates it, or copy without --all-namespaces"
        )
    await ours.open(name).close()  # fails before the target is created
    target = theirs.open(name, own_id, is_target=True)
    try:
        if theirs.identity(name) == origin:
            raise Invalid("", "--from and --to are the same store")
        await begin_copy(target, origin)
    finally:
        await target.close()


async def _copy(ours: StorePlace, theirs: StorePlace, name: str) -> StoreCopy:
    from service.cli.progress_bars import bars
    from service.maintenance.copying import copy_store

    source = ours.open(name)
    try:
        target = theirs.open(name, is_target=True)
        try:
            with bars(out, "rows") as draw:
                return await copy_store(
                    source,
                    target,
                    ours.identity(name),
                    progress=lambda stage, done, total: draw(f"{name}: {stage}", done, total),
                )
        finally:
            await target.close()
    finally:
        await source.close()


def _describe_copy(name: str, done: StoreCopy, seconds: float) -> None:
    columns = ("table", "digest", "source", "target", "")
    table = Table(*columns, title=f"namespace {name}", title_justify="left")
    for column in table.columns[:4]:
        column.no_wrap = True
    table.columns[2].justify = table.columns[3].justify = "right"
    for each in done.tables:
        table.add_row(
            each.name.replace("_", " "),
            each.source.digest,
            f"{each.source.records:,}",
            f"{each.target.records:,}",
            "same" if each.is_same else "[bold red]differs[/]",
        )
    out.print(table)
    out.print(f"{done.events:,} events of {done.users:,} users copied in {seconds:,.1f} s")


def export(
    what: Annotated[
        Literal["items", "events", "users"],
        typer.Argument(help="The catalogue, all histories, or all profiles."),
    ],
    file: Annotated[Path, typer.Argument(help="NAME.jsonl, .jsonl.gz or .jsonl.xz")],
    data: Data = DATA,
) -> None:
    """Write stored records as JSONL, in the format that [bold]heed import[/] reads."""
    from service.datasets.record_files import export_records

    with open_store(data) as store, out.status(f"writing {what}"):
        scans = {"items": store.scan_items, "events": store.scan_events, "users": store.scan_users}
        count = export_records(file, scans[what]())
    out.print(f"{count:,} {what} written to {file}", markup=False, soft_wrap=True)
