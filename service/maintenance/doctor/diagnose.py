"""Diagnosis: reading an installation, and running all checks on it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from service.domain.errors import HeedError, Invalid, NotFound
from service.domain.settings import Settings
from service.maintenance.backups.backup import find_namespaces
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
from service.maintenance.doctor.store_checks import STORE_CHECKS, check_store_file
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.manifest import read_file, read_manifest, unseal
from service.snapshots.text_encoders import open_encoder
from service.stores.sqlite.schema import SCHEMA_VERSION
from service.stores.sqlite_files.inspection import read_store_file

_PATIENCE = 1.0  # seconds for the running service to answer


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

    Nothing is changed. A service that runs meanwhile is asked for its metrics.

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
    usage = shutil.disk_usage(data)
    installation = Installation(
        settings,
        environment,
        time.time_ns() // 1000 if now is None else now,
        disk or Disk(usage.total, usage.free),
        read_metrics(settings),
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


def read_metrics(settings: Settings) -> Mapping[str, float] | None:
    """Read the metrics of the running service, summed over its workers; None if none answers.

    Those of one cache are named with the label, such as `heed_cache_bytes{cache="history"}`.
    """
    host = settings.host if settings.host not in ("", "0.0.0.0", "::") else "127.0.0.1"  # noqa: S104
    if not settings.port:
        return None
    address = f"[{host}]" if ":" in host else host
    try:
        answer = httpx.get(f"http://{address}:{settings.port}/metrics", timeout=_PATIENCE)
        answer.raise_for_status()
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                cache = sample.labels.get("cache")
                name = sample.name if cache is None else f'{sample.name}{{cache="{cache}"}}'
                sums[name] = sums.get(name, 0.0) + sample.value
    except (httpx.HTTPError, ValueError):
        return None
    return sums if any(name.startswith("heed_") for name in sums) else None
