"""Files of a backup as they are added to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from service.domain.errors import Corrupt
from service.maintenance.backups.objects import ObjectFolder, hash_file
from service.stores.sqlite.database_file import read_store_file

# Called with the stage, and the bytes done of all; (stage, 0, 0) where they are not known.
BackupProgress = Callable[[str, int, int], None]


class BackupWriter:
    """Adds files to the backup in `target`, each under the place that it has in a data directory.

    Attributes:
        objects: the files by their content.
        files: size and SHA-256 by place.
        left_out: sentences about what is damaged and not in the backup.
        progress: to be called as the backup proceeds.
    """

    def __init__(self, target: Path, progress: BackupProgress) -> None:
        self.objects = ObjectFolder(target)
        self.objects.prepare()
        self.files: dict[str, tuple[int, str]] = {}
        self.left_out: list[str] = []
        self.progress = progress

    def add_file(self, place: Path, file: Path) -> bool:
        """Add a file; return whether there is one."""
        try:
            self.files[str(place)] = self.objects.add(file)
        except FileNotFoundError:
            return False
        return True

    def add_bytes(self, place: Path, content: bytes) -> None:
        """Add a file of this content."""
        self.files[str(place)] = self.objects.add_chunks([content])

    def add_store(self, place: Path, copy: Path, source: str) -> None:
        """Move the file of a store, which is in `objects.incoming`, into the backup.

        Raises:
            Corrupt: naming the source, of which the file is a damaged copy.
        """
        with read_store_file(copy) as written:
            problem = written.connection.execute("PRAGMA quick_check(1)").get
            if problem != "ok":
                raise Corrupt(f"{source}: the copy is damaged: {problem}")
        size, digest = hash_file(copy)
        self.objects.take(copy, digest)
        self.files[str(place)] = size, digest

    def leave_out(self, reason: str) -> None:
        """Note that something is not in the backup."""
        if reason not in self.left_out:
            self.left_out.append(reason)
