"""File of rejected rows, to be mended and imported."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TextIO

from service.datasets.files.formats import Row, row_text


class RejectedRows:
    """Writes rejected rows as they stood, under their file's header, and the reasons beside them.

    The rows go to `path`, in UTF-8 unless a file's encoding was given, and the reasons to the same
    path with `.reasons` behind it, a line for each row. Both are emptied at first, so that they are
    of this import alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reasons = path.with_name(path.name + ".reasons")
        self.count = 0
        self._rows = path.open("w", encoding="utf-8", errors="surrogateescape", newline="")
        self._reasons: TextIO = self.reasons.open("w", encoding="utf-8", errors="backslashreplace")
        self._header: str | None = None

    def add(self, header: str, row: Row, message: str, *, encoding: str | None = None) -> None:
        """Write a row and its reason; a header that differs from the last one comes before it.

        `encoding` is the one with which the caller reads the file, and will read this one.
        """
        if header != self._header:
            self._rows.reconfigure(encoding=encoding or "utf-8")
            self._rows.write(header)
            self._header = header
        self._rows.write(row_text(row))
        self._reasons.write(message + "\n")
        self.count += 1

    def __enter__(self) -> RejectedRows:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._rows.close()
        self._reasons.close()
