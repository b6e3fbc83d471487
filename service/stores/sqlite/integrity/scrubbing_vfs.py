"""VFS that clears the unallocated space of a page when a checkpoint writes it to the database.

`secure_delete` overwrites deleted rows, but not the copies that SQLite leaves behind where it moves
rows to another page: they stay in the gap between a page's cell pointers and its cells. The copy
of a row that is deleted later would be readable in the file for good.

File format: https://www.sqlite.org/fileformat2.html#b_tree_pages
"""

from __future__ import annotations

import threading
from typing import Any

import apsw

from service.stores.sqlite.integrity.wal import checksums

_PAGE_TYPES = {2: 12, 5: 12, 10: 8, 13: 8}  # of B-trees, with the bytes of their headers
_FIRST_HEADER = 100  # bytes of the file's header in the first page
_CHECKSUM_BYTES = 8
# Pages beyond are left as they are: the next page's number, with which other pages begin, could be
# mistaken for the type of a B-tree's page there.
_MAX_PAGES = 1 << 25

_lock = threading.Lock()
_registered: dict[str, ScrubbingVFS] = {}


def scrubbing_vfs(base: str) -> str:
    """Register the VFS over the VFS `base`, once for each process, and return its name."""
    with _lock:
        if base not in _registered:
            _registered[base] = ScrubbingVFS(f"heed-{base}", base)
    return f"heed-{base}"


class ScrubbingVFS(apsw.VFS):
    """The VFS `name` over the VFS `base`, whose pages have checksums of cksumvfs."""

    def __init__(self, name: str, base: str) -> None:
        self._base = base
        super().__init__(name, base)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802  # SQLite's name
        if flags[0] & apsw.SQLITE_OPEN_MAIN_DB:
            return _Database(self._base, name, flags)
        return apsw.VFSFile(self._base, name, flags)


class _Database(apsw.VFSFile):
    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        super().xWrite(cleared(bytes(data), offset), offset)


def cleared(page: bytes, offset: int) -> bytes:
    """Return a page at `offset` of the file with zeros for what is not allocated in it."""
    size = len(page)
    header = 0 if offset else _FIRST_HEADER
    if size < 512 or offset % size or offset // size >= _MAX_PAGES:
        return page
    header_size = _PAGE_TYPES.get(page[header])
    if header_size is None:
        return page
    cells, top = (int.from_bytes(page[header + at : header + at + 2], "big") for at in (3, 5))
    start = header + header_size + 2 * cells
    if not start < top <= size - _CHECKSUM_BYTES or not any(page[start:top]):
        return page
    content = page[:start] + bytes(top - start) + page[top:-_CHECKSUM_BYTES]
    # During a checkpoint, cksumvfs leaves the checksum as it is.
    return content + checksums((0, 0), content, "<u4").astype("<u4").tobytes()
