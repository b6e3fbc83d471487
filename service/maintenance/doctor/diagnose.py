"""Diagnosis: reading an installation, and running all checks on it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from service.domain.errors import HeedError, Invalid
from service.domain.names import DEFAULT_NAMESPACE
from service.domain.settings import PREFIX, Settings
from service.maintenance.doctor.examine_database import examine_database
from service.maintenance.doctor.examine_directory import examine_directory
from service.maintenance.doctor.findings import SEVERITIES, Finding
from service.maintenance.doctor.host_checks import HOST_CHECKS
from service.maintenance.doctor.installation import Disk, Installation, NamespaceData
from service.maintenance.doctor.running_service import KeyRefused, read_metrics
from service.runtime.file_paths import denied
from service.snapshots.text_embeddings import open_encoder
from service.stores.opening import is_shared


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

    It is in `data`, or in the database that the setting `store` names. Nothing is changed. Of a
    service that runs meanwhile, the metrics are read.

    Args:
        data: the data directory.
        environment: variables of the service, HEED_* among them.
        namespace: of a database, the one to look at; `default` = all of them.
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
        findings.append(
            Finding(
                "invalid-setting",
                "error",
                f"{error}.",
                "The service does not start.",
                "Correct the value; the other checks assume the defaults.",
            )
        )
    if not data.is_dir() and not is_shared(settings.store):
        return [
            *findings,
            Finding(
                "no-store",
                "error",
                f"The data directory {data} does not exist.",
                "There is nothing to serve.",
                "Check HEED_DATA or --data.",
            ),
        ]
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
    # A machine that only looks at a database has no directory.
    usage = shutil.disk_usage(
        next(each for each in (data, *data.absolute().parents) if each.exists())
    )
    installation = Installation(
        settings,
        environment,
        time.time_ns() // 1000 if now is None else now,
        disk or Disk(usage.total, usage.free),
        metrics,
        encoder,
        backup_days,
    )
    namespaces: list[NamespaceData] = []
    try:
        if is_shared(settings.store):
            installation, namespaces, found = examine_database(installation, namespace)
        else:
            namespaces, found = examine_directory(installation, full=full)
        findings += found
    except PermissionError as error:
        sentence = denied(Path(os.fsdecode(error.filename)))
        findings.append(
            Finding(
                "no-permission",
                "error",
                f"{sentence[0].upper()}{sentence[1:]}.",
                "Stored data were not examined; the service does not start as this user.",
                "Run heed as the user who owns the data directory.",
            )
        )
    for host_check in HOST_CHECKS:
        findings += host_check(installation, namespaces)
    return sorted(findings, key=lambda each: SEVERITIES.index(each.severity))
