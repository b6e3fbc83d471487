"""Memory and errors of files that are small on disk, and large once they are read."""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.datasets.base import ReadProgress, batches, compressed
from service.datasets.csv_files import MAX_COLUMNS, MAX_ROW
from service.datasets.field_mapping import FieldMapping
from service.datasets.formats import MAX_PARQUET_MEMORY
from service.datasets.record_files import ItemsFile, ReadOptions
from service.domain.errors import Invalid
from service.domain.records import MAX_ATTRIBUTES, MAX_LABELS

pytestmark = pytest.mark.verify

MIB = 1 << 20
HEADER = b"item_id,title\n"
ENDLESS = f"is longer than {MAX_ROW:,} bytes, which a row may have at most"

READ = """
import sys
from pathlib import Path
from service.datasets.base import batches
from service.datasets.record_files import ReadOptions
from service.datasets.record_files import ItemsFile
from service.domain.errors import Invalid
source, count = ItemsFile(Path(sys.argv[1]), ReadOptions(skip_bad=True)), 0
try:
    for batch in batches(source.items(), 1_000, source.progress):
        count += len(batch)
    problem = "".join(source.skipped.messages[:1])
except Invalid as error:
    problem = error.detail
status = Path("/proc/self/status").read_text().splitlines()
(peak,) = (int(line.split()[1]) >> 10 for line in status if line.startswith("VmHWM"))
print(peak, count, problem)
"""


def read(path: Path) -> tuple[int, str]:
    """Import a file in a process; return its peak memory in MiB, and what it printed."""
    run = [sys.executable, "-c", READ, str(path)]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip("\n")
    memory, _, rest = said.partition(" ")
    return int(memory), rest


# Contents, and the error of each.
BOMBS: dict[str, tuple[Callable[[], Iterable[bytes]], str]] = {
    "line.csv.gz": (lambda: [HEADER, *[b"x" * MIB] * 600], f"line 2: {ENDLESS}"),
    "line.csv.xz": (lambda: [HEADER, *[b"x" * MIB] * 600], f"line 2: {ENDLESS}"),
    "header.csv.gz": (lambda: [b"item_id,", *[b"x" * MIB] * 600], f"line 1: {ENDLESS}"),
    "cell.csv.gz": (lambda: [HEADER, b'a,"', *[b"x" * MIB] * 600], f"line 2: {ENDLESS}"),
    "quote.csv.gz": (
        lambda: [HEADER, b'a,"', *[(b"y" * 9_999 + b"\n") * 100] * 100],
        f"line 2: must be CSV: a row has more than {MAX_ROW:,} characters",
    ),
    "cells.csv.gz": (
        lambda: [HEADER, *[b"," * (3 * MIB) + b"\n"] * 30],
        f"line 2: has {3 * MIB + 1:,} cells; at most {MAX_COLUMNS:,} are allowed",
    ),
    "times.csv.gz": (
        lambda: [b"item_id,published_at\n", *[b"a," + b"2" * (3 * MIB) + b"\n"] * 50],
        "published_at: must be a time of at most 100 characters",
    ),
    "line.jsonl.gz": (lambda: [b'{"title":"', *[b"x" * MIB] * 600], f"line 1: {ENDLESS}"),
    "rows.jsonl.gz": (
        lambda: [b'{"item_id":"%d","title":"%b"}\n' % (n, b"x" * (3 * MIB)) for n in range(200)],
        "200 ",
    ),
    "lists.jsonl.gz": (
        lambda: [b'{"item_id":"a","title":[' + b"[]," * MIB + b"1]}\n"] * 4,
        "line 1, title: must be a string, not list",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_memory_is_bounded_whatever_a_file_decompresses_to(tmp_path: Path, name: str) -> None:
    content, problem = BOMBS[name]
    path = tmp_path / name
    parts: dict[bytes, bytes] = {}  # what is repeated is compressed once
    with path.open("wb") as file:
        for each in content():
            if each not in parts:
                part = io.BytesIO()
                with compressed(part, path.suffix) as writer:
                    writer.write(each)
                parts[each] = part.getvalue()
            file.write(parts[each])
    assert path.stat().st_size < 5 * MIB
    memory, said = read(path)
    assert problem in said
    assert memory < 600


def repeated(size: int, count: int) -> pa.Table:
    """Return a table with a column of one text, many times."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), ["x" * size])
    return pa.table({"item_id": ["a"] * count, "title": text})


TABLES: dict[str, tuple[Callable[[], pa.Table], str]] = {
    "value": (
        lambda: pa.table({"item_id": ["a", "b"], "title": ["x" * 100 * MIB, "b"]}),
        f"1 DIR/a.parquet, row 1: has {100 * MIB + 9:,} bytes; a row may have at most {MAX_ROW:,}",
    ),
    "repeated": (
        lambda: repeated(2 * MIB, 100_000),
        f"0 DIR/a.parquet, row 1: takes more than {MAX_PARQUET_MEMORY:,} bytes to decode 1,000 ",
    ),
    "nulls": (
        lambda: pa.table({"item_id": ["a"], "tags": pa.array([[None] * 10 * MIB])}),
        f"0 DIR/a.parquet, row 1: has {80 * MIB + 9:,} bytes; a row may have at most {MAX_ROW:,}",
    ),
    "map": (
        lambda: pa.table(
            {
                "item_id": ["a", "b"],
                "attributes": pa.array(
                    [[(str(n), n) for n in range(MIB)], [("a", 1)]],
                    pa.map_(pa.string(), pa.int64()),
                ),
            }
        ),
        "1 DIR/a.parquet, row 1: has ",
    ),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("store_schema", [True, False])
def test_memory_is_bounded_whatever_parquet_decodes_to(
    tmp_path: Path, name: str, store_schema: bool
) -> None:
    """Pages are decoded within a bound, and rows that are too large never become objects."""
    table, problem = TABLES[name]
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path, compression="zstd", store_schema=store_schema)
    memory, said = read(path)
    assert said.replace(str(tmp_path), "DIR").startswith(problem)
    assert memory < 1_400


def test_a_file_of_very_many_columns_is_refused(tmp_path: Path) -> None:
    names = ["item_id", *(f"c{n}" for n in range(40_000))]
    wide = f"has 40,001 {{}}; at most {MAX_COLUMNS:,} are allowed"
    (csv := tmp_path / "a.csv").write_text(",".join(names) + "\n" + "," * 40_000 + "\n")
    (lines := tmp_path / "a.jsonl").write_text(json.dumps(dict.fromkeys(names, "a")))
    pq.write_table(pa.table({name: ["a"] for name in names}), parquet := tmp_path / "a.parquet")
    for path, word in ((csv, "cells"), (lines, "members"), (parquet, "columns")):
        with pytest.raises(Invalid, match=wide.format(word)):
            list(ItemsFile(path).items())


def test_many_columns_are_read_and_not_all_listed(tmp_path: Path) -> None:
    names = [f"c{n}" for n in range(MAX_COLUMNS)]
    path = tmp_path / "a.csv"
    path.write_text(",".join(names) + "\n" + ",".join(names) + "\n")
    source = ItemsFile(path, ReadOptions(FieldMapping.parse({"item_id": "c9"}, {})))
    assert [item.item_id for item in source.items()] == ["c9"]
    with pytest.raises(Invalid, match=r"there are c0, .*, c49 and 16,334 more\. Name it with"):
        list(ItemsFile(path).items())


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"attributes": {"a": {str(n): n for n in range(20_000)}}},
            f"attributes: has more than {MAX_ATTRIBUTES:,} names, nested ones counted; at ",
        ),
        (
            {"attributes": {"a" * 500: {"b" * 500: 1}}},
            f"attributes/{'a' * 500}: has a name of 500 characters; at most 1,000 are allowed in ",
        ),
        (
            {"tags": [str(n) for n in range(20_000)]},
            f"tags: has 20,000 entries; at most {MAX_LABELS:,} are allowed",
        ),
    ],
)
def test_wide_records_are_refused(tmp_path: Path, row: dict[str, object], problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"item_id": "a", **row}))
    with pytest.raises(Invalid) as caught:
        list(ItemsFile(path).items())
    assert caught.value.detail.startswith(f"{path}, line 1, {problem}")


def test_a_batch_ends_where_its_rows_are_large() -> None:
    """Its records are in memory together, and in one transaction."""
    progress = ReadProgress()

    def rows() -> Iterable[int]:
        for number in range(6):
            progress.read += 3 * MIB
            yield number

    assert list(batches(rows(), 4, progress)) == [[0, 1, 2], [3, 4, 5]]
    assert list(batches(rows(), 2, progress)) == [[0, 1], [2, 3], [4, 5]]
