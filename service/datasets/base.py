"""What every reader gives: `Item` and `Event` streams, counts, and bytes for a progress bar."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar, cast

from service.domain.errors import Invalid
from service.domain.records import Event, Item

T = TypeVar("T")

DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


class Counts(NamedTuple):
    """How many records a reader will give; None where only reading tells."""

    items: int | None = None
    events: int | None = None


class Progress:
    """How many bytes on disk the stream being read has consumed, `done`, of how many, `total`.

    Both count compressed bytes where a file is compressed, so that the share is known before the
    number of rows is. A bar may poll it between batches, or from another thread.
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
    """A source of items and events. Each call of a stream reads anew; one stream runs at a time.

    Public fields: `name`; `counts`, as far as they are known before reading; `progress`, of the
    stream being read.
    """

    def __init__(self, name: str, counts: Counts) -> None:
        self.name = name
        self.counts = counts
        self.progress = Progress()

    def items(self) -> Iterator[Item]:
        """The items, in the order of the source; none unless a reader has some."""
        return iter(())

    def events(self) -> Iterator[Event]:
        """The events, in the order of the source; none unless a reader has some."""
        return iter(())

    def event_batches(self, n: int) -> Iterator[list[Event]]:
        """The events in lists of `n`, the last maybe shorter.

        When a row is bad, the error is raised instead of the batch that would hold it.
        """
        return batches(self.events(), n)


def batches(stream: Iterable[T], n: int) -> Iterator[list[T]]:
    """Cut a stream into lists of `n`; the last may be shorter.

    Raises:
        ValueError: `n` is below 1.
    """
    if n < 1:
        raise ValueError(f"a batch holds at least 1 record, got n={n}")
    iterator = iter(stream)
    return iter(lambda: list(islice(iterator, n)), [])


def suffixes(path: Path) -> tuple[str, str]:
    """The format and the packing that a file name states: `a.jsonl.gz` is `(".jsonl", ".gz")`."""
    last = path.suffix.lower()
    if last in (".gz", ".xz"):
        return path.with_suffix("").suffix.lower(), last
    return last, ""


@contextmanager
def packed(raw: BinaryIO, packing: str) -> Iterator[BinaryIO]:
    """A stream that packs into `raw` as `.gz` or `.xz` say; `raw` itself for "".

    The same content gives the same bytes.
    """
    if packing == ".gz":
        with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
            yield cast("BinaryIO", file)
    elif packing == ".xz":
        with lzma.LZMAFile(raw, "wb", preset=1) as xz:
            yield cast("BinaryIO", xz)
    else:
        yield raw


@contextmanager
def opened(path: Path, progress: Progress) -> Iterator[BinaryIO]:
    """Open a plain, `.gz` or `.xz` file for buffered binary reading, unpacked as it is read.

    Raises:
        Invalid: the file cannot be read, or its packed stream is damaged or ends early.
    """
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(open(path, "rb", buffering=0))
        except OSError as error:
            raise Invalid("", f"{path} cannot be read: {error.strerror}") from error
        stack.enter_context(progress.following(raw, path.stat().st_size))
        buffered = io.BufferedReader(raw, 1 << 18)
        packing = suffixes(path)[1]
        if packing == ".gz":
            file = cast("BinaryIO", stack.enter_context(gzip.GzipFile(fileobj=buffered)))
        elif packing == ".xz":
            file = cast("BinaryIO", stack.enter_context(lzma.LZMAFile(buffered)))
        else:
            file = buffered
        try:
            yield file
        except DAMAGED as error:
            raise Invalid("", f"{path} is damaged or ends early: {error}") from error
