"""Public data sets beside MovieLens: purchases, talks, sequences of items, and judged queries."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from service.datasets.base import Dataset, JudgedQuery, open_compressed
from service.datasets.formats import json_rows
from service.datasets.record_files import JudgmentsFile
from service.domain.errors import Invalid
from service.domain.records import Event, Item
from service.domain.timestamps import from_rfc3339


class ItemSequences(Dataset):
    """A user id and the ids of the user's items on each line, oldest first, separated by spaces.

    The form of Amazon Beauty and other data sets as published with S3-Rec (Zhou et al. 2020). Items
    have no texts and events no times; their order is that of the line.
    """

    def __init__(self, name: str, path: Path, file: str) -> None:
        """Read the `file` in the folder `path`, or the file `path`."""
        super().__init__(name)
        self._path = path / file if path.is_dir() else path

    def items(self) -> Iterator[Item]:
        seen = dict.fromkeys(item for _, items in self._lines() for item in items)
        yield from map(Item, seen)

    def events(self) -> Iterator[Event]:
        """Iterate over the events, user by user.

        Raises:
            Invalid: a line has no item; the message names the file and the line.
        """
        for user, items in self._lines():
            for place, item in enumerate(items):
                yield Event(user, item, f"{self.name}:{user}:{place}", "interaction")

    def _lines(self) -> Iterator[tuple[str, list[str]]]:
        with open_compressed(self._path, self.progress) as file:
            for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8"), 1):
                user, *items = line.split() or [""]
                if not items:
                    raise Invalid(
                        "",
                        f"{self._path}, line {number}: must be a user id and at least one item id, "
                        f"separated by spaces, got {line.strip()[:40]!r}",
                    )
                yield user, items


RETAIL_FILE = "purchases.csv.xz"
COLUMNS = [
    "invoice",
    "item_id",
    "title",
    "quantity",
    "timestamp",
    "unit_price",
    "user_id",
    "country",
]

# Codes of postage, fees and corrections: part of a history, but nothing to recommend.
CHARGES = frozenset({"AMAZONFEE", "B", "BANK CHARGES", "C2", "CRUK", "D", "DOT", "M", "POST", "S"})


class OnlineRetail(Dataset):
    """The purchases in `purchases.csv.xz`, given as a file or its folder.

    Each line is one event of type "purchase", in file order. Its weight is 1 for any quantity: many
    customers are wholesalers, and 2,880 of one item show the size of a shop, not 2,880 times the
    interest. Times have no zone in the source and are taken as UTC. `event_id` is
    `online-retail:ROW`, from 0, so that importing twice changes nothing; duplicate rows are kept.

    An item's title is the most frequent of its lines, the latest of equals. Charges, such as
    postage, are hidden items.
    """

    def __init__(self, path: Path) -> None:
        super().__init__("online-retail")
        self._path = path / RETAIL_FILE if path.is_dir() else path

    def items(self) -> Iterator[Item]:
        """Iterate over the items in order of first sale, after reading the whole file.

        Raises:
            Invalid: a line is not a purchase; the message names the file and the line.
        """
        titles: defaultdict[str, Counter[str]] = defaultdict(Counter)
        last: dict[tuple[str, str], int] = {}
        for number, (_, item_id, title, *_) in self._rows():
            titles[item_id][title] += 1
            last[item_id, title] = number
        for item_id, uses in titles.items():
            best = max((n, last[item_id, title], title) for title, n in uses.items())
            yield Item(item_id=item_id, title=best[2], hidden=item_id in CHARGES)

    def events(self) -> Iterator[Event]:
        known: dict[str, int] = {}  # lines of an invoice share their minute
        for number, (_, item_id, _, _, when, _, user_id, _) in self._rows():
            timestamp = known.get(when)
            if timestamp is None:
                try:
                    timestamp = known[when] = from_rfc3339(when, zone_required=False)
                except ValueError as error:
                    raise self._bad(number, f"timestamp: {error} (got {when!r})") from error
            yield Event(
                user_id=user_id,
                item_id=item_id,
                event_id=f"online-retail:{number}",
                type="purchase",
                timestamp=timestamp,
            )

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        with open_compressed(self._path, self.progress) as file:
            rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
            number = -1
            try:
                if next(rows, None) != COLUMNS:
                    raise self._bad(number, f"the columns must be {','.join(COLUMNS)}")
                for number, row in enumerate(rows):
                    if len(row) != len(COLUMNS):
                        raise self._bad(number, f"has {len(row)} cells, must have {len(COLUMNS)}")
                    yield number, row
            except (csv.Error, UnicodeDecodeError) as error:
                raise self._bad(number + 1, str(error)) from error

    def _bad(self, number: int, problem: str) -> Invalid:
        return Invalid("", f"{self._path}, line {number + 2}: {problem}")


PYVIDEO_FILE = "videos.jsonl.gz"


class PyVideo(Dataset):
    """The talks in `videos.jsonl.gz`, given as a file or its folder. There are no events.

    A summary that the description does not contain is prepended to it. Categories are the title of
    the conference and the language. Attributes are `event` (its slug), `speakers`, `language`,
    `url`, `youtube_id` and `duration` (seconds), where known. `published_at` is the time of the
    recording: midnight of a bare date, UTC without a zone.
    """

    def __init__(self, path: Path) -> None:
        super().__init__("pyvideo")
        self._path = path / PYVIDEO_FILE if path.is_dir() else path

    def items(self) -> Iterator[Item]:
        """Iterate over the talks in file order.

        Raises:
            Invalid: a line is not a talk; the message names the file and the line.
        """
        with open_compressed(self._path, self.progress) as file:
            for number, line in enumerate(file, 1):
                try:
                    item = _item(orjson.loads(line))
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    problem = f"{self._path}, line {number}: is not a talk: {error!r}"
                    raise Invalid("", problem) from error
                yield item


def _item(talk: dict[str, Any]) -> Item:
    attributes = {
        "event": talk["event"],
        "speakers": [name.strip() for name in talk["speakers"] if name.strip()],
        **{name: talk[name] for name in ("language", "url", "youtube_id", "duration")},
    }
    recorded = talk["recorded"]
    return Item(
        item_id=talk["doc_id"],
        title=talk["title"].strip(),
        description=_joined(talk["summary"].strip(), talk["description"].strip()),
        tags=tuple(dict.fromkeys(tag.strip() for tag in talk["tags"] if tag.strip())),
        categories=tuple(name for name in (talk["event_title"], talk["language"]) if name),
        attributes={name: value for name, value in attributes.items() if value},
        published_at=from_rfc3339(recorded, zone_required=False) if recorded else None,
    )


def _joined(summary: str, description: str) -> str:
    if summary in description:
        return description
    return summary if description in summary else f"{summary}\n\n{description}"


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
    if (path / PYVIDEO_FILE).exists():
        return PyVideo(path)
    raise Invalid(
        "",
        f"{path}: has neither BEIR's corpus.jsonl, queries.jsonl and qrels/ nor {CRANFIELD} "
        f"nor PyVideo's {PYVIDEO_FILE}",
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
