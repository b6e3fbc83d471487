"""Damage in SQLite's write-ahead log, which SQLite itself takes for the end of the log.

Recovery reads the log up to the first frame whose checksum is wrong, because that is what a crash
leaves behind. A flipped bit in the middle looks the same to it, and every transaction after the bit
is dropped without a word. The difference is in what follows: a transaction is only begun once the
one before it has been synced, so that a crash can leave at most one commit after the break.

File format: https://www.sqlite.org/fileformat2.html#walformat and
https://www.sqlite.org/walformat.html
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from service.errors import Corrupt

_HEADER = struct.Struct(">8I")  # magic, version, page size, checkpoint no, 2 salts, 2 checksums
_FRAME = struct.Struct(">6I")  # page, size in pages if this is a commit, 2 salts, 2 checksums
_INDEX = struct.Struct("=16x I 12x 8s")  # of the first header of -shm: last valid frame, salts


def check_wal(database: Path) -> None:
    """Raise `Corrupt`, naming the log, if committed transactions lie beyond its valid part.

    The caller holds the write lock, so that the log stands still, and has read the database, so
    that recovery is done.
    """
    log = Path(f"{database}-wal")
    try:
        descriptor = os.open(log, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        size = os.fstat(descriptor).st_size
        header = os.pread(descriptor, _HEADER.size, 0)
        if len(header) < _HEADER.size or not any(header):
            return  # created, and nothing written yet
        magic, _, page_size, _, _, _, *checksum = _HEADER.unpack(header)
        if size < _HEADER.size + _FRAME.size + page_size:
            return
        if _checksum(header[:24], "<" if magic == 0x377F0682 else ">") != tuple(checksum):
            raise Corrupt(f"{log} is damaged: its header fails its checksum")
        with open(f"{database}-shm", "rb") as index:
            valid, salts = _INDEX.unpack(index.read(_INDEX.size))
        if salts != header[16:24]:
            return  # a log that was copied into the database in full, about to be overwritten
        frame_size = _FRAME.size + page_size
        commits = 0
        for at in range(_HEADER.size + valid * frame_size, size - frame_size + 1, frame_size):
            frame = os.pread(descriptor, _FRAME.size, at)
            commits += frame[8:16] == salts and frame[4:8] != b"\0\0\0\0"
        if commits > 1:
            raise Corrupt(f"{log} is damaged: {commits} transactions lie beyond frame {valid}")
    finally:
        os.close(descriptor)


def _checksum(data: bytes, order: str) -> tuple[int, int]:
    first = second = 0
    for left, right in struct.iter_unpack(f"{order}2I", data):
        first = (first + left + second) & 0xFFFFFFFF
        second = (second + right + first) & 0xFFFFFFFF
    return first, second
