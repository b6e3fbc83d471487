"""Base of all readers: streams of `Item` and `Event`, counts, and bytes for a progress bar."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar, cast

from service.domain.errors import Invalid
from service.domain.records import Event, Item

T = TypeVar("T")

DECOMPRESSION_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


class RecordCounts(NamedTuple):
    """Number of records of a reader; None where it is unknown before reading."""

    items: int | None = None
    events: int | None = None


class JudgedQuery(NamedTuple):
    """A query and the graded relevance of items to it."""

    query: str
    gains: Mapping[str, float]  # item id -> gain, above 0 where the item is relevant


class ReadProgress:
    """Bytes on disk that the current stream has consumed, `done`, of `total`.

    Both count compressed bytes where a file is compressed, so that the fraction is known before the
    number of rows is. A progress bar may poll it between batches, or from another thread.
    """

    def __init__(self) -> None:
        self.total = 0
        self._done = 0
        self._file: io.FileIO | None = None

    @property
    def done(self) -> int:
        """Bytes consumed; `total` once the stream has ended."""
        file = self._file
        if file is not None and not file.closed:
            self._done = file.tell()
        return self._done

    @done.setter
    def done(self, value: int) -> None:
        self._done = value

    @contextmanager
    def following(self, file: io.FileIO, total: int) -> Iterator[None]:
        """Follow the position of `file` until the block ends."""
        self._file, self._done, self.total = file, 0, total
        try:
            yield
        finally:
            self._done = file.tell()
            self._file = None


class Dataset:
    """A source of items, events and judged queries.

    Each call of a stream starts from the beginning; one stream may run at a time.

    Attributes:
        name: of the data set.
        counts: of its records, as far as they are known before reading.
        progress: of the current stream.
    """

    def __init__(self, name: str, counts: RecordCounts) -> None:
        self.name = name
        self.counts = counts
        self.progress = ReadProgress()

    def items(self) -> Iterator[Item]:
        """Iterate over the items in the order of the source; a reader may have none."""
        return iter(())

    def events(self) -> Iterator[Event]:
        """Iterate over the events in the order of the source; a reader may have none."""
        return iter(())

    def event_batches(self, n: int) -> Iterator[list[Event]]:
        """Iterate over the events in lists of `n`; the last may be shorter.

        A bad row raises its error in place of the batch that would contain it.
        """
        return batches(self.events(), n)

    def judged_queries(self) -> list[JudgedQuery]:
        """Return the queries with a relevant item, in the order of the source.

        Raises:
            Invalid: the data set has no judgments, or they are damaged.
        """
        raise Invalid("", f"{self.name} has no judgments: give your own, --judgments")


def batches(stream: Iterable[T], n: int) -> Iterator[list[T]]:
    """Split a stream into lists of `n`; the last may be shorter.

    Raises:
        ValueError: `n` is below 1.
    """
    if n < 1:
        raise ValueError(f"a batch has at least 1 record, got n={n}")
    iterator = iter(stream)
    return iter(lambda: list(islice(iterator, n)), [])


def format_and_compression(path: Path) -> tuple[str, str]:
    """Return the two suffixes of a file name: `(".jsonl", ".gz")` for `a.jsonl.gz`."""
    last = path.suffix.lower()
    if last in (".gz", ".xz"):
        return path.with_suffix("").suffix.lower(), last
    return last, ""


@contextmanager
def compressed(raw: BinaryIO, compression: str) -> Iterator[BinaryIO]:
    """Yield a stream that compresses into `raw` by ".gz" or ".xz"; `raw` itself for "".

    Equal content gives equal bytes.
    """
    if compression == ".gz":
        with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
            yield cast("BinaryIO", file)
    elif compression == ".xz":
        with lzma.LZMAFile(raw, "wb", preset=1) as xz:
            yield cast("BinaryIO", xz)
    else:
        yield raw


@contextmanager
def open_compressed(path: Path, progress: ReadProgress) -> Iterator[BinaryIO]:
    """Open a plain, `.gz` or `.xz` file for buffered binary reading, decompressed on the fly.

    Raises:
        Invalid: the file cannot be read, or its compressed stream is damaged or ends early.
    """
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(open(path, "rb", buffering=0))
        except OSError as error:
            raise Invalid("", f"{path} cannot be read: {error.strerror}") from error
        stack.enter_context(progress.following(raw, path.stat().st_size))
        buffered = io.BufferedReader(raw, 1 << 18)
        compression = format_and_compression(path)[1]
        if compression == ".gz":
            file = cast("BinaryIO", stack.enter_context(gzip.GzipFile(fileobj=buffered)))
        elif compression == ".xz":
            file = cast("BinaryIO", stack.enter_context(lzma.LZMAFile(buffered)))
        else:
            file = buffered
        try:
            yield file
        except DECOMPRESSION_ERRORS as error:
            raise Invalid("", f"{path} is damaged or ends early: {error}") from error
