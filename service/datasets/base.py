"""Base of all readers: streams of `Item` and `Event`, and bytes for a progress bar."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from service.domain.errors import Invalid
from service.domain.records import Event, Item

T = TypeVar("T")

DECOMPRESS: Mapping[str, Callable[[BinaryIO], AbstractContextManager[Any]]]
DECOMPRESS = {"": nullcontext, ".gz": gzip.open, ".xz": lzma.open}
DECOMPRESSION_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
MAX_BATCH = 8 << 20  # bytes of rows whose records are stored in one transaction


class JudgedQuery(NamedTuple):
    """A query and the graded relevance of items to it."""

    query: str
    gains: Mapping[str, float]  # item id -> gain, above 0 where the item is relevant


@dataclass(slots=True)
class ReadProgress:
    """Bytes on disk that the current stream has consumed, `done`, of `total`.

    Both count compressed bytes where a file is compressed, so that the fraction is known before the
    number of rows is. A progress bar may poll it between batches, or from another thread. `read` is
    the size of the rows that were read from a file, decompressed.
    """

    done: int = 0
    total: int = 0
    read: int = 0


class _CountedFile(io.FileIO):
    """File that counts the bytes read from it, as the file of a buffered reader."""

    def __init__(self, path: Path, progress: ReadProgress) -> None:
        super().__init__(path)
        self._progress = progress
        progress.done, progress.total, progress.read = 0, path.stat().st_size, 0

    def readinto(self, buffer: Any, /) -> int | None:
        count = super().readinto(buffer)
        self._progress.done += count or 0
        return count


@dataclass(slots=True)
class SkippedRows:
    """Bad rows of one reading: their number, and a message for each of the first ones."""

    count: int = 0
    messages: list[str] = field(default_factory=list)


class Dataset:
    """A source of items, events and judged queries.

    Each call of a stream starts from the beginning; one stream may run at a time.

    Attributes:
        name: of the data set.
        progress: of the current stream.
        skipped: bad rows that the current stream has skipped, in a reader that may skip them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.progress = ReadProgress()
        self.skipped = SkippedRows()

    def items(self) -> Iterator[Item]:
        return iter(())

    def events(self) -> Iterator[Event]:
        return iter(())

    def judged_queries(self) -> list[JudgedQuery]:
        """Return the queries with a relevant item, in the order of the source.

        Raises:
            Invalid: the data set has no judgments, or they are damaged.
        """
        raise Invalid("", f"{self.name} has no judgments: give your own, --judgments")


def batches(stream: Iterable[T], n: int, progress: ReadProgress | None = None) -> Iterator[list[T]]:
    """Split a stream into lists of `n`; the last may be shorter.

    An error of the stream is raised in place of the batch that would contain it. With the
    `progress` of the stream's file, a batch ends after rows of `MAX_BATCH` bytes.
    """
    iterator = iter(stream)
    if progress is None:
        progress = ReadProgress()

    def some() -> Iterator[T]:
        end = progress.read + MAX_BATCH
        for record in islice(iterator, n):
            yield record
            if progress.read > end:
                return

    return iter(lambda: list(some()), [])


def format_and_compression(path: Path) -> tuple[str, str]:
    """Return the two suffixes of a file name: `(".jsonl", ".gz")` for `a.jsonl.gz`."""
    last = path.suffix.lower()
    if last in (".gz", ".xz"):
        return path.with_suffix("").suffix.lower(), last
    return last, ""


def compressed(raw: BinaryIO, compression: str) -> AbstractContextManager[Any]:
    """Return a stream that compresses into `raw` by ".gz" or ".xz"; `raw` itself for "".

    Equal content gives equal bytes.
    """
    if compression == ".gz":
        return gzip.GzipFile("", "wb", fileobj=raw, mtime=0)
    if compression == ".xz":
        return lzma.LZMAFile(raw, "wb", preset=1)
    return nullcontext(raw)


@contextmanager
def open_compressed(path: Path, progress: ReadProgress) -> Iterator[BinaryIO]:
    """Open a plain, `.gz` or `.xz` file for buffered binary reading, decompressed on the fly.

    Raises:
        Invalid: the file cannot be read, or its compressed stream is damaged or ends early.
    """
    try:
        raw = _CountedFile(path, progress)
    except OSError as error:
        raise Invalid("", f"{path} cannot be read: {error.strerror}") from error
    decompressed = DECOMPRESS[format_and_compression(path)[1]]
    with io.BufferedReader(raw, 1 << 18) as buffered, decompressed(buffered) as file:
        try:
            yield file
        except DECOMPRESSION_ERRORS as error:
            raise Invalid("", f"{path} is damaged or ends early: {error}") from error
