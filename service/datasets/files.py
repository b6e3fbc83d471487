"""Items, events and users in your own files: JSON lines, CSV, TSV and Parquet; and export.

Fields have the names and types of the HTTP API (see `rows`). JSON lines, CSV and TSV may be
compressed with gzip or xz. A bad row stops the reading, or is skipped as a whole and reported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypedDict, Unpack

import orjson

from service.datasets.base import Dataset, SkippedRows, compressed, format_and_compression
from service.datasets.formats import Rows, csv_rows, json_rows, parquet_rows
from service.datasets.rows import (
    EVENT,
    ITEM,
    JUDGMENT,
    USER,
    VECTOR,
    R,
    RecordSchema,
    TimeFormat,
    rated_events,
    shortened,
    to_json_lines,
)
from service.domain.errors import Invalid
from service.domain.records import Event, Item, Judgment, User
from service.runtime.durable_files import open_replacement

FORMATS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
MAX_MESSAGES = 100  # of skipped rows


class ReadOptions(TypedDict, total=False):
    """Keyword arguments of `RecordFile`."""

    times: TimeFormat
    skip_bad: bool
    dims: int | None


def check_format(path: Path) -> tuple[str, str]:
    """Return the format and the compression of a file name. Raises `Invalid` if it has none."""
    form, compression = format_and_compression(path)
    if form not in FORMATS or (form == ".parquet" and compression):
        allowed = f"one of {' '.join(FORMATS)}, all but .parquet also with .gz or .xz"
        raise Invalid("", f"{path}: the name must end in {allowed}")
    return form, compression


class RecordFile(Dataset, Generic[R]):
    """One file of records of one type, in the format of its suffix.

    Args:
        path: the file.
        times: format of timestamps: "rfc3339" (with zone), "utc" (times or dates without zone), or
            "s", "ms" or "us" (integers since the Unix epoch). A timestamp in another format is an
            error that names this choice.
        skip_bad: skip bad rows and report them in `skipped`; otherwise the first raises `Invalid`,
            naming file, row, field, the fault and what is allowed.
        dims: required dimensions of vectors; None allows any.

    Raises:
        Invalid: the file does not exist, or its suffix is unknown.
    """

    schema: RecordSchema[Any]

    def __init__(
        self,
        path: Path,
        *,
        times: TimeFormat = "rfc3339",
        skip_bad: bool = False,
        dims: int | None = None,
    ) -> None:
        super().__init__(path.name)
        self._path = path
        self._times: TimeFormat = times
        self._skip_bad = skip_bad
        self._dims = dims
        vectors = [name for name, kind in self.schema.fields.items() if kind is VECTOR]
        self._vectors = [] if dims is None else vectors
        self._format, _ = check_format(path)
        if not path.is_file():
            raise Invalid("", f"{path} is not a file")

    def records(self) -> Iterator[R]:
        """Iterate over the records in file order. Each call starts anew, with a new `skipped`.

        Raises:
            Unavailable: the file is Parquet and pyarrow is not installed.
        """
        return (record for _, _, record in self._parsed())

    def _parsed(self) -> Iterator[tuple[int, dict[str, Any], R]]:
        self.skipped = SkippedRows()
        for number, row in self._rows():
            try:
                if isinstance(row, Invalid):
                    raise row
                record = self.schema.record(row, self._times)
                self._check_dims(record)
            except Invalid as error:
                message = self._message(number, row, error)
                if not self._skip_bad:
                    raise Invalid("", message) from None
                self.skipped.count += 1
                if self.skipped.count <= MAX_MESSAGES:
                    self.skipped.messages.append(message)
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
            return parquet_rows(self._path, self.progress, self.schema)
        if self._format in (".csv", ".tsv"):
            delimiter = "," if self._format == ".csv" else "\t"
            return csv_rows(self._path, self.progress, self.schema, delimiter)
        return json_rows(self._path, self.progress)

    def _message(self, number: int, row: dict[str, Any] | Invalid, error: Invalid) -> str:
        place = f"{self._path}, {'row' if self._format == '.parquet' else 'line'} {number}"
        name = error.pointer.removeprefix("/")
        problem = f"{place}, {name}: {error.detail}" if name else f"{place}: {error.detail}"
        value = None if isinstance(row, Invalid) else row.get(name.split("/")[0])
        return problem if value is None else f"{problem} (got {shortened(value)})"


class EventsFile(RecordFile[Event]):
    """A file of events.

    An event without `event_id` gets one derived from the file's name, its line and its content, so
    that importing a file again, also after an interrupted import, changes nothing.

    With `dislikes_below` the file may have a numeric field `rating`: events rated below it get the
    type "dislike". The rating itself is not stored.
    """

    def __init__(
        self, path: Path, *, dislikes_below: float | None = None, **options: Unpack[ReadOptions]
    ) -> None:
        self.schema = EVENT if dislikes_below is None else rated_events(dislikes_below)
        super().__init__(path, **options)

    def events(self) -> Iterator[Event]:
        """Iterate over the events in file order, each with an `event_id`."""
        for number, row, event in self._parsed():
            if event.event_id is None:
                yield replace(event, event_id=self._derived_id(number, row))
            else:
                yield event

    def _derived_id(self, number: int, row: dict[str, Any]) -> str:
        # `default` serialises Parquet's times.
        content = orjson.dumps(row, default=str, option=orjson.OPT_SORT_KEYS)
        digest = blake2b(content, digest_size=16)
        digest.update(b"\0%d\0%s" % (number, os.fsencode(self.name)))
        return f"import:{digest.hexdigest()}"


class ItemsFile(RecordFile[Item]):
    """A file of items."""

    schema = ITEM

    def items(self) -> Iterator[Item]:
        """Iterate over the items in file order."""
        return self.records()


class UsersFile(RecordFile[User]):
    """A file of user profiles; iterate over them with `records`."""

    schema = USER


class JudgmentsFile(RecordFile[Judgment]):
    """A file of relevance judgments; iterate over them with `records`."""

    schema = JUDGMENT


def export_records(path: Path, records: Iterable[Event | Item | User]) -> int:
    """Write records as JSON lines, compressed by the suffix; return their number.

    The file appears, complete and durable, after the last record, and only then replaces an
    existing one. The readers above return the same records.

    Raises:
        Invalid: the suffix is not .jsonl or .ndjson, optionally followed by .gz or .xz.
        StoreFull: the disk is full.
    """
    form, compression = format_and_compression(path)
    if form not in (".jsonl", ".ndjson"):
        allowed = "in .jsonl or .ndjson, with .gz or .xz or without"
        raise Invalid("", f"{path}: the name must end {allowed}")
    count = 0
    with open_replacement(path) as raw, compressed(raw, compression) as out:
        for line in to_json_lines(records):
            out.write(line)
            count += 1
    return count
