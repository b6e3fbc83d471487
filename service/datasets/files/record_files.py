"""Items, events, users and judgments in your own files: JSON lines, CSV and Parquet; and export.

The columns of a file are mapped to the fields of the HTTP API. JSON lines and CSV may be compressed
with gzip or xz. A bad row stops the reading, or is skipped as a whole and reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Generic

import numpy as np

from service.datasets.base import (
    Dataset,
    ReadProgress,
    SkippedRows,
    compressed,
    format_and_compression,
)
from service.datasets.files.file_survey import (
    JSON,
    Format,
    ReadOptions,
    Survey,
    open_rows,
    sniff_format,
    survey,
)
from service.datasets.files.formats import Row
from service.datasets.files.occurrences import OccurrenceCounter
from service.datasets.files.repeated_rows import RepeatedRows
from service.datasets.files.row_reader import SkippedRow, column_value, with_member
from service.datasets.files.rows import (
    EVENT,
    ITEM,
    JUDGMENT,
    USER,
    VECTOR,
    R,
    RecordSchema,
    rated_events,
    to_json_lines,
)
from service.datasets.files.time_formats import NonexistentTimes, TimeFormat
from service.domain.errors import Invalid
from service.domain.item_patch import ItemPatch
from service.domain.records import ATTRIBUTES, Event, Item, Judgment, User
from service.runtime.durable_files import open_replacement
from service.stores.event_identity import content_digest, content_id

FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
READABLE: dict[str, Format] = {**FORMATS, ".json": "jsonl"}
UNNAMED = ("", ".txt", ".dat")  # suffixes that leave the format to the content
MAX_MESSAGES = 20  # of skipped rows; more of them would hide what is said of the whole file
_BATCH = 4_096  # events that are numbered at once


class BadRow(Invalid):
    """A row breaks a rule, in a reading that does not skip bad rows."""


OnBadRow = Callable[[Row, str], None]
"""Takes a bad row and the message that names its file, its line and its fault."""


def check_format(path: Path, formats: Iterable[str] = FORMATS) -> tuple[str, str]:
    """Return the format's suffix and the compression of a file name.

    Raises `Invalid` if the name has none.
    """
    form, compression = format_and_compression(path)
    if form not in formats or (form == ".parquet" and compression):
        allowed = f"one of {' '.join(formats)}, all but .parquet also with .gz or .xz"
        raise Invalid("", f"{path}: the name must end in {allowed}")
    return form, compression


class RecordFile(Dataset, Generic[R]):
    """One file of records of one type, in the format of its suffix.

    Args:
        path: the file.
        options: how it is read.
        on_bad: called with each bad row that is skipped.
        name: in messages, the path by default.

    Raises:
        Invalid: the file does not exist, or its suffix is unknown.
    """

    schema: RecordSchema[Any]
    key = ""  # the field of which several rows are put together; "" where each row is a record

    def __init__(
        self,
        path: Path,
        options: ReadOptions | None = None,
        *,
        on_bad: OnBadRow | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or path.name)
        self._path = path
        self._place = name or str(path)
        self._options = options or ReadOptions()
        self._on_bad = on_bad
        self.accepted = 0  # rows that are records
        self.left_out = 0  # rows of a negative quantity that the caller wants skipped
        self.times = TimeFormat()  # of the current stream, with what is odd about them
        self.repeated = RepeatedRows()  # of the current stream
        self.refused: Collection[str] = ()  # ids whose rows are bad, since the store lacks them
        vectors = [name for name, kind in self.schema.fields.items() if kind is VECTOR]
        self._vectors = [] if self._options.dims is None else vectors
        if not path.is_file():
            check_format(path, READABLE)
            missing = next((part for part in reversed(path.parents) if not part.exists()), path)
            there = "" if missing == path or path.exists() else f", since {missing} does not exist"
            raise Invalid("", f"{path} is not a file{there}")
        suffix, _ = format_and_compression(path)
        if suffix in UNNAMED:
            self._format = sniff_format(path)
        else:
            self._format = READABLE[check_format(path, READABLE)[0]]
            if self._format == "jsonl" and sniff_format(path) == "json":
                self._format = "json"

    @cached_property
    def survey(self) -> Survey:
        """What is known of the file before its records are read. Raises `Invalid`."""
        return survey(self._path, self._format, self._options, self.schema)

    @cached_property
    def ids(self) -> Counter[str]:
        """The ids of the file's rows, with the number of rows that each has."""
        known, ids = self.survey, Counter[str]()
        columns = {self.key: known.read_row.columns.get(self.key, ())}
        read = replace(known.read_row, columns=columns, weight=None)
        parse = self.schema.fields[self.key].parse
        with suppress(Invalid):  # of a file that cannot be read further, as `records` reports
            for row in self._rows(ReadProgress()):
                name = None
                if not isinstance(row.values, Invalid):
                    with suppress(ValueError):  # as above
                        name = read(row.values).get(self.key)
                        name = name if name is None else parse(name, known.times)
                if isinstance(name, str):
                    ids[name] += 1
        return ids

    def records(self) -> Iterator[R]:
        """Iterate over the records in file order. Each call starts anew, with a new `skipped`.

        Rows of one item or one user are one record, which comes at the last of them.

        Raises:
            Invalid: at the first bad row, unless bad rows are skipped.
            Unavailable: the file is Parquet and pyarrow is not installed.
        """
        if not self.key:
            return (record for _, _, record in self._parsed())

        def changes(values: dict[str, Any], record: R) -> dict[str, Any]:
            return {name: getattr(record, name) for name in values if values[name] is not None}

        return (self.schema.build(**fields) for fields in self._together(changes))

    def _together(
        self, changes: Callable[[dict[str, Any], R], dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """Iterate over the fields that `changes` takes from rows, those of one id put together."""
        missing = {name: count for name, count in self.ids.items() if count > 1}
        begun: dict[str, dict[str, Any]] = {}
        for row, values, record in self._parsed():
            fields = changes(values, record)
            name = fields[self.key]
            if name not in missing:
                yield fields
                continue
            missing[name] -= 1
            try:
                before = begun.get(name)
                begun[name] = (
                    fields if before is None else self.repeated.unite(name, before, fields)
                )
            except Invalid as error:
                self._skip(row, self._message(row, error))
            if not missing[name]:
                yield begun.pop(name)
        yield from begun.values()  # of ids that have bad rows

    def _rows(self, progress: ReadProgress) -> Iterator[Row]:
        """Iterate over the rows without the one of the columns."""
        rows = open_rows(self._path, self._format, self.survey.dialect, progress)
        if self._format not in JSON:
            next(rows, None)
        return rows

    def _parsed(self) -> Iterator[tuple[Row, dict[str, Any], R]]:
        """Iterate over the records with their rows and the values that these have."""
        self.skipped, self.accepted, self.left_out = SkippedRows(), 0, 0
        self.repeated = RepeatedRows()
        known = self.survey
        times = self.times = replace(known.times, nonexistent=NonexistentTimes())
        for row in self._rows(self.progress):
            try:
                if isinstance(row.values, Invalid):
                    raise row.values
                values = known.read_row(row.values)
                record = self.schema.record(values, times)
                self._check_dims(record)
                if self.refused and getattr(record, self.key) in self.refused:
                    raise Invalid(f"/{self.key}", "is not in the catalogue")
            except Invalid as error:
                self._skip(row, self._message(row, error))
            except SkippedRow:
                self.left_out += 1
            else:
                self.accepted += 1
                yield row, values, record

    def _skip(self, row: Row, message: str) -> None:
        if not self._options.skip_bad:
            raise BadRow("", message)
        self.skipped.count += 1
        if self.skipped.count <= MAX_MESSAGES:
            self.skipped.messages.append(message)
        if self._on_bad is not None:
            self._on_bad(row, message)

    def _check_dims(self, record: R) -> None:
        for name in self._vectors:
            vector, dims = getattr(record, name), self._options.dims
            if vector is not None and len(vector) != dims:
                raise Invalid(f"/{name}", f"has {len(vector)} dimensions; {dims} are allowed here")

    def _message(self, row: Row, error: Invalid) -> str:
        unit = "line" if self._format in ("csv", "jsonl") else "row"
        place = f"{self._place}, {unit} {row.number}"
        if not error.pointer or isinstance(row.values, Invalid):
            return f"{place}: {error.detail}"
        return f"{place}, {self.survey.mapping.problem(error, row.values)}"


class EventsFile(RecordFile[Event]):
    """A file of events.

    An event without `event_id` gets one derived from its content, with the number of equal events
    before it in the file: importing a file again, or another that has some of the same events,
    stores each event once, and one that the file has twice is stored twice.

    With `dislikes_below` the file may have a numeric field `rating`: events rated below it get the
    type "dislike". The rating itself is not stored. `zero_ratings` counts dislikes by a 0, and
    `unrated` the rows without a rating, if there is a column of ratings.

    With `items_in`, the file of the same rows as items, `items` are those of its items whose ids
    are in `created`.
    """

    def __init__(
        self,
        path: Path,
        options: ReadOptions | None = None,
        *,
        dislikes_below: float | None = None,
        on_bad: OnBadRow | None = None,
        name: str | None = None,
        items_in: ItemsFile | None = None,
    ) -> None:
        self.schema = EVENT if dislikes_below is None else rated_events(dislikes_below)
        super().__init__(path, options, on_bad=on_bad, name=name)
        self._has_dislikes = dislikes_below is not None and dislikes_below > 0
        self.zero_ratings = self.unrated = 0
        self.items_in, self.created = items_in, frozenset[str]()

    def items(self) -> Iterator[Item]:
        """Iterate over the items that the rows of events make."""
        if self.items_in is not None and self.created:
            self.items_in.progress = self.progress
            yield from (item for item in self.items_in.items() if item.item_id in self.created)

    def _parsed(self) -> Iterator[tuple[Row, dict[str, Any], Event]]:
        self.zero_ratings = self.unrated = 0
        is_rated = self._has_dislikes and "rating" in self.survey.mapping.columns
        for parsed in super()._parsed():
            rating = parsed[1].get("rating")
            self.zero_ratings += self._has_dislikes and rating == 0
            self.unrated += is_rated and rating is None
            yield parsed

    def events(self) -> Iterator[Event]:
        """Iterate over the events in file order, each with an `event_id`."""
        counter, records = OccurrenceCounter(), self.records()
        problem: Invalid | None = None
        batch: list[Event] | None = None
        while problem is None and batch != []:
            batch = []
            try:
                batch.extend(islice(records, _BATCH))
            except Invalid as error:  # after the events before it
                problem = error
            yield from _with_ids(batch, counter)
        if problem is not None:
            raise problem


def _with_ids(events: list[Event], counter: OccurrenceCounter) -> Iterator[Event]:
    """Give the events that have no id the ids of their content."""
    digests = [content_digest(event) for event in events if event.event_id is None]
    heads = np.frombuffer(b"".join(digests), np.dtype("<u8")).reshape(-1, 2)[:, 0]
    named = map(content_id, digests, counter.number(heads).tolist())
    for event in events:
        yield event if event.event_id is not None else replace(event, event_id=next(named))


class ItemsFile(RecordFile[Item]):
    """A file of items."""

    schema, key = ITEM, "item_id"

    def items(self) -> Iterator[Item]:
        """Iterate over the items in file order."""
        return self.records()

    def patches(self) -> Iterator[ItemPatch]:
        """Iterate over the items as changes of the fields that the file has columns of.

        A blank cell sets its field to the default, or removes its attribute.
        """
        columns = {*self.survey.mapping.columns, *self.survey.mapping.mapping.constants}
        attributes = [
            name.removeprefix(ATTRIBUTES) for name in columns if name.startswith(ATTRIBUTES)
        ]

        def changes(values: dict[str, Any], item: Item) -> dict[str, Any]:
            named = values if self._format in JSON else columns
            fields = {name: getattr(item, name) for name in self.schema.fields if name in named}
            if attributes or "attributes" in fields:
                fields["attributes"] = dict(item.attributes)
                for name in attributes:
                    if column_value(item.attributes, name) is None:
                        fields["attributes"] = with_member(fields["attributes"], name, None)
            return fields

        for fields in self._together(changes):
            yield ItemPatch(fields.pop("item_id"), fields)


class UsersFile(RecordFile[User]):
    """A file of user profiles; iterate over them with `records`."""

    schema, key = USER, "user_id"


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
