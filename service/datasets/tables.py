"""Rows that the service made, into a file: Parquet, CSV, TSV or JSON lines, by its name."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from service.datasets.base import packed, suffixes
from service.datasets.files import FORMATS
from service.datasets.formats import pyarrow_parquet
from service.domain.errors import Invalid
from service.runtime.durable_files import open_replacement

Rows = Sequence[Sequence[Any]]  # each with one cell for each column
Write = Callable[[Rows], None]

_ARROW = {str: "string", int: "int32", float: "float32"}


@contextmanager
def table(path: Path, kinds: Mapping[str, type], metadata: Mapping[str, str]) -> Iterator[Write]:
    """A table to write to, many rows at a time: of each time Parquet makes a row group.

    The file appears, whole and durable, when the block ends; one that was there is replaced only
    then, and stays where the block raises.

    Args:
        path: its name says the format; all but Parquet may be packed with .gz or .xz.
        kinds: the columns, each of `str`, `int` (of 32 bits) or `float` (of 32 bits).
        metadata: kept in Parquet's own; the other formats have no place for it.

    Raises:
        Invalid: the name has no known ending.
        Unavailable: it is Parquet, and pyarrow is not installed.
        StoreFull: the disk is full.
    """
    form, packing = suffixes(path)
    if form not in FORMATS or (form == ".parquet" and packing):
        allowed = f"one of {' '.join(FORMATS)}, all but .parquet also with .gz or .xz"
        raise Invalid("", f"{path}: the name must end in {allowed}")
    if form == ".parquet":
        parquet = pyarrow_parquet(path, "writing")
        with open_replacement(path) as raw, _parquet(parquet, raw, kinds, metadata) as write:
            yield write
        return
    with open_replacement(path) as raw, packed(raw, packing) as file:
        if form in (".csv", ".tsv"):
            with _csv(file, kinds, "," if form == ".csv" else "\t") as write:
                yield write
        else:
            yield lambda rows: file.writelines(_lines(kinds, rows))


@contextmanager
def _parquet(
    parquet: Any, raw: BinaryIO, kinds: Mapping[str, type], metadata: Mapping[str, str]
) -> Iterator[Write]:
    arrow = import_module("pyarrow")
    fields = [
        arrow.field(name, getattr(arrow, _ARROW[kind])(), nullable=False)
        for name, kind in kinds.items()
    ]
    schema = arrow.schema(fields, metadata=dict(metadata))
    with parquet.ParquetWriter(raw, schema) as writer:

        def write(rows: Rows) -> None:
            columns = list(zip(*rows, strict=True)) or [() for _ in kinds]
            arrays = [
                arrow.array(column, field.type)
                for column, field in zip(columns, fields, strict=True)
            ]
            writer.write_table(arrow.table(arrays, schema=schema))

        yield write


@contextmanager
def _csv(file: BinaryIO, kinds: Mapping[str, type], delimiter: str) -> Iterator[Write]:
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    rows = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    rows.writerow(kinds)
    try:
        yield rows.writerows
    finally:
        text.detach()  # the file is closed by whoever opened it


def _lines(names: Iterable[str], rows: Rows) -> Iterator[bytes]:
    """Each row as a line of JSON."""
    for row in rows:
        cells = dict(zip(names, row, strict=True))
        yield orjson.dumps(cells, option=orjson.OPT_APPEND_NEWLINE)
