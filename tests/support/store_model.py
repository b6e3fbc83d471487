"""Reference store in lists and dicts, the oracle of the store contract."""

from dataclasses import replace

from service.domain.errors import Conflict
from service.domain.records import Event, Item, User


class Notebook:
    """Answers that a store owes, kept in memory. Events must come with ids and timestamps."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}  # by user, in the order of arrival
        self.bodies: dict[str, Event] = {}  # as first sent, by event_id
        self.profiles: dict[str, User] = {}
        self.items: dict[str, Item] = {}

    def append(self, events: list[Event]) -> tuple[int, int]:
        """Stored and duplicates; raises Conflict."""
        fresh: dict[str, Event] = {}
        for event in events:
            assert event.event_id is not None
            first = self.bodies.get(event.event_id) or fresh.setdefault(event.event_id, event)
            if first != event:
                raise Conflict(event.event_id)
        stored = [event for id_, event in fresh.items() if id_ not in self.bodies]
        for event in stored:
            assert event.event_id is not None
            self.bodies[event.event_id] = event
            self.events.setdefault(event.user_id, []).append(event)
        return len(stored), len(events) - len(stored)

    def history(self, user_id: str) -> list[Event]:
        """Oldest first; sorting is stable, so that ties stay in the order of arrival."""
        return sorted(self.events.get(user_id, []), key=lambda event: event.timestamp or 0)

    def delete_event(self, user_id: str, event_id: str) -> bool:
        """True if it was there."""
        before = self.events.get(user_id, [])
        after = [event for event in before if event.event_id != event_id]
        if len(after) == len(before):
            return False
        self.events[user_id] = after
        del self.bodies[event_id]
        return True

    def forget(self, user_id: str) -> int:
        """How many events went."""
        self.profiles.pop(user_id, None)
        gone = self.events.pop(user_id, [])
        for event in gone:
            assert event.event_id is not None
            del self.bodies[event.event_id]
        return len(gone)

    def merge(self, user_id: str, source: str) -> int:
        """How many events moved."""
        if source not in self.events and source not in self.profiles:
            return 0
        moved = self.events.pop(source, [])
        target = self.events.setdefault(user_id, [])
        target += [replace(event, user_id=user_id) for event in moved]
        if source in self.profiles:
            other = self.profiles.pop(source)
            mine = self.profiles.get(user_id, User(user_id))
            new = [name for name in other.interests if name not in mine.interests]
            self.profiles[user_id] = User(
                user_id, {**other.attributes, **mine.attributes}, (*mine.interests, *new)
            )
        return len(moved)
