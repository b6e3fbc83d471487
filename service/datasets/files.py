"""Items, events and users from files of one's own: JSON lines, CSV, TSV and Parquet; and export.

Fields have the names and types of the HTTP contract (see `rows`). JSON lines, CSV and TSV may be
packed with gzip or xz. A bad row stops the reading, or is left out and told of: never half read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypedDict, Unpack

import orjson

from service.datasets.base import Counts, Dataset, packed, suffixes
from service.datasets.formats import Rows, csv_rows, json_rows, parquet_rows, parquet_size
from service.datasets.rows import (
    EVENT,
    ITEM,
    JUDGMENT,
    USER,
    R,
    Shape,
    Times,
    lines,
    rated,
    shortened,
)
from service.domain.errors import Invalid
from service.domain.records import Event, Item, Judgment, User
from service.runtime.durable_files import open_replacement

FORMATS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
TOLD = 100  # bad rows that are described; all are counted


@dataclass(slots=True)
class Skipped:
    """The bad rows of one reading: how many, and the first `TOLD` of them in words."""

    count: int = 0
    first: list[str] = field(default_factory=list)


class Reading(TypedDict, total=False):
    """How a file is read: see `RecordFile`."""

    times: Times
    skip_bad: bool
    dims: int | None


class RecordFile(Dataset, Generic[R]):
    """One file of records of one kind; its name says the format.

    `times` says how times are written: "rfc3339", with their zone (the default); "utc", times or
    dates without one; "s", "ms" or "us", integers since the Unix epoch. Nothing is guessed: a bare
    number or a time without zone is an error that names the choice.

    `dims` is how many dimensions a record's vectors must have; None allows any.

    With `skip_bad` a bad row is left out and told of in `skipped`; otherwise it raises `Invalid`,
    naming file, row, field, what was wrong and what is allowed.

    Raises:
        Invalid: there is no such file, or its name has no known ending.
        Unavailable: it is Parquet, and pyarrow is not installed.
    """

    shape: Shape[Any]

    def __init__(
        self,
        path: Path,
        *,
        times: Times = "rfc3339",
        skip_bad: bool = False,
        dims: int | None = None,
    ) -> None:
        super().__init__(path.name, Counts())
        self.skipped = Skipped()
        self._path = path
        self._times: Times = times
        self._skip_bad = skip_bad
        self._dims = dims
        self._vectors = () if dims is None else self.shape.vectors
        self._format, packing = suffixes(path)
        if self._format not in FORMATS or (self._format == ".parquet" and packing):
            allowed = f"one of {' '.join(FORMATS)}, all but .parquet also with .gz or .xz"
            raise Invalid("", f"{path}: the name must end in {allowed}")
        if not path.is_file():
            raise Invalid("", f"{path} is not a file")
        self._size = parquet_size(path) if self._format == ".parquet" else None

    def records(self) -> Iterator[R]:
        """The records in file order. Each call reads anew, with a new `skipped`."""
        return (record for _, _, record in self._parsed())

    def _parsed(self) -> Iterator[tuple[int, dict[str, Any], R]]:
        self.skipped = Skipped()
        for number, row in self._rows():
            try:
                if isinstance(row, Invalid):
                    raise row
                record = self.shape.record(row, self._times)
                self._check_dims(record)
            except Invalid as error:
                told = self._told(number, row, error)
                if not self._skip_bad:
                    raise Invalid("", told) from None
                self.skipped.count += 1
                if self.skipped.count <= TOLD:
                    self.skipped.first.append(told)
            else:
                yield number, row, record

    def _check_dims(self, record: R) -> None:
        for name in self._vectors:
            vector = getattr(record, name)
            if vector is not None and len(vector) != self._dims:
                raise Invalid(
                    f"/{name}", f"has {len(vector)} dimensions; {self._dims} are allowed here"
                )

    def _rows(self) -> Rows:
        if self._format == ".parquet":
            return parquet_rows(self._path, self.progress, self.shape)
        if self._format in (".csv", ".tsv"):
            delimiter = "," if self._format == ".csv" else "\t"
            return csv_rows(self._path, self.progress, self.shape, delimiter)
        return json_rows(self._path, self.progress)

    def _told(self, number: int, row: dict[str, Any] | Invalid, error: Invalid) -> str:
        place = f"{self._path}, {'row' if self._format == '.parquet' else 'line'} {number}"
        name = error.pointer.removeprefix("/")
        problem = f"{place}, {name}: {error.detail}" if name else f"{place}: {error.detail}"
        value = None if isinstance(row, Invalid) else row.get(name.split("/")[0])
        return problem if value is None else f"{problem} (got {shortened(value)})"


class EventsFile(RecordFile[Event]):
    """A file of events.

    An event without `event_id` gets one made of the file's name, its line and its content, so that
    importing a file again, whole or after an import that broke off, changes nothing.

    With `dislikes_below` the file may have a field `rating`, a number: events rated below it are of
    type "dislike", whatever type they name. The rating itself is not kept.
    """

    def __init__(
        self, path: Path, *, dislikes_below: float | None = None, **how: Unpack[Reading]
    ) -> None:
        self.shape = EVENT if dislikes_below is None else rated(dislikes_below)
        super().__init__(path, **how)
        self.counts = Counts(items=0, events=self._size)

    def events(self) -> Iterator[Event]:
        """The events in file order, each with an `event_id`."""
        for number, row, event in self._parsed():
            if event.event_id is None:
                yield replace(event, event_id=self._made_id(number, row))
            else:
                yield event

    def _made_id(self, number: int, row: dict[str, Any]) -> str:
        # `default`: Parquet's times are no JSON.
        content = orjson.dumps(row, default=str, option=orjson.OPT_SORT_KEYS)
        digest = blake2b(content, digest_size=16)
        digest.update(b"\0%d\0%s" % (number, os.fsencode(self.name)))
        return f"import:{digest.hexdigest()}"


class ItemsFile(RecordFile[Item]):
    """A file of items."""

    shape = ITEM

    def __init__(self, path: Path, **how: Unpack[Reading]) -> None:
        super().__init__(path, **how)
        self.counts = Counts(items=self._size, events=0)

    def items(self) -> Iterator[Item]:
        """The items in file order."""
        return self.records()


class UsersFile(RecordFile[User]):
    """A file of profiles, which `records` gives."""

    shape = USER


class JudgmentsFile(RecordFile[Judgment]):
    """A file of judgments, which `records` gives."""

    shape = JUDGMENT


def write(path: Path, records: Iterable[Event | Item | User]) -> int:
    """Export records as JSON lines, packed when the name says so; returns how many there were.

    The file appears, whole and durable, after the last record; one that was there is replaced only
    then. The readers above give the same records back.

    Raises:
        Invalid: the name does not end in .jsonl or .ndjson, with .gz or .xz or without.
        StoreFull: the disk is full.
    """
    form, packing = suffixes(path)
    if form not in (".jsonl", ".ndjson"):
        allowed = "in .jsonl or .ndjson, with .gz or .xz or without"
        raise Invalid("", f"{path}: the name must end {allowed}")
    count = 0
    with open_replacement(path) as raw, packed(raw, packing) as out:
        for line in lines(records):
            out.write(line)
            count += 1
    return count
