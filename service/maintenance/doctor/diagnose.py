"""Diagnosis: reading an installation, and running all checks on it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from service.domain.errors import HeedError, Invalid, NotFound
from service.domain.settings import PREFIX, Settings
from service.maintenance.backups.directory_contents import find_namespaces
from service.maintenance.doctor.findings import SEVERITIES, Finding
from service.maintenance.doctor.host_checks import HOST_CHECKS
from service.maintenance.doctor.installation import (
    DAY,
    Disk,
    Installation,
    NamespaceData,
    ServedModel,
)
from service.maintenance.doctor.log_checks import LOG_CHECKS
from service.maintenance.doctor.log_summary import LogSummary, summarise
from service.maintenance.doctor.model_checks import MODEL_CHECKS
from service.maintenance.doctor.running_service import KeyRefused, read_metrics
from service.maintenance.doctor.store_checks import STORE_CHECKS, check_store_file
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.text_encoders import open_encoder
from service.snapshots.versions.manifest import read_file, read_manifest, unseal
from service.stores.sqlite.schema import SCHEMA_VERSION
from service.stores.sqlite_files.inspection import read_store_file


def diagnose(
    data: Path,
    environment: Mapping[str, str],
    *,
    full: bool = False,
    backup_days: int = 7,
    now: int | None = None,
    disk: Disk | None = None,
) -> list[Finding]:
    """Run all checks on the installation in `data`; return the findings, the gravest first.

    Nothing is changed. Of a service that runs meanwhile, the metrics are read.

    Args:
        data: the data directory.
        environment: variables of the service, HEED_* among them.
        full: check every page of large stores too.
        backup_days: age in days from which on a backup is old.
        now: microseconds UTC; by default of the system's clock.
        disk: by default of the file system that holds `data`.
    """
    findings: list[Finding] = []
    if not data.is_dir():
        return [
            Finding(
                "no-store",
                "error",
                f"The data directory {data} does not exist.",
                "There is nothing to serve.",
                "Check HEED_DATA or --data.",
            )
        ]
    try:
        settings = Settings.read({"data": data})
    except Invalid as error:
        settings = Settings.model_construct(data=data)
        findings.append(
            Finding(
                "invalid-setting",
                "error",
                f"{error}.",
                "The service does not start.",
                "Correct the value; the other checks assume the defaults.",
            )
        )
    encoder = None
    try:
        encoder = open_encoder(settings.encoder).name
    except HeedError as error:
        findings.append(
            Finding(
                "no-encoder",
                "error",
                f"{error}.",
                "The service does not start.",
                "Install the encoder, or correct HEED_ENCODER.",
            )
        )
    metrics = None
    try:
        metrics = read_metrics(settings, environment)
    except KeyRefused as error:
        findings.append(
            Finding(
                "metrics-refused",
                "note",
                f"{error}.",
                "The hit rate of its cache is not known.",
                f"Set {PREFIX}API_KEY to a key with the scope metrics, or let the service keep one "
                f"({PREFIX}METRICS_KEY_FILE).",
            )
        )
    usage = shutil.disk_usage(data)
    installation = Installation(
        settings,
        environment,
        time.time_ns() // 1000 if now is None else now,
        disk or Disk(usage.total, usage.free),
        metrics,
        encoder,
        backup_days,
    )
    namespaces = []
    for name, folder in find_namespaces(data):
        namespace = NamespaceData(
            name, folder, _read_log(folder, installation.now), _read_model(folder)
        )
        namespaces.append(namespace)
        found = list(check_store_file(namespace, full=full))
        for check in (*STORE_CHECKS, *MODEL_CHECKS, *LOG_CHECKS):
            found += check(installation, namespace)
        findings += [each._replace(namespace=name) for each in found]
    for host_check in HOST_CHECKS:
        findings += host_check(installation, namespaces)
    return sorted(findings, key=lambda each: SEVERITIES.index(each.severity))


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
