"""Test collections of retrieval, items with judged queries: BEIR's format, Cranfield, your own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from service.datasets.base import Dataset, JudgedQuery, open_compressed
from service.datasets.files.formats import json_rows
from service.datasets.files.record_files import JudgmentsFile
from service.datasets.public.pyvideo import FILE as PYVIDEO
from service.datasets.public.pyvideo import PyVideo
from service.domain.errors import Invalid
from service.domain.records import Item

CRANFIELD = ("cran.all.1400", "cran.qry", "cranqrel")
_MARK = re.compile(rb"\.([A-Z])(?: (\d+))?\s*")


class Beir(Dataset):
    """A folder with corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv in BEIR's format.

    The two JSON files may be compressed as .gz or .xz.
    """

    def __init__(self, folder: Path, split: str) -> None:
        super().__init__(folder.name)
        self._folder, self._split = folder, split

    def items(self) -> Iterator[Item]:
        """Iterate over the documents in file order. Raises `Invalid`, naming the line."""
        for row in self._rows("corpus"):
            yield Item(row["_id"], title=row.get("title") or "", description=row["text"])

    def judged_queries(self) -> list[JudgedQuery]:
        """Return the queries of the split. Raises `Invalid`, naming the file and the line."""
        path = self._folder / "qrels" / f"{self._split}.tsv"
        gains: dict[str, dict[str, float]] = {}
        with open_compressed(path, self.progress) as file:
            for number, line in enumerate(file, 1):
                cells = line.decode(errors="replace").rstrip("\r\n").split("\t")
                if number == 1 or cells == [""]:
                    continue
                try:
                    query, item, gain = cells
                    gains.setdefault(query, {})[item] = float(gain)
                except ValueError as error:
                    problem = "must be query, document and grade between tabs"
                    raise Invalid("", f"{path}, line {number}: {problem}") from error
        texts = {row["_id"]: row["text"] for row in self._rows("queries")}
        missing = gains.keys() - texts.keys()
        if missing:
            raise Invalid("", f"{path}: query {min(missing)!r} is not among the queries")
        return _relevant(JudgedQuery(texts[query], gains[query]) for query in gains)

    def _rows(self, name: str) -> Iterator[dict[str, str]]:
        """Iterate over the rows of a file, each with an `_id` and a `text`."""
        paths = [self._folder / f"{name}.jsonl{compression}" for compression in ("", ".gz", ".xz")]
        path = next((path for path in paths if path.exists()), paths[0])
        for number, _, row in json_rows(path, self.progress):
            place = f"{path}, line {number}"
            if isinstance(row, Invalid):
                raise Invalid("", f"{place}: {row.detail}")
            for field in ("_id", "text"):
                if not isinstance(row.get(field), str):
                    raise Invalid("", f"{place}, {field}: must be a string")
            yield row


class Cranfield(Dataset):
    """A folder with cran.all.1400, cran.qry and cranqrel.

    Grade 1 is the best and 4 the weakest: the gain is 5 - grade, and 0 at grade -1. The judgments
    number queries by their position in the file, not by the number printed there.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("cranfield")
        self._folder = folder

    def items(self) -> Iterator[Item]:
        """Iterate over the abstracts in file order."""
        for number, parts in self._marked(CRANFIELD[0]):
            yield Item(number, title=parts.get("T", ""), description=parts.get("W", ""))

    def judged_queries(self) -> list[JudgedQuery]:
        """Return all queries. Raises `Invalid`, naming the file and the line."""
        texts = [parts.get("W", "") for _, parts in self._marked(CRANFIELD[1])]
        gains: list[dict[str, float]] = [{} for _ in texts]
        path = self._folder / CRANFIELD[2]
        with open_compressed(path, self.progress) as file:
            for number, line in enumerate(file, 1):
                cells = line.split()
                if not cells:
                    continue
                try:
                    query, item, grade = int(cells[0]), cells[1].decode(), int(cells[2])
                    gains[query - 1][item] = 5.0 - grade if grade > 0 else 0.0
                except (ValueError, IndexError) as error:
                    problem = "must be the position of a query, a document and a grade"
                    raise Invalid("", f"{path}, line {number}: {problem}") from error
        return _relevant(JudgedQuery(*pair) for pair in zip(texts, gains, strict=True))

    def _marked(self, name: str) -> Iterator[tuple[str, dict[str, str]]]:
        """Iterate over the records: their number, and their sections by the letter of each."""
        number, parts, letter = "", dict[str, str](), ""
        with open_compressed(self._folder / name, self.progress) as file:
            for line in file:
                mark = _MARK.fullmatch(line)
                if mark is None:
                    parts[letter] = (
                        f"{parts.get(letter, '')} {line.decode(errors='replace')}".strip()
                    )
                elif mark[1] == b"I" and mark[2]:
                    if number:
                        yield number, parts
                    number, parts, letter = mark[2].decode(), {}, ""
                else:
                    letter = mark[1].decode()
        if number:
            yield number, parts


def open_collection(path: Path, split: str) -> Dataset:
    """Open the collection in a folder, recognised by its files; `split` is of BEIR's judgments.

    Raises:
        Invalid: the folder contains no known collection.
    """
    if all((path / name).exists() for name in CRANFIELD):
        return Cranfield(path)
    if (path / "qrels").is_dir():
        return Beir(path, split)
    if (path / PYVIDEO).exists():
        return PyVideo(path)
    raise Invalid(
        "",
        f"{path}: has neither BEIR's corpus.jsonl, queries.jsonl and qrels/ nor {CRANFIELD} "
        f"nor PyVideo's {PYVIDEO}",
    )


def read_judgments(path: Path) -> list[JudgedQuery]:
    """Read judged queries from a file with rows of `query`, `item_id` and `gain` (default 1).

    Raises:
        Invalid: naming the row and the field.
    """
    gains: dict[str, dict[str, float]] = {}
    for judgment in JudgmentsFile(path).records():
        gains.setdefault(judgment.query, {})[judgment.item_id] = judgment.gain
    return _relevant(JudgedQuery(query, each) for query, each in gains.items())


def _relevant(judged: Iterator[JudgedQuery]) -> list[JudgedQuery]:
    return [each for each in judged if any(gain > 0 for gain in each.gains.values())]
