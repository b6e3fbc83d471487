"""The encoder's window over a history, and how it moves without an event."""

from __future__ import annotations

from typing import NamedTuple

from models.catalogue.snapshot import Snapshot
from models.data.windows import window_start
from models.history.user_memory import UserMemory


class EncoderWindow(NamedTuple):
    """The events that the encoder has read of a history, and those before them."""

    places: dict[int, int]  # of the events read, by source
    begins_earlier: bool  # without any event on an item: the window moves in steps
    unread: int | None  # source of one event on an item that was not read; None without any

    @classmethod
    def of(cls, snapshot: Snapshot, user: UserMemory) -> EncoderWindow:
        """Describe the window over a memory's history."""
        if user.encoded is None or not len(user.encoded.cache):
            return cls({}, False, None)
        read = user.encoded_rows
        sources = user.source[read.numpy()].tolist()
        places = {source: place for place, source in enumerate(sources)}
        first, count = user.encoded.first_item, len(sources)
        earlier = first - window_start(first + count - 1, snapshot.model.config.window)
        before = slice(int(read[0]))
        unread = user.source[before][user.rows[before].numpy() >= 0]
        # Where the window would begin earlier, one that would not be read then either.
        example = int(unread[max(0, len(unread) - 1 - earlier)]) if len(unread) else None
        return cls(places, earlier > 0, example)

    def moves_without(self, source: int, is_item: bool) -> bool:
        """Return whether the encoder's first event is another one without this event.

        Args:
            source: of a row of the memory.
            is_item: whether the row is an item: the encoder reads events on these alone.
        """
        if source < 0 or not is_item or not self.places:
            return False
        return self.begins_earlier or source not in self.places
