"""Examination of a PostgreSQL database: its server, its namespaces, and the checks on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from service.domain.errors import Corrupt, HeedError
from service.domain.names import DEFAULT_NAMESPACE
from service.maintenance.doctor.database_log import summarise_database
from service.maintenance.doctor.findings import Finding
from service.maintenance.doctor.installation import (
    DAY,
    Installation,
    NamespaceData,
    ServedModel,
)
from service.maintenance.doctor.load_checks import LOAD_CHECKS
from service.maintenance.doctor.log_checks import LOG_CHECKS
from service.maintenance.doctor.model_checks import MODEL_CHECKS, damaged_model
from service.maintenance.doctor.server_checks import SERVER_CHECKS
from service.maintenance.doctor.store_checks import STORE_CHECKS, interrupted_job, unfinished_copy
from service.runtime.data_layout import namespace_folder
from service.snapshots.versions.manifest import Manifest, parse_manifest
from service.snapshots.versions.shared_registry import KIND
from service.snapshots.versions.transfer import check_chunks
from service.stores.postgres.connections import Connections
from service.stores.postgres.dialect import run_job_blocking
from service.stores.postgres.namespaces import find_namespace, namespace_names
from service.stores.postgres.server_state import read_server
from service.stores.postgres.shared_parts import SharedParts, is_leased
from service.stores.records import copying

_DESCRIPTION = "model.json"  # of the files of a version


def examine_database(
    installation: Installation, only: str = DEFAULT_NAMESPACE
) -> tuple[Installation, list[NamespaceData], list[Finding]]:
    """Read a database; return its server and namespaces, and what is wrong with each.

    Args:
        installation: whose setting `store` names the database.
        only: a namespace; `default` = all of them.
    """
    connections = Connections(installation.settings.store)
    try:
        return _examine(installation, connections, only)
    except HeedError as error:
        return installation, [], [_unreachable(connections, error)]
    finally:
        connections.abandon()


def _examine(
    installation: Installation, connections: Connections, only: str
) -> tuple[Installation, list[NamespaceData], list[Finding]]:
    server = read_server(connections)
    installation = replace(installation, server=server)
    findings = [each for check in SERVER_CHECKS for each in check(server)]
    workers = installation.settings.workers
    findings += [each for check in LOAD_CHECKS for each in check(server, workers)]
    namespaces: list[NamespaceData] = []
    if server.schema != server.known_schema or server.unfinished_restore is not None:
        return installation, namespaces, findings
    with connections.plain() as connection:
        names = namespace_names(connection)
        numbers = {name: find_namespace(connection, name) for name in names}
    if only != DEFAULT_NAMESPACE:
        numbers = {only: numbers.get(only)}
    for name, number in numbers.items():
        if number is None:
            findings.append(_no_namespace(name, server.name))
            continue
        found: list[Finding] = []
        try:
            namespace = _read_namespace(installation, connections, name, number, found)
        except Corrupt as error:
            found.append(_damaged(error))
        else:
            namespaces.append(namespace)
            for check in (*STORE_CHECKS, *MODEL_CHECKS, *LOG_CHECKS):
                found += check(installation, namespace)
        findings += [each._replace(namespace=name) for each in found]
    return installation, namespaces, findings


def _read_namespace(
    installation: Installation,
    connections: Connections,
    name: str,
    number: int,
    found: list[Finding],
) -> NamespaceData:
    """Read a namespace; faults of its models and jobs go to `found`."""
    with connections.snapshot() as connection:
        log = summarise_database(connection, number, installation.now + DAY)
        is_training = is_leased(connection, number)
        origin = run_job_blocking(connection, number, copying.unfinished())
    if origin is not None:
        found.append(unfinished_copy(f"the namespace {name} of {connections.name}", origin))
    shared = SharedParts(connections, number)
    found += [interrupted_job(row.job_id) for row in shared.jobs.unfinished() if not is_training]
    model = _read_models(shared, found)
    return NamespaceData(name, namespace_folder(installation.settings.data, name), log, model)


def _read_models(shared: SharedParts, found: list[Finding]) -> ServedModel | None:
    """Verify all versions; return the one in use, unless there is none that is intact."""
    files = shared.files(KIND)
    active, served = files.last_activation().name, None
    for stored in files.sets():
        try:
            manifest = parse_manifest(stored.description, stored.name)
            with closing(files.read(stored.name)) as chunks:
                description = _description(manifest, check_chunks(manifest, chunks))
        except Corrupt as error:
            found.append(damaged_model(error))
            continue
        if stored.name == active:
            served = description
    return served


def _description(manifest: Manifest, chunks: Iterator[tuple[str, bytes]]) -> ServedModel | None:
    """Read all chunks; return what the model says of itself."""
    content = b"".join([data for name, data in chunks if name == _DESCRIPTION])
    try:
        it = json.loads(content)
        return ServedModel(manifest, str(it["text_encoder"]), tuple(it["event_types"]))
    except (ValueError, KeyError, TypeError):
        return None


def _unreachable(connections: Connections, error: HeedError) -> Finding:
    return Finding(
        "store-unreachable",
        "error",
        f"The database {connections.name} cannot be read: {error}.",
        "The service answers from what it knows, degraded, refuses writes, and does not start.",
        "Check HEED_STORE (host, port, database, user, and the passfile it names), that the server "
        "runs and takes writes, and what its pg_hba.conf and the network permit.",
    )


def _no_namespace(name: str, place: str) -> Finding:
    return Finding(
        "no-namespace",
        "error",
        f"There is no namespace {name} in {place}.",
        "Keys that are bound to it open nothing.",
        f"Check --namespace; heed namespaces create {name} creates it.",
        name,
    )


def _damaged(error: Corrupt) -> Finding:
    return Finding(
        "damaged-store",
        "error",
        f"{error}.",
        "Rows on damaged pages cannot be read, or are lost.",
        "Run heed check --full and pg_amcheck, look at the server's log, restore a backup into "
        "another database, and check the disk.",
    )
