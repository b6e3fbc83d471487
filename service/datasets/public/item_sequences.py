"""Files of item sequences, one line a user, as sequential recommenders are published with."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

from service.datasets.base import Dataset, open_compressed
from service.domain.errors import Invalid
from service.domain.records import Event, Item


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
        """Iterate over the items in order of first occurrence; raises as `events` does."""
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
