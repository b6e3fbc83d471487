"""Model versions on disk: published whole, verified before use, never written twice.

    <root>/versions/<version>/   manifest.json and the files it names; write-once
    <root>/current               the active version, replaced by one rename
    <root>/staging/              what publishers are writing; nothing here is ever read
    <root>/lock                  held for the moments in which the above changes

The registry moves bytes. Their meaning is known to those who pack and unpack them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from service.domain.errors import Conflict, Corrupt, HeedError, Incompatible, Invalid, NotFound
from service.domain.names import NAME_RULE, is_name, next_time, timestamped_name
from service.domain.timestamps import to_rfc3339
from service.runtime import durable_files
from service.snapshots.version_files import (
    MANIFEST,
    WRITE_ONCE,
    Manifest,
    Staging,
    check_files,
    compose,
    read_file,
    read_files,
    read_manifest,
    seal,
    signature,
    unseal,
)

PointerToken = tuple[int, ...]


def now() -> int:
    """Return the time of a publication, microseconds UTC."""
    return time.time_ns() // 1_000


@dataclass(frozen=True, slots=True)
class Version:
    """One entry of the registry. A broken one has the fields that could still be read."""

    version: str
    current: bool
    broken: str | None = None  # why it cannot be loaded
    created: int | None = None  # microseconds UTC
    size: int = 0  # bytes of all files
    metadata: Mapping[str, Any] | None = None


class Registry:
    """The model versions under `root`, shared by any number of processes and threads.

    Every method does blocking I/O but `current_token`; call them off the event loop.

    The directory `root` is made when it is missing. Remains of killed publishers are removed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._versions = self._root / "versions"
        self._pointer = self._root / "current"
        self._verified: dict[str, tuple[object, Version]] = {}
        durable_files.make_directory(self._versions)
        self._staging = Staging(self._root)
        self._staging.clean()

    def publish(
        self,
        files: Mapping[str, bytes | bytearray],
        metadata: Mapping[str, Any],
        *,
        version: str | None = None,
        activate: bool = True,
    ) -> str:
        """Store a new version, durable when this returns, and make it current if `activate`.

        Killed at any point, it leaves the registry as it was or with the new version complete.

        Args:
            files: file name to content.
            metadata: anything JSON can hold: dims, item count, metrics.
            version: its name; by default one made of the time, which sorts after the names that
                were made before, also where the clock was set back since.

        Returns: the version's name.

        Raises:
            Invalid: a name is not allowed, `files` is empty, or `metadata` is not JSON.
            Conflict: the version exists already, even if broken.
            StoreFull: the disk is full; nothing was published.
        """
        if version is not None:
            self._directory(version)
        check_files(files)
        created, taken = now(), self._taken() if version is None else ()
        digests = {
            name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()
        }
        with self._staging.new() as directory:
            for name, data in files.items():
                durable_files.write(directory / name, data, mode=WRITE_ONCE)
            with self._staging.locked():
                if version is None:
                    # If the clock was set back, the newest version is still the newest.
                    names = [path.name for path in self._versions.iterdir()]
                    created = next_time(created, [*names, *taken])
                    version = timestamped_name(created)
                if os.path.lexists(self._versions / version):
                    problem = "exists already; versions are never rewritten"
                    raise Conflict(f"model version {version} {problem}")
                manifest = Manifest(version, created, digests, metadata)
                durable_files.write(directory / MANIFEST, compose(manifest), mode=WRITE_ONCE)
                durable_files.sync_directory(directory)
                os.rename(directory, self._versions / version)
                durable_files.sync_directory(self._versions)
                if activate:
                    self._point(version)
        return version

    def load(self, version: str) -> dict[str, bytearray]:
        """Load the files of `version`, every byte verified: name to content.

        Raises `Invalid` for a name that is not allowed, before anything is opened, `NotFound`,
        `Corrupt` naming the file at fault, and `Incompatible` if another version of this program
        wrote it.
        """
        with self._reading(version) as directory:
            return dict(read_files(directory, read_manifest(directory)))

    def created(self, version: str) -> int:
        """Return the time at which `version` was published, microseconds UTC. Raises as `load`."""
        with self._reading(version) as directory:
            return read_manifest(directory).created

    def activate(self, version: str) -> None:
        """Make `version` current, after every byte of it was verified. Raises as `load` does."""
        self._verify(version)
        with self._staging.locked():
            self._status(version)  # it may have been pruned while it was being verified
            self._point(version)

    def current(self) -> str | None:
        """Return the active version's name, if any. Raises `Corrupt` for a damaged pointer."""
        if self.current_token() is None:
            return None
        name = unseal(read_file(self._root, "current"), "current").get("version")
        if not isinstance(name, str) or not is_name(name):
            raise Corrupt("current: it names no version")
        return name

    async def refresh(self) -> None:
        """Learn of what other machines have activated: here, nothing."""

    def current_token(self) -> PointerToken | None:
        """Return a value that differs after each activation by any process; one `stat`.

        It is cheap, and never waits. None when no version was ever activated.
        """
        try:
            status = self._pointer.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_ctime_ns

    def versions(self) -> list[Version]:
        """List all versions, oldest first; those that cannot be loaded come first, with the reason.

        Every byte is verified, once: a version whose files have not changed since (by inode, size
        and times) is not read again.
        """
        try:
            current = self.current()
        except Corrupt:
            current = None
        names = sorted(path.name for path in self._versions.iterdir())
        found = [entry for name in names if (entry := self._inspect(name, current))]
        return sorted(found, key=lambda entry: (entry.created or 0, entry.version))

    def prune(self, keep: int) -> list[str]:
        """Remove all intact versions but the `keep` newest and the current one; return their names.

        Broken versions stay: they cannot be told from versions that only this process failed to
        read, and someone will want to know what happened to them.

        Raises `Invalid` for a negative `keep`, and `Corrupt` for a damaged pointer: nobody knows
        what must stay.
        """
        removed = []
        for version in self._surplus(keep):
            with self._staging.locked():
                if version == self.current() or not (self._versions / version).exists():
                    continue
                self._staging.discard(self._versions / version)
            removed.append(version)
        self._staging.clean()
        return removed

    def _taken(self) -> Collection[str]:
        """Return names that were taken elsewhere, after which a new one sorts."""
        return ()

    def _surplus(self, keep: int) -> list[str]:
        """Return all intact versions but the `keep` newest. Raises `Invalid`."""
        if keep < 0:
            raise Invalid("/keep", f"must be at least 0, and is {keep}")
        intact = [entry.version for entry in self.versions() if entry.broken is None]
        return intact[: max(0, len(intact) - keep)]

    def _verify(self, version: str) -> None:
        with self._reading(version) as directory:
            for _ in read_files(directory, read_manifest(directory)):
                pass

    def _inspect(self, name: str, current: str | None) -> Version | None:
        try:
            with self._reading(name) as directory:
                mark = signature(directory)
                if name not in self._verified or self._verified[name][0] != mark:
                    verdict = _verified_version(directory)
                    if signature(directory) != mark:
                        return self._inspect(name, current)  # replaced meanwhile
                    self._verified[name] = (mark, verdict)
                return replace(self._verified[name][1], current=name == current)
        except NotFound:
            return None  # pruned meanwhile
        except HeedError as error:
            return Version(ascii(name)[1:-1], name == current, broken=error.detail)
        except OSError as error:
            return Version(name, name == current, broken=f"it cannot be read: {error.strerror}")

    def _directory(self, version: str) -> Path:
        if not is_name(version):
            raise Invalid("/version", f"a version name is {NAME_RULE}; not {version[:80]!r}")
        directory = self._versions / version
        if directory.is_symlink() or os.path.realpath(directory) != str(directory):
            raise Invalid("/version", f"{version} leads out of the registry")
        return directory

    def _status(self, version: str) -> os.stat_result:
        directory = self._directory(version)
        try:
            status = directory.lstat()
        except FileNotFoundError:
            raise NotFound(f"there is no model version {version}") from None
        if not stat.S_ISDIR(status.st_mode):
            raise Corrupt(f"{version}: it is not a directory")
        return status

    def _point(self, version: str) -> None:
        # The time moves forward at every activation, whatever the clock does: inode numbers are
        # used again, and the token must still differ.
        token = self.current_token()
        modified = max(time.time_ns(), token[1] + 1 if token else 0)
        durable_files.replace(self._pointer, seal({"version": version}), modified=modified)

    @contextlib.contextmanager
    def _reading(self, version: str) -> Iterator[Path]:
        before = self._status(version)
        try:
            yield self._versions / version
        except (Corrupt, FileNotFoundError):
            after = self._status(version)  # pruned meanwhile: not found, rather than corrupt
            if (before.st_ino, before.st_ctime_ns) != (after.st_ino, after.st_ctime_ns):
                raise NotFound(f"model version {version} was replaced while it was read") from None
            raise


def _verified_version(directory: Path) -> Version:
    """Read a version directory to the last byte, and describe it."""
    found = Version(directory.name, current=False)
    try:
        it = read_manifest(directory)
        found = replace(found, created=it.created, size=it.size, metadata=it.metadata)
        for _ in read_files(directory, it):
            pass
    except (Corrupt, Incompatible) as error:
        found = replace(found, broken=error.detail)
    return found


def version_document(version: Version) -> dict[str, Any]:
    """Return the public fields of a model version."""
    metadata = dict(version.metadata or {})
    return {
        "version": version.version,
        "current": version.current,
        "created": None if version.created is None else to_rfc3339(version.created),
        "bytes": version.size,
        "metrics": metadata.pop("metrics", None),
        "metadata": metadata,
        "broken": version.broken,
    }
