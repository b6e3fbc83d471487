"""An installation as the checks see it: read once, and never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from service.domain.settings import Settings
from service.maintenance.doctor.log_summary import LogSummary
from service.snapshots.versions.manifest import Manifest
from service.stores.postgres.server_state import ServerState

DAY = 86_400_000_000  # microseconds


class Disk(NamedTuple):
    """Bytes of the file system that holds the data."""

    total: int
    free: int


class ServedModel(NamedTuple):
    """The model in use, as its files describe it."""

    manifest: Manifest
    text_encoder: str
    event_types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Installation:
    """Settings, environment and machine of an installation."""

    settings: Settings
    environment: Mapping[str, str]
    now: int  # microseconds UTC
    disk: Disk
    metrics: Mapping[str, float] | None  # of the running service by name; None: none is reachable
    encoder: str | None  # name of the text encoder; None: it cannot be opened
    backup_days: int  # age from which on a backup is old
    server: ServerState | None = None  # of the database; None: the store is a file, or unreachable


@dataclass(frozen=True, slots=True)
class NamespaceData:
    """One namespace: its directory on this machine, and what was read of it."""

    name: str
    data: Path
    log: LogSummary | None  # None: the store cannot be read
    model: ServedModel | None  # None: there is none in use that can be read
