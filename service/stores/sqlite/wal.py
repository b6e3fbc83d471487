"""Write-ahead log of a store: detection of damage in it, and clearing of what is written from it.

Recovery reads the log up to the first frame whose checksum is wrong, because that is what a crash
leaves behind. A flipped bit in the middle looks the same to it, and every transaction after the bit
is dropped silently. The difference is in what follows: a transaction begins only after the previous
one has been synced, so that a crash can leave at most one commit after the break.

File format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log

`secure_delete` overwrites deleted rows, but not the copies that SQLite leaves behind where it moves
rows to another page: they stay in the gap between a page's cell pointers and its cells. The copy
of a row that is deleted later would stay readable in the file.

File format: https://www.sqlite.org/fileformat2.html#b_tree_pages
"""

from __future__ import annotations

import struct
import threading
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

import apsw
import numpy as np
from numpy.typing import ArrayLike, NDArray

from service.domain.errors import Corrupt
from service.stores.sqlite.guard import CHECK

HEADER = struct.Struct(">8I")  # magic, version, page size, checkpoint no, 2 salts, 2 checksums
FRAME = 24  # bytes before each page: page, size of the database if a commit, salts, checksums
LITTLE_ENDIAN = 0x377F0682  # magic number of a log whose checksums read little-endian words
AT_ONCE = 1_000  # frames, ~4 MB


def check_wal(log: Path) -> None:
    """Raise `Corrupt`, naming the log, if committed transactions lie beyond its valid part.

    The caller holds the write lock, so that the log stands still. (Asking the `-shm` file how far
    the log is valid would be shorter, and wrong: closing that file drops the locks this process
    has on it, says POSIX, and the next process to come would clear it under everyone's feet.)
    """
    try:
        with open(log, "rb") as file:
            problem = _problem(file)
    except FileNotFoundError:
        return
    if problem:
        raise Corrupt(f"{log} is damaged: {problem}; {CHECK}")


def _problem(file: BufferedReader) -> str | None:
    header = file.read(HEADER.size)
    if len(header) < HEADER.size or not any(header):
        return None  # created, but not written yet
    magic, _, page_size, _, *rest = HEADER.unpack(header)
    order = "<u4" if magic == LITTLE_ENDIAN else ">u4"
    salts, checksum = np.array(rest, np.uint32).reshape(2, 2)
    if (checksums(np.zeros(2, np.uint32), header[:24], order) != checksum).any():
        return "its header fails its checksum" if file.read(1) else None
    size = FRAME + page_size
    valid = commits = 0
    broken = False
    while count := len(chunk := file.read(AT_ONCE * size)) // size:
        frames = np.frombuffer(chunk, np.uint8, count * size).reshape(count, size)
        head = frames[:, :FRAME].copy().view(">u4").astype(np.uint32)  # [count, 6]
        ours = (head[:, 2:4] == salts).all(axis=1)  # others were written before the last reset
        if not broken:
            before = np.vstack([checksum, head[:-1, 4:]])  # each continues the one before it
            summed = np.hstack([frames[:, :8], frames[:, FRAME:]])
            good = ours & (checksums(before, summed, order) == head[:, 4:]).all(axis=1)
            intact = count if good.all() else int(good.argmin())
            valid, broken, checksum = valid + intact, intact < count, head[-1, 4:]
            ours[:intact] = False
        commits += int((ours & (head[:, 1] != 0)).sum())
    return f"{commits} transactions lie beyond frame {valid}" if commits > 1 else None


def checksums(before: ArrayLike, data: bytes | NDArray[np.uint8], order: str) -> NDArray[np.uint32]:
    """The log's running checksum [..., 2] after `data` [..., 8·n bytes], from `before` [..., 2].

    For each pair of words: s1 += x1 + s2; s2 += x2 + s1, modulo 2³². That is linear, so that after
    n pairs it is Mⁿ·s + Σ Mⁿ⁻¹⁻ⁱ·(x1, x1 + x2) with M = (1 1; 1 2): one product for many frames.
    """
    words = np.frombuffer(data, order).reshape(*np.shape(data)[:-1], -1).astype(np.uint32)
    of_words, of_before = _weights(words.shape[-1] // 2)
    return words @ of_words + np.asarray(before, np.uint32) @ of_before


@cache
def _weights(pairs: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the factors of the words [2·pairs, 2] and of the state before them [2, 2]."""
    power = [[1, 0], [0, 1]]  # M to the number of pairs that follow
    weights = []
    for _ in range(pairs):
        (a, b), (c, d) = power
        weights += [[b, d], [a + b, c + d]]
        power = [[(a + b) % 2**32, (a + 2 * b) % 2**32], [(c + d) % 2**32, (c + 2 * d) % 2**32]]
    weights.reverse()
    return (
        np.array(weights, np.uint64).astype(np.uint32),
        np.array(power, np.uint64).astype(np.uint32).T.copy(),
    )


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
