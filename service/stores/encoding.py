"""Encoding of records as bytes in every store: documents, vectors, ids, cursors."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson

from service.domain.errors import Invalid
from service.domain.records import NEGATIVE, Item, User, Vector
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
