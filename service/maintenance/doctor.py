"""Diagnosis: reading an installation, and running all checks on it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from service.domain.errors import Corrupt, HeedError, Invalid
from service.domain.names import DEFAULT_NAMESPACE
from service.domain.settings import Settings
from service.maintenance.backup import find_namespaces
from service.maintenance.doctor_checks import (
    FINDINGS,
    HOST_CHECKS,
    LOG_CHECKS,
    NAMESPACE_CHECKS,
    SERVER_CHECKS,
    SEVERITIES,
    Finding,
    check_backup,
    check_model_files,
    check_store_file,
    run_checks,
)
from service.maintenance.installation import (
    DAY,
    Disk,
    Installation,
    KeyRefused,
    NamespaceData,
    ServedModel,
    read_log,
    read_metrics,
    read_model,
    read_shared_model,
    summarise_database,
)
from service.runtime.data_layout import denied, namespace_folder
from service.snapshots.shared_registry import KIND
from service.snapshots.text_embeddings import open_encoder
from service.snapshots.version_files import parse_manifest
from service.stores.opening import is_shared
from service.stores.postgres.connections import Connections
from service.stores.postgres.dialect import run_job_blocking
from service.stores.postgres.namespaces import find_namespace, namespace_names
from service.stores.postgres.server_state import read_server
from service.stores.postgres.shared_parts import SharedParts, is_leased
from service.stores.records import copying


def diagnose(
    data: Path,
    environment: Mapping[str, str],
    *,
    namespace: str = DEFAULT_NAMESPACE,
    full: bool = False,
    backup_days: int = 7,
    now: int | None = None,
    disk: Disk | None = None,
) -> list[Finding]:
    """Run all checks on an installation; return the findings, the gravest first.

    It is in `data`, or in the database that the setting `store` names. Nothing is changed. If a
    service runs meanwhile, its metrics are read.

    Args:
        namespace: the one of a database to look at; `default` = all of them.
        full: check every page of large stores too.
        backup_days: age in days from which on a backup is old.
        now: microseconds UTC; by default of the system's clock.
        disk: by default of the file system that holds `data`.
    """
    findings: list[Finding] = []
    try:
        settings = Settings.read({"data": data})
    except Invalid as error:
        settings = Settings.model_construct(data=data)
        findings.append(FINDINGS["invalid-setting"].about(error))
    if not data.is_dir() and not is_shared(settings.store):
        return [*findings, FINDINGS["no-store/directory"].about(data)]
    encoder = metrics = None
    try:
        encoder = open_encoder(settings.encoder).name
    except HeedError as error:
        findings.append(FINDINGS["no-encoder"].about(error))
    try:
        metrics = read_metrics(settings, environment)
    except KeyRefused as error:
        findings.append(FINDINGS["metrics-refused"].about(error))
    # A machine that only looks at a database has no directory.
    usage = shutil.disk_usage(
        next(each for each in (data, *data.absolute().parents) if each.exists())
    )
    installation = Installation(
        settings,
        environment,
        now=time.time_ns() // 1000 if now is None else now,
        disk=disk or Disk(usage.total, usage.free),
        metrics=metrics,
        encoder=encoder,
        backup_days=backup_days,
    )
    namespaces: list[NamespaceData] = []
    try:
        if is_shared(settings.store):
            installation, namespaces = _examine_database(installation, namespace, findings)
        else:
            namespaces = _examine_directory(installation, findings, full=full)
    except PermissionError as error:
        sentence = denied(Path(os.fsdecode(error.filename)))
        findings.append(FINDINGS["no-permission"].about(f"{sentence[0].upper()}{sentence[1:]}"))
    findings += run_checks(HOST_CHECKS, installation, namespaces)
    findings += check_backup(installation, namespaces)
    return sorted(findings, key=lambda each: SEVERITIES.index(each.severity))


def _examine_directory(
    installation: Installation, findings: list[Finding], *, full: bool
) -> list[NamespaceData]:
    """Return the namespaces of a data directory; what is wrong with each goes to `findings`."""
    namespaces = []
    for name, folder in find_namespaces(installation.settings.data):
        namespace = NamespaceData(
            name, folder, read_log(folder, installation.now), read_model(folder)
        )
        namespaces.append(namespace)
        faults = [*check_store_file(folder, full=full), *check_model_files(folder)]
        _add(findings, faults, installation, namespace)
    return namespaces


def _examine_database(
    installation: Installation, only: str, findings: list[Finding]
) -> tuple[Installation, list[NamespaceData]]:
    """Return a database's server and namespaces; what is wrong with each goes to `findings`.

    `only` is a namespace, or `default` for all of them.
    """
    connections = Connections(installation.settings.store)
    namespaces: list[NamespaceData] = []
    try:
        server = read_server(connections)
        installation = replace(installation, server=server)
        findings += run_checks(SERVER_CHECKS, server, installation.settings.workers)
        if server.schema != server.known_schema or server.unfinished_restore is not None:
            return installation, []
        with connections.plain() as connection:
            names = namespace_names(connection)
            numbers = {name: find_namespace(connection, name) for name in names}
        if only != DEFAULT_NAMESPACE:
            numbers = {only: numbers.get(only)}
        for name, number in numbers.items():
            if number is None:
                missing = FINDINGS["no-namespace"].about(name, name=server.name)
                findings.append(missing._replace(namespace=name))
                continue
            faults: list[Finding] = []
            namespace = None
            try:
                namespace = _read_namespace(installation, connections, name, number, faults)
                namespaces.append(namespace)
            except Corrupt as error:
                faults.append(FINDINGS["damaged-store/database"].about(error))
            _add(findings, faults, installation, namespace, name)
    except HeedError as error:
        findings.append(FINDINGS["store-unreachable"].about(error, name=connections.name))
    finally:
        connections.abandon()
    return installation, namespaces


def _add(
    findings: list[Finding],
    faults: list[Finding],
    installation: Installation,
    namespace: NamespaceData | None,
    name: str = DEFAULT_NAMESPACE,
) -> None:
    """Add the faults of a namespace that were found while it was read, and those of its checks."""
    if namespace is not None:
        name = namespace.name
        faults += run_checks(NAMESPACE_CHECKS, installation, namespace)
        if namespace.log is not None:
            faults += run_checks(LOG_CHECKS, namespace.log, namespace)
    findings += [fault._replace(namespace=name) for fault in faults]


def _read_namespace(
    installation: Installation,
    connections: Connections,
    name: str,
    number: int,
    faults: list[Finding],
) -> NamespaceData:
    """Read a namespace; faults of its models and jobs go to `faults`."""
    with connections.snapshot() as connection:
        log = summarise_database(connection, number, installation.now + DAY)
        is_training = is_leased(connection, number)
        origin = run_job_blocking(connection, number, copying.unfinished())
    if origin is not None:
        place = f"the namespace {name} of {connections.name}"
        faults.append(FINDINGS["unfinished-copy"].about(f"{place} of {origin}"))
    shared = SharedParts(connections, number)
    faults += [
        FINDINGS["interrupted-job"].about(row.job_id)
        for row in shared.jobs.unfinished()
        if not is_training
    ]
    model = _read_models(shared, faults)
    return NamespaceData(name, namespace_folder(installation.settings.data, name), log, model)


def _read_models(shared: SharedParts, faults: list[Finding]) -> ServedModel | None:
    """Verify all versions; return the one in use if it is intact."""
    files = shared.files(KIND)
    active, served = files.last_activation().name, None
    for stored in files.sets():
        try:
            model = read_shared_model(files, parse_manifest(stored.description, stored.name))
        except Corrupt as error:
            faults.append(FINDINGS["damaged-model"].about(error))
            continue
        if stored.name == active:
            served = model
    return served
