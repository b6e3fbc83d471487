"""Model versions that several machines share: in the database, and on the disk of each.

The database says which versions there are and which one is current. A machine fetches a version
once, as a directory of its own registry, and serves it from there, also while the database is away.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from service.domain.errors import Busy, Conflict, Corrupt, HeedError, Unavailable
from service.runtime import durable_files
from service.runtime.data_layout import MODELS_FOLDER
from service.runtime.threads import run_in_daemon_thread
from service.snapshots.registry import PointerToken, Registry, Version
from service.snapshots.version_files import (
    MANIFEST,
    WRITE_ONCE,
    parse_manifest,
    read_file,
    read_manifest,
    receive_files,
    send_files,
)
from service.stores.base import Store
from service.stores.postgres.shared_files import Activation, FileSet, SharedFiles

_log = logging.getLogger(__name__)

_TIMEOUT = 600.0  # seconds to wait for another process of this machine that fetches
KIND = "model"  # of the sets of files
_FIRST_DELAY, _LONGEST_DELAY = 5.0, 300.0  # seconds before a version is fetched another time
_TRIES = 3  # to publish under a name that another machine may take meanwhile


class SharedRegistry(Registry):
    """The model versions of a namespace, shared by any number of machines.

    Versions are published into the database, and fetched from it when they are needed. A damaged
    copy on this disk is fetched again. While the database does not answer, the versions on this
    disk can be loaded; `publish`, `activate` and `prune` raise `Unavailable`.

    A version on this disk that the database never had, such as one from the time before machines
    shared them, is listed, and loaded only here until it is activated.
    """

    def __init__(self, root: Path, shared: SharedFiles) -> None:
        super().__init__(root)
        self._shared = shared
        self._known: Activation | None = None  # None: the database was not asked yet
        self._is_away = False  # as far as the log has been told
        self._is_here = True  # the current version is on this disk, or was not looked for
        self._retry_at, self._delay = 0.0, _FIRST_DELAY  # of fetching it (monotonic)
        self._removals = -1  # of the versions whose removal this disk has followed

    def publish(
        self,
        files: Mapping[str, bytes | bytearray],
        metadata: Mapping[str, Any],
        *,
        version: str | None = None,
        activate: bool = True,
    ) -> str:
        """Publish on this disk and into the database; see `Registry.publish`.

        Raises also:
            Unavailable: the database does not answer. The version is only on this disk then, so
                that no training is lost: `activate` shares it.
        """
        for attempt in range(1, _TRIES + 1):
            name = super().publish(files, metadata, version=version, activate=False)
            try:
                self._send(name)
                break
            except Unavailable as error:
                raise Unavailable(
                    f"model {name} is on the disk of this machine, and not shared: {error.detail}. "
                    f"heed models activate {name} shares it"
                ) from error
            except BaseException as error:
                self._discard(name)
                if not isinstance(error, Conflict) or version is not None or attempt == _TRIES:
                    raise
        if activate:
            self._activate(name)
        return name

    def load(self, version: str) -> dict[str, bytearray]:
        """Load the files of a version, fetched where they are missing; see `Registry.load`."""
        self._fetch_missing(version)
        try:
            files = super().load(version)
        except Corrupt as damage:
            self._fetch_again(version, damage)
            files = super().load(version)
        self._follow_pointer(version)
        return files

    def activate(self, version: str) -> None:
        """Make a version current on all machines; see `Registry.activate`.

        Raises also:
            Unavailable: the database does not answer.
        """
        self._directory(version)
        if self._shared.find(version) is None:
            self._status(version)
            self._send(version)
        self._fetch_missing(version)
        try:
            self._verify(version)
        except Corrupt as damage:
            self._fetch_again(version, damage)
        self._activate(version)

    def current(self) -> str | None:
        """Return the version that is current on all machines; see `Registry.current`.

        While the database does not answer, it is the one that was current last. If none ever was
        in the database, it is that of this disk.
        """
        try:
            self._known = self._shared.last_activation()
        except HeedError as error:
            self._note_away(error)
        if self._known is None or self._known.name is None:
            name = super().current()
            if name is not None and self._known is not None:
                _log.warning(
                    "model %s is only on this machine: heed models activate %s shares it",
                    *(name, name),
                )
            return name
        return self._known.name

    async def refresh(self) -> None:
        """Learn of what other machines have activated and removed, and fetch what is current now.

        The token changes then. While a version cannot be fetched, that is tried again now and then,
        and the token changes once more where it succeeds. While the database does not answer,
        nothing changes; the log says so once.
        """
        try:
            known = await self._shared.active()
        except HeedError as error:
            self._note_away(error)
            return
        if self._is_away:
            self._is_away = False
            _log.info("models are followed again")
        is_new = self._known is None or known.number != self._known.number
        if is_new:
            self._delay = _FIRST_DELAY
        if known.name is not None and (
            is_new or (not self._is_here and time.monotonic() >= self._retry_at)
        ):
            fetch = partial(self._try_to_fetch, known.name)
            self._is_here = await run_in_daemon_thread(fetch, "heed-fetching")
            self._retry_at = time.monotonic() + self._delay
            self._delay = min(2 * self._delay, _LONGEST_DELAY)
        self._known = known
        if known.removals != self._removals:
            await run_in_daemon_thread(self._follow_removals, "heed-removing")
            self._removals = known.removals

    def current_token(self) -> PointerToken | None:
        """Return the number of the last activation, and whether its version is on this disk.

        They are as `refresh`, or another call of this object, has seen them last.
        """
        if self._known is None or not self._known.number:
            return super().current_token()
        return self._known.number, int(self._is_here)

    def versions(self) -> list[Version]:
        """List all versions, of the database and of this disk; see `Registry.versions`.

        Versions that are not on this disk are verified when they are fetched.
        """
        found = {entry.version: entry for entry in super().versions()}
        try:
            shared = self._shared.sets()
        except HeedError as error:
            self._note_away(error)
            shared = []
        current = self._known.name if self._known is not None else None
        for each in shared:
            local = found.get(each.name)
            if local is None or local.broken is not None:  # which is fetched again
                found[each.name] = _described(each, current)
        return sorted(found.values(), key=lambda entry: (entry.created or 0, entry.version))

    def prune(self, keep: int) -> list[str]:
        """Remove versions from the database and, within a second, from all disks.

        See `Registry.prune`. Raises also:
            Unavailable: the database does not answer.
        """
        shared = {entry.name for entry in self._shared.sets()}
        removed = []
        for version in self._surplus(keep):
            is_used = version == self.current()
            if is_used or (version in shared and not self._shared.remove(version)):
                continue
            self._discard(version)
            removed.append(version)
        self._staging.clean()
        return removed

    # ------------------------------------------------------------------ between disk and database

    def _send(self, version: str) -> None:
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

    def _has(self, stored: FileSet) -> bool:
        """True if a version is on this disk with the manifest that it has in the database."""
        try:
            return read_file(self._versions / stored.name, MANIFEST) == stored.description
        except Corrupt:
            return False

    def _fetch(self, stored: FileSet) -> None:
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
            with durable_files.locked(self._root / "fetching", _TIMEOUT):
                if self._has(stored):
                    return
                self._discard(version)  # it has the name, and other bytes
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

    def _discard(self, version: str) -> bool:
        """Take a version off this disk; False where it is not there."""
        with self._staging.locked():
            if not os.path.lexists(self._versions / version):
                return False
            self._staging.discard(self._versions / version)
        return True

    def _try_to_fetch(self, version: str) -> bool:
        """Have a version on this disk; False where that fails, as the log says."""
        try:
            stored = self._shared.find(version)
            if stored is not None and not self._has(stored):
                self._fetch(stored)
        except (HeedError, OSError) as error:
            _log.error("model %s is not fetched: %s", version, error)
            return False
        return True

    def _fetch_missing(self, version: str) -> None:
        """Have a version on this disk as the database has it. Raises what `_fetch` raises."""
        self._directory(version)
        try:
            stored = self._shared.find(version)
        except HeedError as error:
            self._note_away(error)
            return
        if stored is not None and not self._has(stored):
            self._fetch(stored)

    def _fetch_again(self, version: str, damage: Corrupt) -> None:
        """Replace a version that is damaged on this disk; raise the damage where that fails."""
        try:
            stored = self._shared.find(version)
        except HeedError:
            raise damage from None
        if stored is None:
            raise damage
        _log.error("%s: it is fetched again", damage.detail)
        self._discard(version)
        self._fetch(stored)

    # ------------------------------------------------------------------ the parts

    def _taken(self) -> set[str]:
        try:
            return {entry.name for entry in self._shared.sets()} | self._shared.removed()
        except Unavailable as error:
            self._note_away(error)
            return set()

    def _activate(self, version: str) -> None:
        self._known, self._is_here = self._shared.activate(version), True
        with self._staging.locked():
            self._point(version)

    def _follow_pointer(self, version: str) -> None:
        """Let this disk's own pointer follow, for a time without the database."""
        if self._known is None or self._known.name != version:
            return
        try:
            with self._staging.locked():
                try:
                    is_there = super().current() == version
                except Corrupt:
                    is_there = False
                if not is_there:
                    self._point(version)
        except (HeedError, OSError) as error:  # it is loaded all the same
            _log.warning("the pointer to model %s was not written: %s", version, error)

    def _follow_removals(self) -> None:
        """Take off this disk what was removed from the database."""
        try:
            for version in self._shared.removed():
                if self._discard(version):
                    _log.info("model %s was removed", version)
            self._staging.clean()
        except (HeedError, OSError) as error:
            _log.warning("removed models stay on this disk for now: %s", error)

    def _note_away(self, error: HeedError) -> None:
        if not self._is_away:
            self._is_away = True
            _log.error("models are not followed, and what is on this disk serves: %s", error.detail)


def _described(stored: FileSet, current: str | None) -> Version:
    """Describe a version of the database by its manifest."""
    found = Version(stored.name, stored.name == current, size=stored.size)
    try:
        it = parse_manifest(stored.description, stored.name)
    except HeedError as error:
        return replace(found, broken=error.detail)
    return replace(found, created=it.created, metadata=it.metadata)


def open_registry(data: Path, store: Store | None = None) -> Registry:
    """Open the registry of a namespace's data directory.

    Machines that share the store share the models; without a store, those on this disk are meant.
    """
    shared = None if store is None else store.shared
    if shared is None:
        return Registry(data / MODELS_FOLDER)
    return SharedRegistry(data / MODELS_FOLDER, shared.files(KIND))
