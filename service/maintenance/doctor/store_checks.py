"""Checks of the files in a namespace's directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import apsw

from service.domain.errors import Corrupt, HeedError, NotFound
from service.jobs.job import Job
from service.maintenance.doctor.findings import Finding
from service.maintenance.doctor.installation import Installation, NamespaceData
from service.runtime.data_layout import (
    CHECKPOINT_FILE,
    JOBS_FOLDER,
    STORE_FILE,
    UNFINISHED_RESTORE,
)
from service.runtime.durable_files import try_lock
from service.stores.records import copying
from service.stores.sqlite.database_file import read_store_file
from service.stores.sqlite.dialect import run_job
from service.stores.sqlite.guard import check_mark
from service.stores.sqlite.schema import SCHEMA_VERSION
from service.stores.sqlite.wal import check_wal

MAX_FULL_CHECK_BYTES = 256 << 20  # of a store whose pages are checked without `full`, ~1 s


def check_store_file(namespace: NamespaceData, *, full: bool) -> Iterator[Finding]:
    """Find damage of the store, and a schema of another version.

    The pages of a store of more than 256 MiB are checked only with `full`.
    """
    path = namespace.data / STORE_FILE
    try:
        with read_store_file(path) as store:
            yield from _check_schema(path, store.schema)
            if (origin := run_job(store.connection, copying.unfinished())) is not None:
                yield unfinished_copy(str(path), origin)
            if full or path.stat().st_size <= MAX_FULL_CHECK_BYTES:
                problem = store.connection.execute("PRAGMA quick_check(1)").get
                if problem != "ok":
                    raise Corrupt(f"{path} is damaged: {problem}")
            else:
                yield Finding(
                    "unchecked-pages",
                    "note",
                    f"The pages of {path} were not checked: it is large.",
                    "Damage is found when a page is read, not before.",
                    "Run heed doctor --full when there is time.",
                )
            _check_log(store.connection, Path(f"{path}-wal"))
            check_mark(path, store.connection.execute("SELECT clock FROM state").get)
    except NotFound:
        yield Finding(
            "no-store",
            "error",
            f"There is no store at {path}.",
            "A service that is started there is empty.",
            "Check HEED_DATA or --data; restore a backup with heed restore.",
        )
    except HeedError as error:
        yield Finding(
            "damaged-store",
            "error",
            f"{error}.",
            "Events may be lost, and the service may not start.",
            "Stop the service, keep a copy of the directory, and restore a backup (heed restore) "
            "into another one. Check the disk.",
        )


def unfinished_copy(place: str, origin: str) -> Finding:
    """Return the finding for an unfinished copy."""
    return Finding(
        "unfinished-copy",
        "error",
        f"The copy of {origin} to {place} has not finished.",
        "Users and events may be missing, and no command will use the store.",
        "Run the same heed copy --from SOURCE --to TARGET again, which goes on where it stopped.",
    )


def check_counts(_: Installation, namespace: NamespaceData) -> Iterator[Finding]:
    """Find a store whose counter of events differs from its events."""
    log = namespace.log
    if log is not None and log.events != log.stated_events:
        yield Finding(
            "wrong-counts",
            "error",
            f"The store counts {log.stated_events:,} events and has {log.events:,}.",
            "Something else than Heed has written to the store.",
            "Restore a backup, or export and import into a new directory.",
        )


def check_unfinished(_: Installation, namespace: NamespaceData) -> Iterator[Finding]:
    """Find what interrupted trainings and restores have left."""
    data = namespace.data
    if (data / UNFINISHED_RESTORE).exists():
        yield Finding(
            "unfinished-restore",
            "error",
            f"A restore into {data} was interrupted.",
            "The directory holds part of a backup, and no command will use it.",
            "Empty the directory and run heed restore again.",
        )
    if _is_locked(data / JOBS_FOLDER / "child.lock"):
        return  # a training runs
    if (data / CHECKPOINT_FILE).exists():
        yield Finding(
            "unfinished-training",
            "warning",
            f"A training has not finished: {data / CHECKPOINT_FILE} holds its state.",
            "Its model was never published.",
            "Train again, which resumes it if the events are the same, or delete the file.",
        )
    for path in sorted((data / JOBS_FOLDER).glob("*.json")):
        try:
            state = Job.from_json(path.read_bytes()).state
        except (ValueError, OSError):
            state = "failed"
        if state in {"queued", "running"}:
            yield interrupted_job(path.stem)


def interrupted_job(job_id: str) -> Finding:
    """Return the finding of a training whose process is gone."""
    return Finding(
        "interrupted-job",
        "warning",
        f"The training {job_id} is recorded as unfinished, and no process runs it.",
        "It was killed; clients that wait for it wait in vain until the next start.",
        "Start the service, which marks it as failed, and train again.",
    )


def check_permissions(_: Installation, namespace: NamespaceData) -> Iterator[Finding]:
    """Find a directory or a store that other accounts may write or read."""
    if not namespace.data.exists():
        return  # of a database that this machine does not serve
    mode = namespace.data.stat().st_mode
    path = namespace.data / STORE_FILE
    file_mode = path.stat().st_mode if path.exists() else 0
    if (mode | file_mode) & 0o022:
        yield Finding(
            "writable-by-others",
            "warning",
            f"Other accounts of this machine may write to {namespace.data} or its store.",
            "They can change or replace histories and models.",
            f"chmod -R go-w {namespace.data}",
        )
    elif mode & 0o001 and file_mode & 0o004:
        yield Finding(
            "readable-by-others",
            "note",
            f"Every account of this machine may read {path}.",
            "It holds histories of people.",
            f"chmod 700 {namespace.data}, unless only Heed's account exists.",
        )


def _check_schema(path: Path, schema: int) -> Iterator[Finding]:
    if schema > SCHEMA_VERSION:
        yield Finding(
            "newer-schema",
            "error",
            f"{path} has schema version {schema}; this Heed reads up to {SCHEMA_VERSION}.",
            "The service does not start.",
            "Install the version of Heed that wrote it, or a newer one.",
        )
    elif schema < SCHEMA_VERSION:
        yield Finding(
            "older-schema",
            "warning",
            f"{path} has schema version {schema}; this Heed writes {SCHEMA_VERSION}.",
            "The next start migrates it.",
            "Back it up first (heed backup), then start the service.",
        )


def _check_log(connection: apsw.Connection, log: Path) -> None:
    """Raise Corrupt where the log is damaged; not looked at while another process writes."""
    if not log.exists() or not log.stat().st_size:
        return
    connection.pragma("query_only", False)
    try:
        connection.execute("BEGIN IMMEDIATE")  # the log stands still; nothing is written
    except apsw.BusyError:
        return
    try:
        check_wal(log)
    finally:
        connection.execute("ROLLBACK")


def _is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    lock = try_lock(path)
    if lock is None:
        return True
    os.close(lock)
    return False


STORE_CHECKS = (check_counts, check_unfinished, check_permissions)
