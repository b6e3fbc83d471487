"""Online Retail (UCI 352; Chen, Sain and Guo 2012): a year of purchases in a British web shop."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from service.datasets.base import Dataset, open_compressed
from service.domain.errors import Invalid
from service.domain.records import Event, Item
from service.domain.timestamps import from_rfc3339

FILE = "purchases.csv.xz"
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
        self._path = path / FILE if path.is_dir() else path

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
        """Iterate over the purchases in file order; raises as `items` does."""
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
