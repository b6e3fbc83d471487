"""PyVideo: talks of Python conferences (https://github.com/pyvideo/data, CC0), one JSON a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from service.datasets.base import Dataset, open_compressed
from service.domain.errors import Invalid
from service.domain.records import Item
from service.domain.timestamps import from_rfc3339

FILE = "videos.jsonl.gz"


class PyVideo(Dataset):
    """The talks in `videos.jsonl.gz`, given as a file or its folder. There are no events.

    A summary that the description does not contain is prepended to it. Categories are the title of
    the conference and the language. Attributes are `event` (its slug), `speakers`, `language`,
    `url`, `youtube_id` and `duration` (seconds), where known. `published_at` is the time of the
    recording: midnight of a date alone, UTC without a zone.
    """

    def __init__(self, path: Path) -> None:
        super().__init__("pyvideo")
        self._path = path / FILE if path.is_dir() else path

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
