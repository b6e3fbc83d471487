"""Identity of events and users: digests of event bodies, ids of events without one, user keys."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress

from service.domain.errors import Conflict
from service.domain.records import Event
from service.stores.encoding import vector_bytes

CONTENT_PREFIX = "content:"
_WEIGHT = struct.Struct("<d")
_TIMESTAMP = struct.Struct("<q")

FreshEvent = tuple[Event, int, int]
"""An event that is not stored yet, with its timestamp, in microseconds UTC, and `body_digest`."""


def event_key(event_id: str) -> bytes:
    """Return 128 bits for an event's id: those of a UUID in its canonical form, else a hash."""
    if len(event_id) == 36:
        with suppress(ValueError):
            key = bytes.fromhex(event_id.replace("-", ""))
            if _canonical(key) == event_id:
                return key
    return hashlib.blake2b(event_id.encode(), digest_size=16, usedforsecurity=False).digest()


def spelled_id(event_id: str | None, key: bytes) -> str | None:
    """Return an event's id where its key does not tell it; None for UUIDs and for no id."""
    if event_id is None or (len(event_id) == 36 and _canonical(key) == event_id):
        return None
    return event_id


def find_fresh(
    events: Sequence[Event], now: int, known: Mapping[str, tuple[int, int]]
) -> list[FreshEvent]:
    """Return the events of a batch that are neither stored nor in the batch before.

    Args:
        events: the batch.
        now: its time of arrival, for events without a timestamp; microseconds UTC.
        known: `body_digest` and timestamp of the stored events, by event id.

    Raises:
        Conflict: an id is that of an event with another body, which the error names.
    """
    seen = dict(known)
    fresh: list[FreshEvent] = []
    for event in events:
        digest = body_digest(event)
        timestamp = now if event.timestamp is None else event.timestamp
        if event.event_id is not None:
            first = seen.get(event.event_id)
            if first is not None:
                if first[0] != digest or event.timestamp not in (None, first[1]):
                    raise Conflict(
                        f"event_id {event.event_id!r} is taken by an event with another body"
                    )
                continue
            seen[event.event_id] = (digest, timestamp)
        fresh.append((event, timestamp, digest))
    return fresh


def user_key(user_id: str) -> int:
    """Return 63 bits of the BLAKE2b hash of a user's id: the same in every store, on any machine.

    A log that is divided by users has a user in the shard `user_key(user_id) % count`.
    """
    digest = hashlib.blake2b(user_id.encode(), digest_size=8, usedforsecurity=False).digest()
    return int.from_bytes(digest, "big") & (1 << 63) - 1


def body_digest(event: Event) -> int:
    """Return a signed 64-bit digest (BLAKE2b) of all that identifies the event's body.

    The timestamp stays outside: a retry may lack it, so stores compare it apart.
    """
    digest = hashlib.blake2b(_body(event), digest_size=8, usedforsecurity=False).digest()
    return int.from_bytes(digest, "little", signed=True)


def content_digest(event: Event) -> bytes:
    """Return a 128-bit digest (BLAKE2b) of the event's body and timestamp, without its id."""
    time = b"" if event.timestamp is None else _TIMESTAMP.pack(event.timestamp)
    return hashlib.blake2b(_body(event) + time, digest_size=16, usedforsecurity=False).digest()


def content_id(digest: bytes, occurrence: int) -> str:
    """Return the event id of occurrence 0, 1, … of one content in a log without ids.

    Logs that overlap give their common events the same ids, in whatever order and files they are.
    """
    return f"{CONTENT_PREFIX}{digest.hex()}:{occurrence}"


def _body(event: Event) -> bytes:
    ids = f"{event.user_id}\0{event.item_id}\0{event.type}\0"  # ids hold no NUL
    body = ids.encode() + _WEIGHT.pack(event.weight)
    if event.key is not None:
        body += b"key" + vector_bytes(event.key)
    if event.value is not None:
        body += b"value" + vector_bytes(event.value)
    return body


def _canonical(key: bytes) -> str:
    text = key.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
