"""The store of a namespace: what SQLite and PostgreSQL keep alike, and what each adds.

Records are read and changed by jobs (`service.stores.jobs`), each written once, which a database
runs. Histories, appends, changes of the log and scans are programs of each database.

The contract suite, `tests/support/store_contract.py`, is the full specification. In short:

- A change is durable when its coroutine returns, and visible to every later read by any process.
- A call that raises has changed nothing; a cancelled call has changed everything or nothing.
- Each user has a `version`. Every change of the user, profile included, increases it, and no
  version is reused, not even after the user was forgotten and came back.
- Each user has a `generation`. It stays the same while events are only appended, so that a reader
  of the history up to `seq` needs only the later events (`changed_history`). It changes when
  events are deleted, moved or forgotten.
- The catalogue has a version too, from the same clock, and lists the changes since any version.

Every method raises `Invalid` for input that breaks the rules of `service.domain.records`,
`Unavailable` (or `StoreFull`, `Overloaded`) when the database cannot serve it now, and `Corrupt`
when stored bytes fail their checks.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from service.domain.errors import Invalid
from service.domain.keys import ApiKey
from service.domain.records import (
    Event,
    Item,
    ItemPatch,
    Scenario,
    User,
    check_each,
    check_event,
    check_id,
    check_item,
    check_user,
)
from service.stores.encoding import check_limit, item_from, user_document, user_from
from service.stores.jobs import CATALOGUE, KEYS, NAMES, SCENARIOS, Job, Transaction
from service.stores.postgres.shared_parts import SharedParts
from service.stores.records import catalogue, events, forgetting, imports, keys, scenarios, users
from service.stores.records.copying import BulkAccess
from service.stores.values import (
    AppendResult,
    CatalogueChanges,
    CatalogueDigest,
    ForgottenAgain,
    ForgottenUser,
    History,
    ImportRecord,
    LogChanges,
    LogColumns,
    OnCatalogueChange,
    PatchResult,
    RateWindows,
    Shard,
    StoreMeasures,
    UndoneImport,
    user_digest,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

UNDONE_ROWS = 20_000  # events of an import that are taken back in one transaction
MANY_ROWS = 1 << 30  # more than may be read on an event loop


class Store(ABC):
    """Store of one namespace. The module documents the promises of all methods."""

    # ------------------------------------------------------------------ what a database does

    _horizon: str
    """Statement that reads the tick up to which all changes are seen."""

    @abstractmethod
    def _ask(self, job: Callable[[*Ts], Job[T]], *args: *Ts, rows: int = 1) -> Awaitable[T]:
        """Read about `rows` rows that a request waits for."""
        ...

    @abstractmethod
    def _read(self, job: Callable[[*Ts], Job[T]], *args: *Ts, rows: int = 1) -> Awaitable[T]:
        """Read about `rows` rows, which may take long."""
        ...

    @abstractmethod
    def _read_apart(self, job: Callable[[*Ts], Job[T]], *args: *Ts) -> Awaitable[T]:
        """Read away from the event loop, all as of one moment."""
        ...

    @abstractmethod
    def _scan_rows(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """Iterate over the rows of a statement without values, all as of one moment."""
        ...

    @abstractmethod
    def _write(
        self,
        job: Callable[[Transaction, *Ts], Job[T]],
        *args: *Ts,
        rows: int = 1,
        alone: tuple[int, ...] = (),
        items: Iterable[str] = (),
        types: Iterable[str] = (),
        adds: bool = False,
        is_long: bool = False,
    ) -> Awaitable[T]:
        """Run a job in a transaction; the result comes once the transaction is durable.

        Args:
            job: runs again with the same arguments where another transaction was faster.
            args: of the job, after its transaction.
            rows: number of rows that are changed, about.
            alone: locks that no other transaction may hold meanwhile, in ascending order.
            items: ids whose numbers the job needs.
            types: of events, whose numbers the job needs.
            adds: whether the job adds to the store, and so must keep within its quota.
            is_long: whether the job may take hours.
        """
        ...

    @abstractmethod
    def _append(
        self, events: Sequence[Event], now: int, import_no: int | None
    ) -> Awaitable[AppendResult]:
        """Do as `append` does with events that were checked and arrived at `now`."""
        ...

    def _users_of(self, entries: Sequence[ForgottenUser]) -> Iterator[tuple[str, ForgottenUser]]:
        """Iterate over the stored users whom entries name."""
        by_salt: dict[bytes, dict[bytes, ForgottenUser]] = {}
        for entry in entries:
            by_salt.setdefault(entry.salt, {})[entry.digest] = entry
        for user_id in self.scan_user_ids() if by_salt else ():
            for salt, named in by_salt.items():
                entry_of_user = named.get(user_digest(salt, user_id))
                if entry_of_user is not None:
                    yield user_id, entry_of_user

    # ------------------------------------------------------------------ histories

    async def append(
        self, events: Sequence[Event], *, import_id: int | None = None
    ) -> AppendResult:
        """Store `events`, all or none of them, and return once they are durable.

        Event ids are unique in the whole store. An id that is already there (or twice in `events`)
        with the same body is a duplicate and changes nothing; an event without a timestamp matches
        whatever timestamp the first one has. The same id with another body raises `Conflict`, which
        names it. Events without an id are new, and the store names them. An item need not be in
        the catalogue.
        """
        check_each(events, check_event, "/events")
        if not events:
            return AppendResult(0, 0)
        now = _now()
        # Only the part below a millisecond tells the time of an import from one of an export.
        return await self._append(events, now - (now % 1_000 == 0), import_id)

    @abstractmethod
    async def version(self, user_id: str) -> int:
        """Return the user's version; 0 for an unknown user. Cheap: call it on each request."""
        ...

    @abstractmethod
    async def history(self, user_id: str) -> History:
        """Return all events of the user.

        One consistent reading: events, version, generation and profile belong together.
        """
        ...

    @abstractmethod
    async def changed_history(
        self, user_id: str, *, version: int, generation: int, seq: int
    ) -> History | None:
        """Return what a reader who knows the user up to a version lacks; None if nothing changed.

        Args:
            user_id: the user.
            version: that the reader knows; 0 for nothing.
            generation: of the reader's events. If it is still the user's, the events after
                `seq` are returned; else all of them.
            seq: the highest that the reader has.
        """
        ...

    async def page(
        self, user_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[Event], str | None]:
        """Return up to `limit` events, newest first, and the cursor of the next page or None.

        Events that arrive or go meanwhile neither repeat nor hide others.
        """
        check_id(user_id, "/user_id")
        rows = check_limit(limit)
        return await self._read(events.page, user_id, cursor, limit, rows=rows)

    @abstractmethod
    async def event_ids(
        self, user_id: str, seqs: Sequence[int], timestamps: Sequence[int]
    ) -> list[str | None]:
        """Return the ids of events of one history, in the given order; None for deleted ones."""
        ...

    async def delete_event(self, user_id: str, event_id: str) -> bool:
        """Delete one event of this user; False if the user has no such event."""
        check_id(user_id, "/user_id")
        check_id(event_id, "/event_id")
        return await self._write(users.delete_event, user_id, event_id)

    async def forget(self, user_id: str) -> int:
        """Delete everything about the user, and add an entry to the ledger of forgotten users.

        Returns the number of events. No-op if the user is unknown.
        """
        check_id(user_id, "/user_id")
        return await self._write(forgetting.forget, user_id, _now())

    async def merge(self, user_id: str, source: str) -> int:
        """Move the events of `source` to `user_id` and forget `source`; return the number moved.

        Interests are united, the target's first; where both have an attribute, the target's wins.
        Moved events keep ids and timestamps, and among equal timestamps come after the target's
        own. No-op if `source` is unknown; `Invalid` if both are the same.
        """
        check_id(user_id, "/user_id")
        if check_id(source, "/from") == user_id:
            raise Invalid("/from", "must be another user")
        return await self._write(users.merge, user_id, source)

    async def put_user(self, user: User, *, import_id: int | None = None) -> None:
        """Replace the user's profile."""
        check_user(user)
        await self._write(users.put_user, user.user_id, user_document(user), import_id, adds=True)

    async def get_user(self, user_id: str) -> User | None:
        """Return the profile; an empty one for a user who only has events; None if unknown."""
        return await self._ask(users.get_user, check_id(user_id, "/user_id"))

    async def page_users(
        self, *, cursor: str | None = None, limit: int = 100, prefix: str = ""
    ) -> tuple[list[User], str | None]:
        """Return up to `limit` users by user_id (as bytes), and the next page's cursor or None.

        They have events or only a profile, and their ids begin with `prefix`.
        """
        rows = 10 * check_limit(limit)
        return await self._read(users.page_users, cursor, limit, prefix, rows=rows)

    async def event_counts(self, user_ids: Sequence[str]) -> list[int]:
        """Return the number of events of each user."""
        if not user_ids:
            return []
        return await self._read(users.event_counts, user_ids, rows=MANY_ROWS)

    # ------------------------------------------------------------------ the event log

    @abstractmethod
    async def popularity(self) -> tuple[list[str], NDArray[np.int64]]:
        """Return the ids of items with events, and their numbers of events.

        Reads no event: the counts are stored. The order is that in which the store first had the
        items. Dislikes and returns make nothing popular: they count 0.
        """
        ...

    @abstractmethod
    async def log_changes(
        self, after: int, known: NDArray[np.int64], limit: int | None = None
    ) -> LogChanges:
        """Return the changes of the event log after version `after`; 0 gives the whole log.

        Args:
            after: a version up to which the caller knows the log.
            known: [n] the last `seq` that the caller has of each user, by the user's number; 0 or
                left out = none.
            limit: number of events, about; the others are after the version that comes with them.
        """
        ...

    async def user_ids(self, numbers: Sequence[int]) -> list[str | None]:
        """Return the ids of users by their numbers in `log_changes`; None for unknown ones."""
        if not numbers:
            return []
        return await self._ask(users.user_ids, numbers)

    # Training and export read everything, outside any event loop.

    @abstractmethod
    def scan(self, rows: int = 100_000, *, shard: Shard | None = None) -> Iterator[LogColumns]:
        """Iterate over the log as columns, `rows` at a time, in its state at the first `next`.

        Args:
            rows: events at once.
            shard: read only the events of its users, without reading those of others; None = all.
        """
        ...

    def scan_events(self) -> Iterator[Event]:
        """Iterate over the log as records, in the order of `scan`, with ids and vectors."""
        return events.build_events(self._scan_rows(events.ALL_EVENTS))

    # ------------------------------------------------------------------ the catalogue

    async def put_items(
        self,
        items: Sequence[Item],
        *,
        on_change: OnCatalogueChange | None = None,
        import_id: int | None = None,
    ) -> int:
        """Insert or replace `items`, all or none; return the number of distinct ids.

        The last item of an id wins. Items that are already there just so change nothing.
        """
        check_each(items, check_item, "/items")
        if not items:
            return 0
        return await self._write(
            catalogue.put_items,
            items,
            on_change,
            import_id,
            rows=len(items),
            alone=(CATALOGUE,),
            items=[item.item_id for item in items],
            adds=True,
        )

    async def patch_items(
        self,
        patches: Sequence[ItemPatch],
        *,
        create: bool = True,
        on_change: OnCatalogueChange | None = None,
        import_id: int | None = None,
    ) -> PatchResult:
        """Apply `patches` in their order, all or none.

        An item that is not in the catalogue is inserted, or raises `NotFound` without `create`.
        """
        check_each([patch.apply(None) for patch in patches], check_item, "/items")
        if not patches:
            return PatchResult(0, ())
        return await self._write(
            catalogue.patch_items,
            patches,
            create,
            on_change,
            import_id,
            rows=len(patches),
            alone=(CATALOGUE,),
            items=[patch.item_id for patch in patches],
            adds=True,
        )

    async def get_items(self, item_ids: Sequence[str]) -> list[Item | None]:
        """Return items in the given order; None for those not in the catalogue."""
        for index, item_id in enumerate(item_ids):
            check_id(item_id, f"/item_ids/{index}")
        if not item_ids:
            return []
        return await self._ask(catalogue.get_items, item_ids, rows=10 * len(item_ids))

    async def delete_item(
        self, item_id: str, *, on_change: OnCatalogueChange | None = None
    ) -> bool:
        """Remove the item from the catalogue (histories keep it); False if it was not in it."""
        check_id(item_id, "/item_id")
        return await self._write(catalogue.delete_item, item_id, on_change, alone=(CATALOGUE,))

    async def page_items(
        self, *, cursor: str | None = None, limit: int = 100, hidden: bool = False
    ) -> tuple[list[Item], str | None]:
        """Return up to `limit` items by item_id (as bytes), and the next page's cursor or None.

        With `hidden`, only items that are hidden.
        """
        # Hidden items are found by looking at all.
        rows = 10 * check_limit(limit) + hidden * MANY_ROWS
        return await self._read(catalogue.page_items, cursor, limit, hidden, rows=rows)

    async def catalogue_version(self) -> int:
        """Return the version of the last change of the catalogue; 0 if there was none. Cheap."""
        return await self._read(catalogue.version)

    @abstractmethod
    def announced_catalogue(self) -> int:
        """Return a version of the catalogue that requests must see, without waiting for anything.

        It is that of this client's last acknowledged change or a later one, and that of another
        client's change within a second.
        """
        ...

    async def catalogue_digest(self) -> CatalogueDigest:
        """Return the digest of what `catalogue_changes(0)` would return. Reads all items."""
        return await self._read(catalogue.digest, rows=MANY_ROWS)

    async def catalogue_changes(self, after: int, limit: int | None = None) -> CatalogueChanges:
        """Return the changes after version `after`; `after=0` gives the whole catalogue.

        With `limit`, about that number of items; the others are after the version that comes with
        them.
        """
        return await self._read(catalogue.changes, after, limit, rows=MANY_ROWS)

    # Training and export read everything, outside any event loop.

    def scan_items(self) -> Iterator[Item]:
        """Iterate over the catalogue by item_id."""
        return starmap(item_from, self._scan_rows(catalogue.ALL_ITEMS))

    # ------------------------------------------------------------------ scenarios

    async def put_scenario(self, name: str, body: Mapping[str, Any]) -> Scenario:
        """Store the next version of a scenario, unless its last version is the same.

        Raises:
            Invalid: its `fallback` is not stored, or leads back to this scenario.
        """
        check_id(name, "/name")
        return await self._write(scenarios.put, name, body, _now(), alone=(SCENARIOS,), adds=True)

    async def scenario(self, name: str) -> Scenario | None:
        """Return the last version of a scenario; None without one, or if it is deleted. Cheap."""
        return await self._ask(scenarios.current, check_id(name, "/name"))

    async def page_scenarios(
        self, *, cursor: str | None = None, limit: int = 100, deleted: bool = False
    ) -> tuple[list[Scenario], str | None]:
        """Return a page of the scenarios by name, and the cursor of the next page.

        With `deleted`, of those that were deleted, whose last version says so.
        """
        rows = 10 * check_limit(limit)
        return await self._read(scenarios.page, cursor, limit, deleted, rows=rows)

    async def page_scenario_versions(
        self, name: str, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[Scenario], str | None]:
        """Return a page of all versions of a scenario, the last first; deletions are versions."""
        check_id(name, "/name")
        rows = 10 * check_limit(limit)
        return await self._read(scenarios.versions, name, cursor, limit, rows=rows)

    async def delete_scenario(self, name: str) -> bool:
        """Delete a scenario, whose versions remain; False if there was none.

        Raises:
            Conflict: it is the fallback of another scenario.
        """
        check_id(name, "/name")
        return await self._write(scenarios.delete, name, _now(), alone=(SCENARIOS,))

    # ------------------------------------------------------------------ API keys

    rate_windows: RateWindows | None = None
    """Counts the requests of keys for all machines; None in a store of one machine."""

    async def add_key(self, key: ApiKey) -> None:
        """Store a new key, and return once it is durable. Raises `Conflict` if its id is taken."""
        await self._write(keys.add, key, alone=(KEYS,))

    async def revoke_key(self, key_id: str) -> bool:
        """Revoke a key from now on; False if there is none, or it is revoked already."""
        return await self._write(keys.revoke, key_id, _now(), alone=(KEYS,))

    async def key(self, key_id: str) -> ApiKey | None:
        """Return the key, revoked and expired ones too; None if unknown. Cheap."""
        return await self._ask(keys.find, key_id)

    async def keys(self) -> list[ApiKey]:
        """Return all keys, oldest first."""
        return await self._read(keys.all_keys)

    async def keys_version(self) -> int:
        """Return the version of the last change of a key; 0 if there never was one."""
        return await self._read(keys.version)

    @abstractmethod
    def announced_keys(self) -> int:
        """Return a version of the keys that requests must see, without waiting for anything.

        It is that of this client's last acknowledged change or a later one, and that of another
        client's change within a second.
        """
        ...

    # ------------------------------------------------------------------ forgotten users

    async def page_forgotten(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[ForgottenUser], str | None]:
        """Return up to `limit` entries, oldest first, and the cursor of the next page or None."""
        rows = 10 * check_limit(limit)
        return await self._read(forgetting.page, cursor, limit, rows=rows)

    async def find_forgotten(self, user_id: str) -> list[ForgottenUser]:
        """Return the entries of a user, oldest first."""
        return await self._read(forgetting.find, check_id(user_id, "/user_id"))

    async def count_forgotten(self, since: int) -> int:
        """Return the number of entries at `since` (microseconds UTC) or later."""
        return await self._read(forgetting.count, since)

    async def forget_again(self, entries: Sequence[ForgottenUser]) -> ForgottenAgain:
        """Forget stored users whom entries of another ledger name, and add these entries.

        Entries that this ledger has already are left out: what is stored of their users is newer.
        When the call is interrupted, it can be repeated.
        """
        new = await self._read(forgetting.unknown_entries, entries, rows=len(entries))
        matches = await asyncio.to_thread(lambda: list(self._users_of(new)))
        counts = [
            await self._write(forgetting.forget_entry, user_id, entry, _now())
            for user_id, entry in matches
        ]
        await self._write(lambda _: forgetting.add_entries(new))
        events = [count for count in counts if count is not None]
        return ForgottenAgain(len(events), sum(events), len(new))

    async def clean_up(self) -> bool:
        """Delete what forgotten users have left behind, such as names that nothing else uses.

        Call it now and then; it reads the whole log, but only after a user was forgotten. Returns
        whether anything was left.
        """
        if not await self._read(forgetting.has_noted_names):
            return False
        noted, since, unused = await self._read(
            forgetting.find_unused, self._horizon, rows=MANY_ROWS
        )
        # Twice, since the write is to look at little: at what changes meanwhile.
        since, unused = await self._read(
            forgetting.still_unused, self._horizon, since, unused, rows=MANY_ROWS
        )
        return await self._write(forgetting.delete_names, noted, since, unused, alone=(NAMES,))

    # ------------------------------------------------------------------ of imports

    async def begin_import(self, source: str) -> int:
        """Return the id of a new import, for `append`, `put_items` and `put_user`."""
        return await self._write(imports.begin, source, _now())

    async def imports(self) -> list[ImportRecord]:
        """Return all imports, oldest first."""
        return await self._read(imports.records)

    async def import_counts(self) -> dict[int, list[int]]:
        """Count what each import has stored: events, items and profiles; reads all events."""
        return await self._read(imports.counts)

    async def undo_import(
        self, import_id: int, *, progress: Callable[[int], None] | None = None
    ) -> UndoneImport:
        """Take back what an import stored.

        Its events are deleted, except those that were also appended without an import or by another
        import that is not undone, before or after it; so are users without any events and profile
        that remain. Items and profiles that it inserted or replaced are as they were before it,
        unless they were changed since by something else than an import. Not all at once: when it is
        interrupted, it can be called again. `progress` is called with the number of events that are
        deleted so far.

        Raises:
            Invalid: there is no such import, or it is undone already.
        """
        after: imports.Place | None = await self._write(imports.begin_undo, import_id)
        events = shared = 0
        while after is not None:
            deleted, kept, after = await self._write(
                imports.undo_events, import_id, after, UNDONE_ROWS, rows=UNDONE_ROWS
            )
            events, shared = events + deleted, shared + kept
            if progress is not None:
                progress(events)
        items, profiles, kept = await self._write(
            imports.undo_documents, import_id, alone=(CATALOGUE,)
        )
        return UndoneImport(events, items, profiles, kept, shared)

    # ------------------------------------------------------------------ the store itself

    @abstractmethod
    async def clock(self, *, patient: bool = False) -> int:
        """Return the tick of the last change in the store; 0 if there was none. Cheap.

        A caller that no request waits for is `patient`: a slow server is then waited for longer.
        """
        ...

    @abstractmethod
    async def counts(self) -> dict[str, int]:
        """Return the number of `users`, `items` (in the catalogue) and `events`."""
        ...

    @abstractmethod
    async def problem(self) -> str | None:
        """Return why reads or writes are not answered, in a sentence; None if they are.

        A disk that has become full is no problem: writes succeed again once there is room.
        """
        ...

    @property
    @abstractmethod
    def shared(self) -> SharedParts | None:
        """Return what the machines of an installation share; None in a store of one machine."""
        ...

    @abstractmethod
    async def close(self) -> None:
        """Finish accepted calls, then release all resources. Later calls raise `Unavailable`."""
        ...

    @abstractmethod
    def measures(self) -> StoreMeasures:
        """Return sizes and counts as of now, without waiting for anything."""
        ...

    def bulk(self) -> BulkAccess:
        """Return access in bulk; each object is for one copy at a time."""
        return BulkAccess(self._read_apart, self._write)

    def scan_users(self) -> Iterator[User]:
        """Iterate over all stored profiles."""
        return starmap(user_from, self._scan_rows(users.PROFILES))

    def scan_user_ids(self) -> Iterator[str]:
        """Return the ids of all users that `counts` counts, in the order of their bytes."""
        for (user_id,) in self._scan_rows(users.USER_IDS):
            yield user_id


def _now() -> int:
    return time.time_ns() // 1000
