"""Items, events, users and judgments in your own files: JSON lines, CSV and Parquet; and export.

The columns of a file are mapped to the fields of the HTTP API. JSON lines and CSV may be compressed
with gzip or xz. A bad row stops the reading, or is skipped as a whole and reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Generic, Literal
from zoneinfo import ZoneInfo

import numpy as np

from service.datasets.base import (
    Dataset,
    ReadProgress,
    SkippedRows,
    compressed,
    format_and_compression,
    open_compressed,
)
from service.datasets.cells import (
    ABSENT,
    CellFormat,
    Decimal,
    attribute_type,
    bare_cell,
    is_flag,
    shortened,
)
from service.datasets.csv_files import (
    MAX_ROW,
    Dialect,
    check_encoding,
    detect_decimal,
    detect_delimiter,
    detect_encoding,
    detect_quotes,
)
from service.datasets.field_mapping import (
    BoundMapping,
    FieldMapping,
    SkippedRow,
    Texts,
    check_path,
    column_value,
    is_identifier,
    with_member,
)
from service.datasets.formats import (
    Row,
    Rows,
    array_rows,
    csv_rows,
    json_rows,
    parquet_rows,
)
from service.datasets.rows import (
    EVENT,
    ITEM,
    JUDGMENT,
    NUMBER,
    RATING,
    TIME,
    USER,
    VECTOR,
    OccurrenceCounter,
    R,
    RecordSchema,
    RepeatedRows,
    rated_events,
    to_json_lines,
)
from service.datasets.time_formats import (
    MAX_TIME,
    UNITS,
    NonexistentTimes,
    TimeFormat,
    chosen_format,
    detect_format,
    unit_by_size,
)
from service.domain.errors import Invalid
from service.domain.records import ATTRIBUTES, Event, Item, ItemPatch, Judgment, User
from service.domain.settings import KEYWORD_FIELDS
from service.runtime.durable_files import open_replacement
from service.stores.encoding import content_digest, content_id

_SAMPLE = 10_000  # rows
_SAMPLE_SIZE = 2 * MAX_ROW  # of fewer rows, if they are long

Format = Literal["jsonl", "json", "csv", "parquet"]
JSON: tuple[Format, ...] = ("jsonl", "json")  # lines, or one array


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How files are read. An option of None is found out by looking at each file."""

    mapping: FieldMapping = field(default_factory=FieldMapping)
    delimiter: str | None = None
    encoding: str | None = None
    quotes: bool | None = None  # of CSV: enclose cells; otherwise they are letters
    decimal: Decimal | None = None
    absent: Sequence[str] = ()  # marks of absence in fields of any type, beside empty cells
    identifiers: Sequence[str] = KEYWORD_FIELDS  # attributes that are texts, though of digits
    list_separator: str = "|"
    time_format: str | None = None  # "rfc3339", "s", "ms", "us", "ns" or a pattern of `strptime`
    zone: ZoneInfo | None = None  # of times that name none
    skip_bad: bool = False  # report bad rows; otherwise the first raises `BadRow`
    dims: int | None = None  # of vectors; None allows any


@dataclass(frozen=True, slots=True)
class Survey:
    """Facts about a file that are known before its records are read."""

    form: Format
    dialect: Dialect
    mapping: BoundMapping
    times: TimeFormat
    header: str  # the line that names the columns of CSV
    mixed: tuple[str, ...] = ()  # sentences on columns of flags among other texts
    empty: frozenset[str] = frozenset()  # attributes whose type no value shows

    def warning(self) -> str | None:
        return "; ".join(self.mixed) or None

    def describe(self) -> str:
        parts = [str(self.dialect)] if self.form == "csv" else []
        found = self.mapping.columns.keys() - self.mapping.later
        if found & {"timestamp", "published_at"}:
            parts.append(f"times as {self.times}")
        kinds = [
            f"{name.removeprefix(ATTRIBUTES)} {'empty' if name in self.empty else f'a {kind}'}"
            for name, kind in self.mapping.types.items()
        ]
        parts += [f"attributes: {', '.join(kinds)}"] if kinds else []
        return "; ".join(parts)


def open_rows(path: Path, form: Format, dialect: Dialect, progress: ReadProgress) -> Rows:
    """Read the rows of a file; those of CSV and Parquet begin with one for the columns."""
    if form == "parquet":
        return parquet_rows(path, progress)
    if form == "csv":
        return csv_rows(path, progress, dialect)
    return array_rows(path, progress) if form == "json" else json_rows(path, progress)


def survey(path: Path, form: Format, options: ReadOptions, schema: RecordSchema[Any]) -> Survey:
    """Look at a file: at all of its bytes for the encoding, at its first rows for the rest.

    The first rows are 10,000, or fewer of 8 MiB together.

    Raises:
        Invalid: a required column is missing, a mapped one is not there, or something cannot be
            found out; the message names the option that says it.
    """
    dialect = _dialect(path, options) if form == "csv" else Dialect()
    read = ReadProgress()
    rows = islice(open_rows(path, form, dialect, read), _SAMPLE)
    sample = list(takewhile(lambda _: read.read <= _SAMPLE_SIZE, rows))
    mapping = _bind(path, options.mapping, form, sample, schema)
    good = [row.values for row in sample if not isinstance(row.values, Invalid)]
    decimal = options.decimal
    if decimal is None:
        decimal = "."
        try:
            if form == "csv":
                decimal = _decimal(good, mapping, schema, options, dialect.delimiter)
        except Invalid as error:
            raise Invalid("", f"{path}: {error.detail}") from None
    absent = frozenset(options.absent) | (frozenset() if form in JSON else {r"\N"})
    cells = CellFormat(decimal, options.list_separator, is_escaped=form == "csv", absent=absent)
    mixed: list[str] = []
    empty: set[str] = set()
    for target, names in mapping.columns.items():
        if target.startswith(ATTRIBUTES):
            is_text = _is_text(target, names, options)
            kind = "text" if is_text else options.mapping.types.get(target)
            values = [column_value(row, name) for row in good for name in names]
            # Values that have types keep them, unless some are texts.
            if kind is None and (form == "csv" or any(isinstance(v, str) for v in values)):
                if {str(v).strip() for v in values if v is not None} <= {"", *absent}:
                    empty.add(target)
                kind = attribute_type((v for v in values if _is_scalar(v)), cells)
                mixed += _mixed_flags(target, names, values, cells) if kind == "text" else []
            if kind is not None:
                mapping.types[target] = kind
    times = chosen_format(options.time_format, options.zone)
    if times is None:
        columns = [
            name
            for target, names in mapping.columns.items()
            if schema.fields.get(target) is TIME
            for name in names
        ]
        try:
            units: dict[str, str] = {}
            times = detect_format(_times(path, form, dialect, columns, absent, units), options.zone)
            if times.pattern in UNITS and units:
                times = _one_unit(times, units)
        except Invalid as error:
            raise Invalid("", f"{path}: {error.detail}") from None
    texts: Mapping[Format, Texts] = {"csv": "all", "parquet": "typed"}
    mapping.prepare(schema, cells, texts.get(form, "mapped"))
    return Survey(
        form=form,
        dialect=replace(dialect, decimal=decimal),
        mapping=mapping,
        times=times,
        header=sample[0].text if form == "csv" and sample else "",
        mixed=tuple(mixed),
        empty=frozenset(empty),
    )


def sniff_format(path: Path) -> Format:
    """Return the format of a file whose name does not say it, from its first bytes."""
    with open_compressed(path, ReadProgress()) as file:
        head = file.read(512)
    if head.startswith(b"PAR1"):
        return "parquet"
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return "json" if head.startswith(b"[") else "jsonl" if head.startswith(b"{") else "csv"


def _dialect(path: Path, options: ReadOptions) -> Dialect:
    if options.encoding is None:
        encoding = detect_encoding(path)
    else:
        encoding = check_encoding(options.encoding)
    delimiter = options.delimiter
    if delimiter is None:
        preferred = "\t" if ".tsv" in path.suffixes else ","
        delimiter = detect_delimiter(path, encoding, preferred)
    elif len(delimiter) != 1:
        raise Invalid("", f"--delimiter must be one character, not {delimiter!r}")
    quotes = options.quotes
    if quotes is None:
        quotes = detect_quotes(path, encoding, delimiter)
    return Dialect(encoding, delimiter, quotes=quotes)


def _bind(
    path: Path, mapping: FieldMapping, form: Format, sample: list[Row], schema: RecordSchema[Any]
) -> BoundMapping:
    names: dict[str, None] = {}
    for row in sample if form in JSON else sample[:1]:
        if not isinstance(row.values, Invalid):
            names |= dict.fromkeys(row.values)
    is_open = form in JSON  # the sample may lack names that later rows have
    required = schema.required if names or not is_open else ()
    try:
        bound = mapping.bind(list(names), list(schema.fields), required, is_open=is_open)
        mapped = [name for columns in mapping.columns.values() for name in columns]
        mapped += [] if mapping.weight is None else [mapping.weight.column]
        for name in mapped if is_open else ():
            if "." in name and name not in names:
                check_path(name, (row.values for row in sample))
        return bound
    except Invalid as error:
        place = f", column {error.pointer[1:]}" if error.pointer else ""
        raise Invalid("", f"{path}{place}: {error.detail}") from None


def _decimal(
    rows: list[dict[str, Any]],
    mapping: BoundMapping,
    schema: RecordSchema[Any],
    options: ReadOptions,
    delimiter: str,
) -> Decimal:
    columns = [
        names
        for target, names in mapping.columns.items()
        if (target.startswith(ATTRIBUTES) and not _is_text(target, names, options))
        or schema.fields.get(target) in (NUMBER, RATING)
    ]
    if mapping.weight is not None:
        columns.append((mapping.weight.column,))
    return detect_decimal((text for names in columns for text in _texts(rows, names)), delimiter)


def _is_text(target: str, names: Sequence[str], options: ReadOptions) -> bool:
    chosen = options.mapping.types.get(target)
    named = any(is_identifier(name, options.identifiers) for name in (target, *names))
    return chosen == "text" or (named and chosen is None)


def _texts(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[str]:
    values = (column_value(row, name) for row in rows for name in names)
    return [value.strip() for value in values if isinstance(value, str)]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _mixed_flags(
    target: str, names: Sequence[str], values: Iterable[Any], cells: CellFormat
) -> Iterator[str]:
    texts = [v for v in values if isinstance(v, str) and (bare_cell(v, cells) or "").strip()]
    others = [text for text in texts if not is_flag(text) and text.strip().lower() not in ABSENT]
    flags = sum(map(is_flag, texts))
    if flags > len(others) > 0:
        yield (
            f"{names[0]} is kept as text: {flags:,} values are true or false, and others not: "
            f"{len(others):,}, as {shortened(others[0])}; --map {target}:flag={names[0]} refuses "
            "rows of any other value than true, yes, 1, false, no or 0"
        )


def _one_unit(times: TimeFormat, units: Mapping[str, str]) -> TimeFormat:
    if len(units) == 1:
        return replace(times, example=units[times.pattern])
    first, second = list(units.items())[:2]
    raise Invalid(
        "",
        f"times are mixed: by its size {first[1]} is in {first[0]}, {second[1]} in {second[0]}; "
        "write all in one unit, or give it by --time-format",
    )


def _times(
    path: Path,
    form: Format,
    dialect: Dialect,
    columns: list[str],
    absent: frozenset[str],
    units: dict[str, str],
) -> Iterator[Any]:
    """Iterate over times, and note the first row of each unit of numbers."""
    for row in open_rows(path, form, dialect, ReadProgress()) if columns else ():
        if not isinstance(row.values, Invalid):
            for name in columns:
                value = column_value(row.values, name)
                if isinstance(value, str) and len(value) > MAX_TIME:
                    continue  # no time, as its row will say
                text = str(value).strip()
                if value is not None and text.lower() not in ABSENT and text not in absent:
                    if (unit := unit_by_size(value)) and unit not in units:
                        place = "line" if form in ("csv", "jsonl") else "row"
                        units[unit] = f"{place} {row.number} ({shortened(value)})"
                    yield value


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
        if path.is_dir():
            raise Invalid("", f"{path} is a folder: name the files in it")
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
        return survey(self._path, self._format, self._options, self.schema)

    @cached_property
    def ids(self) -> Counter[str]:
        """The ids of the file's rows, with the number of rows that each has."""
        known, ids = self.survey, Counter[str]()
        columns = {self.key: known.mapping.columns.get(self.key, ())}
        mapping = replace(known.mapping, columns=columns, weight=None)
        parse = self.schema.fields[self.key].parse
        with suppress(Invalid):  # of a file that cannot be read further, as `records` reports
            for row in self._rows(ReadProgress()):
                name = None
                if not isinstance(row.values, Invalid):
                    with suppress(ValueError):  # as above
                        name = mapping.row(row.values).get(self.key)
                        name = name if name is None else parse(name, known.times)
                if isinstance(name, str):
                    ids[name] += 1
        return ids

    def records(self) -> Iterator[R]:
        """Iterate over the records in file order. Each call starts again, with a new `skipped`.

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
        times = self.times = replace(
            known.times, nonexistent=NonexistentTimes(), repeated=NonexistentTimes()
        )
        for row in self._rows(self.progress):
            try:
                if isinstance(row.values, Invalid):
                    raise row.values
                values = known.mapping.row(row.values)
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
    schema, key = ITEM, "item_id"

    def items(self) -> Iterator[Item]:
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
    schema, key = USER, "user_id"


class JudgmentsFile(RecordFile[Judgment]):
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
