"""The encoder's window over a history, and how it moves without an event."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from models.catalogue.snapshot import Snapshot
from models.data.windows import window_start
from models.history.user_memory import UserMemory

_CANDIDATES = 64  # unread events among which one of little weight is found


class EncoderWindow(NamedTuple):
    """The events that the encoder has read of a history, and how its window moves without one."""

    places: dict[int, int]  # of the events read, by source
    earlier: int  # how many events earlier it would begin if the history were one event shorter
    unread: int | None  # source of one event on an item before the window; None if there is none

    @classmethod
    def of(cls, snapshot: Snapshot, user: UserMemory) -> EncoderWindow:
        """Describe the window over a memory's history."""
        if user.encoded is None or not len(user.encoded.cache):
            return cls({}, 0, None)
        read = user.encoded_rows
        sources = user.source[read.numpy()].tolist()
        places = {source: place for place, source in enumerate(sources)}
        first, count = user.encoded.first_item, len(sources)
        earlier = first - window_start(first + count - 1, snapshot.model.config.window)
        unread = np.flatnonzero(user.rows[: int(read[0])].numpy() >= 0)
        # Those that an earlier window would not read either, or the first event if there are none.
        unread = unread[: max(1, len(unread) - earlier)][-_CANDIDATES:]
        if not len(unread):
            return cls(places, earlier, None)
        light = unread[int(user.log_weights.numpy()[unread].argmin())]
        return cls(places, earlier, int(user.source[light]))

    def moves_without(self, source: int, is_item: bool) -> bool:
        """Return whether the encoder's first event changes without an event.

        Args:
            source: of a row of the memory.
            is_item: whether the row is an item: the encoder reads events on these alone.
        """
        if source < 0 or not is_item or not self.places:
            return False
        # One place earlier among one event fewer before it is the same event.
        return self.earlier > 0 if source in self.places else self.earlier != 1
