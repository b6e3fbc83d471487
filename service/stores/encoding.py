"""Encoding of records in every store: documents, vectors, cursors, and the identity of events."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import orjson

from service.domain.errors import Conflict, Invalid
from service.domain.records import NEGATIVE, Event, Item, User, Vector
from service.stores.values import EventVectors

IS_NEGATIVE = f"type IN ({', '.join(map(repr, sorted(NEGATIVE)))})"  # of a row of types, in SQL

# ------------------------------------------------------------------------------ vectors


def vector_bytes(vector: Vector) -> bytes:
    """Encode a float32 vector [d] as 4·d bytes, little-endian."""
    return vector.astype("<f4", copy=False).tobytes()


def blob_from(vector: Vector | None) -> bytes | None:
    """Encode a vector as `vector_bytes` does; None stays None."""
    return None if vector is None else vector_bytes(vector)


def vector_from(data: bytes | None) -> Vector | None:
    """Decode the read-only vector that `vector_bytes` encoded; None stays None."""
    return None if data is None else np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)


def vectors_from(key: bytes | None, value: bytes | None) -> EventVectors:
    """Decode the vectors of an event from its two blobs."""
    return EventVectors(vector_from(key), vector_from(value))


# ------------------------------------------------------------------------------ documents


def item_document(item: Item) -> bytes:
    """Encode an item as JSON, without its id, its embedding and default values."""
    names = ("title", "description", "tags", "categories", "attributes", "hidden")
    document = {name: value for name in names if (value := getattr(item, name))}
    if item.published_at is not None:
        document["published_at"] = item.published_at
    return orjson.dumps(document)


def item_from(item_id: str, document: bytes, embedding: bytes | None) -> Item:
    """Decode the item that `item_document` encoded."""
    fields = orjson.loads(document)
    for name in ("tags", "categories"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if embedding is not None:
        fields["embedding"] = vector_from(embedding)
    return Item(item_id, **fields)


def user_document(user: User) -> bytes:
    """Encode a profile as JSON, without the user's id."""
    return orjson.dumps({"attributes": user.attributes, "interests": user.interests})


def user_from(user_id: str, document: bytes | None) -> User:
    """Decode the profile that `user_document` encoded; without one it is empty."""
    if document is None:
        return User(user_id)
    fields = orjson.loads(document)
    return User(user_id, fields["attributes"], tuple(fields["interests"]))


def first_user(cursor: str | None, prefix: str) -> str:
    """Return the least id, as bytes, that may come first on a page of users."""
    # No id has a NUL, so U+0001 makes the next id.
    after = "" if cursor is None else f"{position_of(cursor, str)[0]}\x01"
    return max(after, prefix)


def users_page(
    rows: Sequence[tuple[str, bytes | None]], limit: int, prefix: str
) -> tuple[list[User], str | None]:
    """Return the users of a page, and the next page's cursor.

    Args:
        rows: one more than the page has, in the order of ids as bytes, from `first_user` on: ids
            that begin with the prefix come first.
    """
    found = [user_from(user_id, profile) for user_id, profile in rows if user_id.startswith(prefix)]
    return found[:limit], cursor_of(found[limit - 1].user_id) if len(found) > limit else None


Document = tuple[bytes | None, bytes | None]
"""The document and the embedding of an item, or the profile of a user and None."""


def document_digest(document: Document) -> int:
    """Return a signed 64-bit digest (BLAKE2b) of a document."""
    digest = hashlib.blake2b(digest_size=8, usedforsecurity=False)
    for part in document:
        digest.update(b"-" if part is None else b"%d:%s" % (len(part), part))
    return int.from_bytes(digest.digest(), "little", signed=True)


# ------------------------------------------------------------------------------ event ids


class EventIds:
    """Generator of event ids: UUIDs of version 7 (RFC 9562, section 5.7).

    They grow with time, so that an index of them is appended to, not scattered over. Within one
    instance they grow strictly, whatever the clock does; across processes 62 random bits keep
    them apart. Not thread-safe.
    """

    def __init__(self) -> None:
        self._last = 0

    def take(self, count: int, now: int) -> Iterator[str]:
        """`count` new ids at `now` (microseconds UTC)."""
        # RFC 9562, section 6.2, method 3: the 12 bits after the milliseconds hold the fraction.
        milliseconds, fraction = divmod(now, 1000)
        first = max(self._last + 1, milliseconds << 12 | fraction * 4096 // 1000)
        self._last = first + count - 1
        noise = struct.iter_unpack(">HHI", os.urandom(8 * count))
        for time, (a, b, c) in zip(range(first, first + count), noise, strict=True):
            variant = a & 0x3FFF | 0x8000
            yield (
                f"{time >> 28:08x}-{time >> 12 & 0xFFFF:04x}-7{time & 0xFFF:03x}"
                f"-{variant:04x}-{b:04x}{c:08x}"
            )


# ------------------------------------------------------------------------------ cursors


def cursor_of(*position: int | str) -> str:
    """Encode a position in a list as an opaque, URL-safe cursor."""
    return base64.urlsafe_b64encode(orjson.dumps(position)).rstrip(b"=").decode()


def position_of(cursor: str, *shape: type) -> tuple[Any, ...]:
    """Decode a cursor of `cursor_of`; raise `Invalid` if it is not one of that shape."""
    try:
        padded = cursor.encode() + b"=" * (-len(cursor) % 4)
        position = orjson.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, binascii.Error):
        position = None
    if (
        not isinstance(position, list)
        or [type(part) for part in position] != list(shape)
        or any(isinstance(part, int) and not -(2**63) <= part < 2**63 for part in position)
    ):
        raise Invalid("/cursor", "is not a cursor that this list has given out")
    return tuple(position)


def check_limit(limit: int) -> int:
    """Return `limit` if it is at least 1; raises `Invalid`."""
    if limit < 1:
        raise Invalid("/limit", f"must be at least 1; it is {limit}")
    return limit


# ---------------------------------------------------------------------------- identity

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
