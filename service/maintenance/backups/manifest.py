"""The sealed description of a backup."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from service.domain.errors import Corrupt, Incompatible, NotFound
from service.runtime import durable_files
from service.snapshots.versions.manifest import read_file, seal, unseal
from service.stores.store_digest import TableDigest

BACKUP_FILE = "backup.json"
FORMAT = 1

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class NamespaceContent:
    """Content of the store of one namespace."""

    schema: int  # version of the store's schema
    model: str | None  # the version in use
    models: tuple[str, ...]
    # By table; None where the schema was older than the Heed that made the backup.
    digests: Mapping[str, TableDigest] | None


@dataclass(frozen=True, slots=True)
class BackupManifest:
    """Description of a backup. `files` maps paths in the data directory to (bytes, SHA-256)."""

    created: int  # microseconds UTC; the content is that of a moment after it
    heed: str  # version of the Heed that made it
    files: Mapping[str, tuple[int, str]]
    namespaces: Mapping[str, NamespaceContent]
    settings: Mapping[str, Any]  # by which the data were made: `encoder`, `embedding_dim`, …
    left_out: tuple[str, ...] = ()  # model versions that were damaged already, with the reason

    @property
    def size(self) -> int:
        """Bytes of all distinct files."""
        return sum({digest: size for size, digest in self.files.values()}.values())

    def write(self, folder: Path) -> None:
        """Replace the manifest in the backup's folder atomically and durably."""
        body = {
            "format": FORMAT,
            "created": self.created,
            "heed": self.heed,
            "settings": dict(self.settings),
            "left_out": self.left_out,
            "files": {
                path: {"size": size, "sha256": digest}
                for path, (size, digest) in self.files.items()
            },
            "namespaces": {
                name: {
                    "schema": content.schema,
                    "model": content.model,
                    "models": content.models,
                    "digests": None
                    if content.digests is None
                    else {table: each._asdict() for table, each in content.digests.items()},
                }
                for name, content in self.namespaces.items()
            },
        }
        durable_files.replace(folder / BACKUP_FILE, seal(body))


def read_backup_manifest(folder: Path) -> BackupManifest:
    """Read the manifest of the backup in a folder; its files are not looked at.

    Raises:
        NotFound: the folder is missing, or has no complete backup.
        Corrupt: the manifest is damaged.
        Incompatible: another version of Heed wrote it in a format that this one cannot read.
    """
    if not (folder / BACKUP_FILE).exists():
        raise NotFound(
            f"{folder} holds no complete backup: there is no {BACKUP_FILE}, which is written last"
        )
    body = unseal(read_file(folder, BACKUP_FILE), str(folder / BACKUP_FILE))
    if body.get("format") != FORMAT:
        raise Incompatible(
            f"{folder / BACKUP_FILE} has format {body.get('format')!r}, and this Heed reads "
            f"{FORMAT}. Restore it with the version of Heed that wrote it: {body.get('heed')}"
        )
    try:
        return BackupManifest(
            created=int(body["created"]),
            heed=str(body["heed"]),
            files={_path(name): _file(entry) for name, entry in body["files"].items()},
            namespaces={
                name: NamespaceContent(
                    int(each["schema"]),
                    each["model"],
                    tuple(each["models"]),
                    None
                    if each["digests"] is None
                    else {table: TableDigest(**it) for table, it in each["digests"].items()},
                )
                for name, each in body["namespaces"].items()
            },
            settings=dict(body["settings"]),
            left_out=tuple(body["left_out"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Corrupt(f"{folder / BACKUP_FILE} is sealed, but is no manifest") from None


def _path(name: str) -> str:
    """Return a relative path that stays inside the directory it is joined to."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"{name!r} leads out of the data directory")
    return str(path)


def _file(entry: Mapping[str, Any]) -> tuple[int, str]:
    if not _SHA256.fullmatch(entry["sha256"]):
        raise ValueError("no SHA-256")
    return int(entry["size"]), entry["sha256"]
