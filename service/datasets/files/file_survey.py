"""Survey of a file before it is read: its dialect, its columns, the formats of its times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo

from service.datasets.base import ReadProgress, open_compressed
from service.datasets.files.cells import (
    ABSENT,
    CellFormat,
    Decimal,
    attribute_type,
    bare_cell,
    is_flag,
    shortened,
)
from service.datasets.files.csv_dialect import (
    Dialect,
    check_encoding,
    detect_decimal,
    detect_delimiter,
    detect_encoding,
    detect_quotes,
)
from service.datasets.files.csv_records import MAX_ROW
from service.datasets.files.field_mapping import (
    BoundMapping,
    FieldMapping,
    Texts,
    check_path,
    is_identifier,
)
from service.datasets.files.formats import (
    Row,
    Rows,
    array_rows,
    csv_rows,
    json_rows,
    parquet_rows,
)
from service.datasets.files.row_reader import RowReader, column_value
from service.datasets.files.rows import NUMBER, RATING, TIME, RecordSchema
from service.datasets.files.time_formats import (
    MAX_TIME,
    UNITS,
    TimeFormat,
    chosen_format,
    detect_format,
    unit_by_size,
)
from service.domain.errors import Invalid
from service.domain.records import ATTRIBUTES
from service.domain.settings import KEYWORD_FIELDS

_SAMPLE = 10_000  # rows
_SAMPLE_SIZE = 2 * MAX_ROW  # of fewer rows, if they are long

Format = Literal["jsonl", "json", "csv", "parquet"]
JSON: tuple[Format, ...] = ("jsonl", "json")  # lines, or one array


@dataclass(frozen=True, slots=True)
class ReadOptions:
    r"""How files are read. What is None is found out by looking at each file.

    Args:
        mapping: columns and constants of the record's fields.
        delimiter: between cells of CSV.
        encoding: of CSV.
        quotes: whether cells of CSV may be quoted; otherwise quotation marks are letters.
        decimal: mark of decimals in CSV, "." or ",".
        absent: marks of absence in fields of any type, beside empty cells and `\N`, which is a
            text in JSON.
        identifiers: names of attributes that are texts though they look like numbers.
        list_separator: between the members of a list in a cell.
        time_format: "rfc3339", "s", "ms", "us", "ns" or a pattern of `strptime`.
        zone: of times that name none.
        skip_bad: skip bad rows and report them; otherwise the first raises `Invalid`, naming file,
            row, field, the fault and what is allowed.
        dims: required dimensions of vectors; None allows any.
    """

    mapping: FieldMapping = field(default_factory=FieldMapping)
    delimiter: str | None = None
    encoding: str | None = None
    quotes: bool | None = None
    decimal: Decimal | None = None
    absent: Sequence[str] = ()
    identifiers: Sequence[str] = KEYWORD_FIELDS
    list_separator: str = "|"
    time_format: str | None = None
    zone: ZoneInfo | None = None
    skip_bad: bool = False
    dims: int | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """What is known of a file before its records are read."""

    form: Format
    dialect: Dialect
    mapping: BoundMapping
    read_row: RowReader
    times: TimeFormat
    header: str  # the line that names the columns of CSV
    mixed: tuple[str, ...] = ()  # sentences on columns of flags among other texts

    def warning(self) -> str | None:
        """Return the sentences on mixed columns; None if there are none."""
        return "; ".join(self.mixed) or None

    def describe(self) -> str:
        """Return what was found out, in a line; empty if nothing had to be."""
        parts = [str(self.dialect)] if self.form == "csv" else []
        found = self.mapping.columns.keys() - self.mapping.later
        if found & {"timestamp", "published_at"}:
            parts.append(f"times as {self.times}")
        kinds = [
            f"{name.removeprefix(ATTRIBUTES)} a {kind}" for name, kind in self.mapping.types.items()
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
        decimal = "." if form != "csv" else _decimal(good, mapping, schema, dialect.delimiter)
    absent = frozenset(options.absent) | (frozenset() if form in JSON else {r"\N"})
    cells = CellFormat(decimal, options.list_separator, is_escaped=form == "csv", absent=absent)
    mixed: list[str] = []
    for target, names in mapping.columns.items():
        if target.startswith(ATTRIBUTES):
            kind = options.mapping.types.get(target)
            if any(is_identifier(name, options.identifiers) for name in (target, *names)):
                kind = kind or "text"
            values = [column_value(row, name) for row in good for name in names]
            # Values that have types keep them, unless some are texts.
            if kind is None and (form == "csv" or any(isinstance(v, str) for v in values)):
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
    reader = mapping.reader(schema, cells, texts.get(form, "mapped"))
    header = sample[0].text if form == "csv" and sample else ""
    found = replace(dialect, decimal=decimal)
    return Survey(form, found, mapping, reader, times, header, tuple(mixed))


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
    rows: list[dict[str, Any]], mapping: BoundMapping, schema: RecordSchema[Any], delimiter: str
) -> Decimal:
    columns = [
        names
        for target, names in mapping.columns.items()
        if target.startswith(ATTRIBUTES) or schema.fields[target] in (NUMBER, RATING)
    ]
    if mapping.weight is not None:
        columns.append((mapping.weight.column,))
    return detect_decimal((text for names in columns for text in _texts(rows, names)), delimiter)


def _texts(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[str]:
    values = (column_value(row, name) for row in rows for name in names)
    return [value.strip() for value in values if isinstance(value, str)]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _mixed_flags(
    target: str, names: Sequence[str], values: Iterable[Any], cells: CellFormat
) -> Iterator[str]:
    """Yield a sentence if most values of a column are true or false, and others are not."""
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
    """Return the format with the row that shows its unit; raises `Invalid` if units are mixed."""
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
