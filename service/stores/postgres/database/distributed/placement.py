"""Placement of rows on the workers of a distributed database, as the client works it out.

Citus places a row by the hash of its column, which is PostgreSQL's for hash partitions: it is the
same in all versions, for rows on disk depend on it. So a call knows which workers it needs before
it takes a connection.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from service.stores.event_identity import user_key

MANY = 64  # keys that are on all workers, as far as anybody needs to know

_MASK = 0xFFFFFFFF
SHARDS = b"""\
SELECT logicalrelid = 'heed.users'::regclass, shardmaxvalue::bigint, groupid
  FROM pg_dist_shard JOIN pg_dist_placement USING (shardid)
 WHERE logicalrelid IN ('heed.users'::regclass, 'heed.event_ids'::regclass)
 ORDER BY shardmaxvalue::bigint"""
"""Rows of a placement."""


@dataclass(frozen=True)
class _Shards:
    last: Sequence[int]  # hash of each shard, in ascending order
    workers: Sequence[int]  # that have them

    def worker(self, hashed: int) -> int:
        return self.workers[bisect_left(self.last, hashed)]


@dataclass(frozen=True)
class Placement:
    """Workers of the rows of users and of event ids; a worker goes by its group's number."""

    users: _Shards
    ids: _Shards

    @property
    def everywhere(self) -> frozenset[int]:
        """All workers that have rows."""
        return frozenset((*self.users.workers, *self.ids.workers))

    def workers(self, users: Collection[str], ids: Collection[bytes] = ()) -> frozenset[int]:
        """Return the workers that have users, by their ids, and events' ids, by their keys."""
        if len(users) + len(ids) > MANY:
            return self.everywhere
        found = {self.users.worker(hash_bigint(user_key(user_id))) for user_id in users}
        return frozenset(found.union(self.ids.worker(hash_uuid(key)) for key in ids))


def build_placement(rows: Iterable[tuple[bool, int, int]]) -> Placement:
    """Build a placement of the rows of `SHARDS`."""
    tables: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for is_users, last, worker in rows:
        tables[is_users].append((last, worker))
    users, ids = (_Shards(*zip(*tables[each], strict=True)) for each in (True, False))
    return Placement(users, ids)


def hash_bigint(value: int) -> int:
    """Return PostgreSQL's `hashint8`: a signed 32-bit hash of a signed 64-bit integer."""
    low, high = value & _MASK, (value >> 32) & _MASK
    return _hash([low ^ (high if value >= 0 else high ^ _MASK)])


def hash_uuid(value: bytes) -> int:
    """Return PostgreSQL's `uuid_hash` of 16 bytes: a signed 32-bit hash."""
    return _hash(list(struct.unpack("<4I", value)))


def _hash(words: list[int]) -> int:
    """Return PostgreSQL's `hash_bytes` of 32-bit words: Bob Jenkins' lookup3, of 2006."""
    a = b = c = (0x9E3779B9 + 4 * len(words) + 3_923_095) & _MASK
    while len(words) >= 3:
        a, b, c = (a + words[0]) & _MASK, (b + words[1]) & _MASK, (c + words[2]) & _MASK
        words = words[3:]
        for bits in (4, 6, 8, 16, 19, 4):  # the three take turns
            a = ((a - c) & _MASK) ^ _rotate(c, bits)
            a, b, c = b, (c + b) & _MASK, a
    a += words[0] if words else 0
    b += words[1] if len(words) > 1 else 0
    a, b = a & _MASK, b & _MASK
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotate(b, bits)) & _MASK
        a, b, c = b, c, a
    return b - (1 << 32) if b >> 31 else b


def _rotate(word: int, bits: int) -> int:
    return (word << bits | word >> (32 - bits)) & _MASK
