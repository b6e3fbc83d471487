"""Examination of a data directory: reading its namespaces, and running the checks on them."""

from __future__ import annotations

import json
from pathlib import Path

from service.domain.errors import HeedError, NotFound
from service.maintenance.backups.directory_contents import find_namespaces
from service.maintenance.doctor.findings import Finding
from service.maintenance.doctor.installation import (
    DAY,
    Installation,
    NamespaceData,
    ServedModel,
)
from service.maintenance.doctor.log_checks import LOG_CHECKS
from service.maintenance.doctor.log_summary import LogSummary, summarise
from service.maintenance.doctor.model_checks import MODEL_CHECKS, check_model_files
from service.maintenance.doctor.store_checks import STORE_CHECKS, check_store_file
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.versions.manifest import read_file, read_manifest, unseal
from service.stores.sqlite.database_file import read_store_file
from service.stores.sqlite.schema import SCHEMA_VERSION


def examine_directory(
    installation: Installation, *, full: bool
) -> tuple[list[NamespaceData], list[Finding]]:
    """Read all namespaces of a data directory; return them and what is wrong with each.

    Args:
        installation: whose directory it is.
        full: check every page of large stores too.
    """
    namespaces, findings = [], []
    for name, folder in find_namespaces(installation.settings.data):
        namespace = NamespaceData(
            name, folder, _read_log(folder, installation.now), _read_model(folder)
        )
        namespaces.append(namespace)
        found = list(check_store_file(namespace, full=full))
        for check in (*STORE_CHECKS, check_model_files, *MODEL_CHECKS, *LOG_CHECKS):
            found += check(installation, namespace)
        findings += [each._replace(namespace=name) for each in found]
    return namespaces, findings


def _read_log(data: Path, now: int) -> LogSummary | None:
    """Summarise a store of this version; None where it is of another, damaged or missing."""
    try:
        with read_store_file(data / STORE_FILE) as store:
            if store.schema != SCHEMA_VERSION:
                return None
            return summarise(store.connection, now + DAY)
    except (HeedError, NotFound):
        return None


def _read_model(data: Path) -> ServedModel | None:
    """Describe the model in use; None without one, or where its files cannot be read."""
    folder = data / MODELS_FOLDER
    try:
        current = str(unseal(read_file(folder, "current"), "current")["version"])
        directory = folder / "versions" / current
        description = json.loads(read_file(directory, "model.json"))
        return ServedModel(
            read_manifest(directory),
            str(description["text_encoder"]),
            tuple(description["event_types"]),
        )
    except (HeedError, OSError, ValueError, KeyError, TypeError):
        return None
