"""Commands `heed backup` and `heed restore`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.console import DATA, Data, out, put_requests_first, set_threads
from service.cli.operations.forgotten import read_ledger

if TYPE_CHECKING:
    from service.domain.settings import Settings
    from service.maintenance.backups.manifest import BackupManifest, BackupProgress

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
    from service.domain.settings import Settings
    from service.maintenance.backups.backup import back_up

    settings = Settings.read({"data": data})
    recorded = {name: getattr(settings, name) for name in _RECORDED}
    with _bar() as progress:
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
    database be; what belongs to one machine alone comes to --data then. A restore into a database
    that was interrupted goes on when the command is run again.

    To go back to a backup, stop the service, move the data directory away (or create another
    database), restore, and start.
    """
    set_threads(1)
    from service.domain.settings import Settings
    from service.maintenance.backups import restore as drills

    settings = Settings.read({"data": data})

    if drill:
        with _bar() as progress:
            result = drills.drill(source, settings, work=work, progress=progress)
        _describe(result.manifest)
        for name, items in result.answers.items():
            out.print(f"{name}: a question was answered with {items} items")
        out.print(f"The drill succeeded in {result.seconds:.1f} s; nothing of it is left")
        return
    again = None if forget_ledger is None else _Forgetting(forget_ledger)
    manifest, place = _restore(source, settings, work, again)
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


def _restore(
    source: Path, settings: Settings, work: Path | None, again: _Forgetting | None
) -> tuple[BackupManifest, str]:
    """Restore to where the settings say; return what, and the place without a password."""
    from service.maintenance.backups.restore import restore, restore_to_database
    from service.maintenance.store_places import parse_place
    from service.stores.opening import is_shared

    with _bar() as progress:
        if is_shared(settings.store):
            manifest = restore_to_database(
                source,
                settings.store,
                settings.data,
                work=work,
                before_use=again,
                progress=progress,
            )
            return manifest, parse_place(settings.store).name
        manifest = restore(source, settings.data, before_use=again, progress=progress)
        return manifest, str(settings.data)


class _Forgetting:
    """Forgets users of restored namespaces, by the ledger of each or by one file for all."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self.users = self.events = 0

    def __call__(self, data: Path, folder: Path) -> None:
        """Forget the users of one namespace of a restored data directory.

        Raises:
            Invalid: there is no ledger.
        """
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


@contextmanager
def _bar() -> Iterator[BackupProgress]:
    """Draw the stage and its share; yield a function that takes the stage, done and total."""
    from rich.progress import Progress

    from service.cli.transfer.row_bars import columns

    with Progress(*columns(), console=out, transient=True) as bar:
        task = bar.add_task("", total=None, note="")

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total or None)

        yield show
