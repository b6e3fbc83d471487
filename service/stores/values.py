"""Values that stores take and return, the same for every store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from service.domain.errors import Corrupt
from service.domain.keys import ApiKey, Rate
from service.domain.records import Item, Scenario, User, Vector

# ------------------------------------------------------------------------------ histories


class AppendResult(NamedTuple):
    """Counts of an appended batch: `stored + duplicates` is its length."""

    stored: int
    duplicates: int


class EventVectors(NamedTuple):
    """The `key` and `value` of an event; `None` where the model derives the vector."""

    key: Vector | None
    value: Vector | None


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """A user's events as columns, oldest to newest by (timestamp, seq).

    `seqs` number the user's events in the order of arrival, from 1; they may have gaps. An unknown
    user has version 0, generation 0 and no events.
    """

    user_id: str
    version: int
    generation: int
    seqs: NDArray[np.uint32]  # [n]
    timestamps: NDArray[np.int64]  # [n] microseconds UTC
    weights: NDArray[np.float32]  # [n]
    item_ids: list[str]  # n
    types: list[str]  # n
    vectors: Mapping[int, EventVectors]  # by position; only of events with a key or value
    user: User | None  # the profile; None if none was stored

    def __len__(self) -> int:
        return len(self.item_ids)


# ------------------------------------------------------------------------------ the event log


@dataclass(frozen=True, slots=True, eq=False)
class LogColumns:
    """A slice of the whole event log, dictionary-encoded: event i is by `user_ids[users[i]]`.

    The log is ordered by user, then (timestamp, seq). Codes keep their meaning throughout one scan:
    the three lists are the same objects in every slice and grow with new names, so that the columns
    of the slices may be concatenated.
    """

    user_ids: list[str]
    item_ids: list[str]
    type_names: list[str]
    users: NDArray[np.int32]  # [n] into user_ids
    items: NDArray[np.int32]  # [n] into item_ids
    types: NDArray[np.int32]  # [n] into type_names
    timestamps: NDArray[np.int64]  # [n] microseconds UTC
    weights: NDArray[np.float32]  # [n]

    def __len__(self) -> int:
        return len(self.users)


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` shards of the log: the events of users whose `user_key` % count is `index`.

    Raises ValueError for an index outside [0, count).
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"there is no shard {self.index} of {self.count}")


class LogChanges(NamedTuple):
    """Changes of the event log up to `version`: users whose events are void, and new events.

    Users go by numbers, which are small. A number belongs to another user only after its own was
    forgotten, and is then among the rewritten ones.
    """

    version: int
    rewritten: NDArray[np.int64]  # numbers of users; those that they still have are new again
    events: LogColumns  # in no order; `users` are numbers of users, and there are no `user_ids`
    seqs: NDArray[np.int64]  # [n] of these events


def known_seq(known: NDArray[np.int64], user_no: int) -> int:
    """Return the last seq that a caller of `Store.log_changes` has of a user."""
    return int(known[user_no]) if user_no < len(known) else 0


# ------------------------------------------------------------------------------ the catalogue


class PatchResult(NamedTuple):
    """Items that were patched: their number, and which of them are new."""

    stored: int  # distinct ids
    created: tuple[str, ...]  # ids that were not in the catalogue, in the order of the patches


class CatalogueDigest(NamedTuple):
    """Identity of all items of one version: equal digests mean equal changes from version 0 on."""

    version: int
    digest: str  # hex, SHA-256 of ids, documents, embeddings and versions of change


class CatalogueChanges(NamedTuple):
    """Changes of the catalogue up to `version`: items inserted or replaced, and deleted ids."""

    version: int
    upserted: list[Item]
    deleted: list[str]


# Called by a write, on any thread, with the catalogue's version before and after it, before other
# readers can see the change; also for a change that is then rolled back.
OnCatalogueChange = Callable[[int, int], None]

# ------------------------------------------------------------------------------ forgotten users


class ForgottenUser(NamedTuple):
    """Entry of the ledger: one user was forgotten, with a number of events."""

    digest: bytes  # 32 bytes, of `user_digest`
    salt: bytes  # 16 bytes, in general the same for all entries of a store
    forgotten: int  # microseconds UTC
    events: int


class ForgottenAgain(NamedTuple):
    """Counts of `forget_again`."""

    users: int  # that were stored, and are forgotten
    events: int  # of these users
    entries: int  # that the ledger did not have


def user_digest(salt: bytes, user_id: str) -> bytes:
    """Return the SHA-256 of the salt and the user's id in UTF-8."""
    return hashlib.sha256(salt + user_id.encode()).digest()


# ------------------------------------------------------------------------------ of imports


class ImportRecord(NamedTuple):
    """An import: rows that were stored together, from files or a data set."""

    import_id: int
    started: int  # microseconds UTC
    source: str  # what was read, in the words of `begin_import`
    is_undone: bool


class UndoneImport(NamedTuple):
    """Counts of what an undone import had stored: taken back, or kept."""

    events: int
    items: int
    users: int
    kept: int  # items and profiles that were changed since
    shared: int  # events that another import contains too


# ------------------------------------------------------------------------------ measures, checks


class StoreMeasures(NamedTuple):
    """Sizes of the store, and counts of this process since it opened the store."""

    database_bytes: int
    log_bytes: int  # of the write-ahead log; it keeps its size after a checkpoint
    log_pages: int  # written by this process since it last copied the log into the database
    queued_rows: int  # accepted and not yet committed
    commits: int
    checkpoints: int
    failures: int  # calls that failed for a reason other than their arguments
    failed: bool  # True once nothing is written any more until the store is opened again


class CheckResult(NamedTuple):
    """One result of a check: a problem, something to know, or what was found intact."""

    level: Literal["ok", "note", "problem"]
    sentence: str


# ------------------------------------------------------------------------------ rate windows


class Grant(NamedTuple):
    """Requests that a key may send now."""

    requests: int
    retry_after: float  # seconds until it may be worth trying again, where there are none


class RateWindows(Protocol):
    """Windows of a store that several machines share."""

    async def grant(self, key_id: str, rate: Rate, wanted: int) -> Grant:
        """Count up to `wanted` requests of a key, as many as its rate leaves.

        Within any window of the rate at most its amount is granted, as estimated by weighting the
        window before with the part of it that is still inside.
        """
        ...


# ------------------------------------------------------------------------------ copies


class StoredEvent(NamedTuple):
    """Row of an event. It sorts by (timestamp, seq), the order of a history."""

    timestamp: int  # microseconds UTC
    seq: int
    item_id: str
    type: str
    weight: float
    event_id: str
    digest: int  # `encoding.body_digest` of the event as it was first sent
    import_no: int | None  # the import that it goes with


class StoredVectors(NamedTuple):
    """Encoded vectors of an event, by its seq."""

    seq: int
    key: bytes | None
    value: bytes | None


class StoredClaim(NamedTuple):
    """Range of seqs of a user, both inclusive, that an import claims."""

    import_no: int
    first_seq: int
    last_seq: int


class StoredReplacement(NamedTuple):
    """Document that an import has replaced."""

    import_no: int
    written: int  # `encoding.document_digest` of what the import wrote
    document: bytes | None  # what was there before; None: nothing
    embedding: bytes | None  # of an item


@dataclass(frozen=True, slots=True)
class StoredUser:
    """A user with all events, in the order of the history; vectors, claims, imports in order."""

    user_id: str
    next_seq: int  # of the next event
    profile: bytes | None  # `encoding.user_document`
    events: list[StoredEvent]
    vectors: list[StoredVectors]
    claims: list[StoredClaim]
    replaced: list[StoredReplacement]


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item: in the catalogue, deleted from it, or only seen in events."""

    item_id: str
    was_put: bool  # False: only events have ever named it
    document: bytes | None  # `encoding.item_document`; None: not in the catalogue
    embedding: bytes | None
    replaced: list[StoredReplacement]
    # The version of the last change, 0 without one, and the number of the item: items sort by it
    # in the order of the catalogue. Two stores number differently, so that it does not compare.
    place: tuple[int, int] = field(compare=False)


class Registers(NamedTuple):
    """Records that are few: imports, versions of scenarios, keys, and forgotten users."""

    imports: list[ImportRecord]
    scenarios: list[Scenario]
    keys: list[ApiKey]
    forgotten: list[ForgottenUser]


class CopyRecord(NamedTuple):
    """Record, in the target, of a copy."""

    origin: str  # names the source
    position: str  # id of the last user who is copied; "" = none, or all
    is_untouched: bool  # nothing but the copy has changed the store since it was begun
    is_whole: bool  # source and target were the same at the end of the last pass


def copy_unfinished(place: str, origin: str) -> Corrupt:
    """Return the error for an unfinished copy."""
    return Corrupt(
        f"{place} holds part of a copy of {origin}: run the same heed copy --from SOURCE --to "
        "TARGET again, which goes on where it stopped, or copy to an empty place"
    )


MAX_ITEMS = 1_000  # in one call of `put_items`


def latest_holders(users: Sequence[StoredUser]) -> list[StoredUser]:
    """Return users without those whose events a later one has.

    Users who are read one after another may have the same event, if the first was merged with the
    second in between.
    """
    holders = {event.event_id: user.user_id for user in users for event in user.events}
    return [
        user
        for user in users
        if all(holders[event.event_id] == user.user_id for event in user.events)
    ]
