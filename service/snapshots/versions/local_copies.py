"""Copies of shared versions on the disk of a machine: fetched whole, or not at all."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from pathlib import Path

from service.domain.errors import Busy, Corrupt
from service.runtime import durable_files
from service.snapshots.versions.manifest import (
    MANIFEST,
    WRITE_ONCE,
    parse_manifest,
    read_file,
    read_manifest,
)
from service.snapshots.versions.staging import Staging
from service.snapshots.versions.transfer import receive_files, send_files
from service.stores.postgres.shared_files import FileSet, SharedFiles

_log = logging.getLogger(__name__)

_TIMEOUT = 600.0  # seconds to wait for another process of this machine that fetches


class LocalCopies:
    """Version directories of a registry, as copies of the sets of files in a database.

    Args:
        root: of the registry.
        staging: of the registry.
        shared: the versions in the database.
    """

    def __init__(self, root: Path, staging: Staging, shared: SharedFiles) -> None:
        self._versions = root / "versions"
        self._lock = root / "fetching"
        self._staging = staging
        self._shared = shared

    def send(self, version: str) -> None:
        """Store a version of this disk in the database.

        Raises:
            Corrupt: it is damaged on this disk.
            Conflict: there is, or once was, one of this name in the database.
            Unavailable: the database does not answer.
        """
        directory = self._versions / version
        manifest = read_manifest(directory)
        sealed = bytes(read_file(directory, MANIFEST))
        self._shared.put(version, sealed, send_files(directory, manifest))

    def has(self, stored: FileSet) -> bool:
        """True if a version is on this disk with the manifest that it has in the database."""
        try:
            return read_file(self._versions / stored.name, MANIFEST) == stored.description
        except Corrupt:
            return False

    def fetch(self, stored: FileSet) -> None:
        """Fetch a version, unless another process of this machine has just done so.

        Killed at any point, it leaves nothing, or the whole version.

        Raises:
            Corrupt: naming what is damaged in the database.
            NotFound: it was removed meanwhile.
            StoreFull: the disk is full.
            Unavailable: the database does not answer, or another process fetches for too long.
        """
        version = stored.name
        manifest = parse_manifest(stored.description, version)
        try:
            with durable_files.locked(self._lock, _TIMEOUT):
                if self.has(stored):
                    return
                self.discard(version)  # it has the name, and other bytes
                _log.info("fetching model %s, %s bytes", version, f"{manifest.size:,}")
                with self._staging.new() as directory:
                    with closing(self._shared.read(version)) as chunks:
                        receive_files(directory, manifest, chunks)
                    durable_files.write(directory / MANIFEST, stored.description, mode=WRITE_ONCE)
                    durable_files.sync_directory(directory)
                    with self._staging.locked():
                        if not os.path.lexists(self._versions / version):
                            os.rename(directory, self._versions / version)
                            durable_files.sync_directory(self._versions)
        except TimeoutError as error:
            raise Busy(f"another process is fetching model {version}") from error

    def discard(self, version: str) -> bool:
        """Take a version off this disk; False where it is not there."""
        with self._staging.locked():
            if not os.path.lexists(self._versions / version):
                return False
            self._staging.discard(self._versions / version)
        return True
