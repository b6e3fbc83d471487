"""Damaged pages of a database file, and their replacement by empty ones in a copy of it.

A damaged page ends any statement that reads it. In a copy of the file it is replaced by a page with
one row of NULLs, which marks the gap in the order of the rows; everything else can then be read.

File format: https://www.sqlite.org/fileformat2.html#b_tree_pages
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from service.stores.sqlite.integrity.wal import checksums

_CHECKSUM_BYTES = 8
_HEADER_BYTES = 100  # of the file, in its first page
_INTERIOR = (2, 5)
_TABLE_LEAF, _INDEX_LEAF = 13, 10
_ROW_ID = b"\0"  # of no other row: they have ids from 1 on


class TableTree(NamedTuple):
    """The B-tree of a table."""

    root: int  # number of a page
    columns: int
    has_row_ids: bool


class PageFile:
    """Pages of a database file that no connection has open; its log was copied into it.

    Args:
        path: the file.
        page_size: bytes.
        count: pages that it should have.
    """

    def __init__(self, path: Path, page_size: int, count: int) -> None:
        self._file = path.open("r+b")
        self._size = page_size
        self._count = count

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def replace_damaged(self, tables: Mapping[str, TableTree]) -> dict[str, int]:
        """Replace the damaged pages of tables; return their number by table."""
        found: dict[str, int] = {}
        for table, tree in tables.items():
            for page in self._damaged(tree.root):
                self._write_empty(page, tree.columns, has_row_ids=tree.has_row_ids)
                found[table] = found.get(table, 0) + 1
        # What is missing at the end, of indexes or free pages, is not read.
        self._file.truncate(self._count * self._size)
        return found

    def _damaged(self, root: int) -> Iterator[int]:
        """Iterate over the damaged pages of the tree at `root`, and leaves with such overflow."""
        waiting, seen = [root], {root}
        while waiting:
            number = waiting.pop()
            page = self._intact(number)
            if page is None or not any(page):  # zeros have a valid checksum
                yield number
                continue
            start = _HEADER_BYTES if number == 1 else 0
            kind = page[start]
            cells = int.from_bytes(page[start + 3 : start + 5], "big")
            pointers = start + (12 if kind in _INTERIOR else 8)
            places = [
                int.from_bytes(page[at : at + 2], "big")
                for at in range(pointers, pointers + 2 * cells, 2)
            ]
            if kind in _INTERIOR:
                children = [int.from_bytes(page[at : at + 4], "big") for at in places]
                children.append(int.from_bytes(page[start + 8 : start + 12], "big"))
                waiting += [child for child in children if child not in seen]
                seen.update(children)
                places = places if kind == 2 else []  # rows of index trees are in these too
            if any(not self._overflow_is_intact(page, at, kind) for at in places):
                yield number

    def _overflow_is_intact(self, page: bytes, at: int, kind: int) -> bool:
        at += 4 if kind in _INTERIOR else 0
        size, at = _varint(page, at)
        if kind == _TABLE_LEAF:
            _, at = _varint(page, at)
        usable = self._size - _CHECKSUM_BYTES
        most = usable - 35 if kind == _TABLE_LEAF else (usable - 12) * 64 // 255 - 23
        if size <= most:
            return True
        least = (usable - 12) * 32 // 255 - 23
        local = least + (size - least) % (usable - 4)
        at += local if local <= most else least
        following = int.from_bytes(page[at : at + 4], "big")
        for _ in range(self._count):
            if not following:
                return True
            overflow = self._intact(following)
            if overflow is None:
                return False
            following = int.from_bytes(overflow[:4], "big")
        return False

    def _intact(self, number: int) -> bytes | None:
        """Return a page, or None if it fails its checksum or is missing."""
        if not 0 < number <= self._count:
            return None
        self._file.seek((number - 1) * self._size)
        page = self._file.read(self._size)
        is_whole = len(page) == self._size and _checksum(page[:-8]) == page[-8:]
        return page if is_whole else None

    def _write_empty(self, number: int, columns: int, *, has_row_ids: bool) -> None:
        """Write a leaf with one row of NULLs."""
        usable = self._size - _CHECKSUM_BYTES
        record = bytes([columns + 1]) + bytes(columns)  # header: its size, then the types NULL
        row_id = _ROW_ID if has_row_ids else b""
        cell = bytes([len(record)]) + row_id + record
        top = usable - len(cell)
        kind = _TABLE_LEAF if has_row_ids else _INDEX_LEAF
        head = bytes([kind, 0, 0, 0, 1]) + top.to_bytes(2, "big") + b"\0" + top.to_bytes(2, "big")
        page = head + bytes(top - len(head)) + cell
        self._file.seek((number - 1) * self._size)
        self._file.write(page + _checksum(page))


def _checksum(content: bytes) -> bytes:
    return checksums((0, 0), content, "<u4").astype("<u4").tobytes()


def _varint(page: bytes, at: int) -> tuple[int, int]:
    """Return the integer at a place, and the place behind it."""
    value = 0
    for n in range(8):
        value = value << 7 | page[at + n] & 0x7F
        if page[at + n] < 0x80:
            return value, at + n + 1
    return value << 8 | page[at + 8], at + 9
