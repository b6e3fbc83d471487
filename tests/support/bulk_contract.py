"""The contract of bulk access to a store, as tests to inherit.

The fixtures are those of `store_contract`; `source` is a filled store of another kind or place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.domain.errors import Conflict
from service.domain.keys import issue_key
from service.domain.records import Event, Item, User
from service.stores.base import Store
from service.stores.records.copying import BulkAccess
from service.stores.sqlite.store import SQLiteStore
from service.stores.values import CopyRecord, Registers, StoredEvent, StoredUser
from tests.support import full_store
from tests.support.full_store import read_all, stored_items, stored_users
from tests.support.store_contract import (
    IDS,
    NOON,
    Connect,
    LogFollower,
    _Contract,
    later_than,
    rows,
    vector,
)

NONE = Registers([], [], [], [])


def user(user_id: str, *event_ids: str, item: str = "i", first: int = 1) -> StoredUser:
    """A user with events of these ids, at one time."""
    events = [
        StoredEvent(NOON, seq, item, "view", 1.0, event_id, 7, None)
        for seq, event_id in enumerate(event_ids, first)
    ]
    return StoredUser(user_id, first + len(events), None, events, [], [], [])


class BulkContract(_Contract):
    """Bulk reads of users and items, and bulk writes of a copy's target."""

    @pytest.fixture
    async def source(self, tmp_path: Path) -> AsyncIterator[Store]:
        store = SQLiteStore(tmp_path / "source" / "heed.db")
        await full_store.fill(store)
        yield store
        await store.close()

    @pytest.fixture
    async def bulk(self, store: Store) -> BulkAccess:
        bulk = store.bulk()
        await bulk.begin_copy("there")
        return bulk

    async def test_users_are_read_whole_and_in_the_order_of_their_ids(self, store: Store) -> None:
        """Pages of whole users by bytes; each user is what histories, pages and profiles say."""
        await full_store.fill(store)
        found = await stored_users(store, events=30)
        assert [each.user_id for each in found] == list(store.scan_user_ids())
        assert [each.user_id.encode() for each in found] == sorted(
            each.user_id.encode() for each in found
        )
        for each in found:
            history = await store.history(each.user_id)
            events = [
                (event.seq, event.timestamp, event.item_id, event.type) for event in each.events
            ]
            assert events == [(*row[:2], *row[3:5]) for row in rows(history)]
            assert np.array_equal(
                np.array([event.weight for event in each.events], np.float32), history.weights
            )
            vectors = [
                (int(history.seqs[place]), *(None if v is None else v.tobytes() for v in pair))
                for place, pair in history.vectors.items()
            ]
            assert [tuple(row) for row in each.vectors] == sorted(vectors)
            page, _ = await store.page(each.user_id, limit=1_000)
            assert [event.event_id for event in each.events] == [e.event_id for e in page[::-1]]
            assert each.next_seq > max([0, *history.seqs.tolist()])
            assert (each.profile is None) == (history.user is None)
        sizes = [len(await store.bulk().users(after, 30)) for after in ("", found[9].user_id)]
        assert all(1 <= size < len(found) for size in sizes)
        assert await store.bulk().users(found[-1].user_id, 30) == []

    async def test_a_page_has_about_so_many_events_and_a_user_at_least(self, store: Store) -> None:
        for name, count in (("a", 3), ("b", 50), ("c", 3), ("d", 3), ("e", 5)):
            await store.append([Event(name, "i") for _ in range(count)])
        bulk = store.bulk()
        pages = [await bulk.users(after, 8) for after in ("", "a", "b", "d")]
        assert [[each.user_id for each in page] for page in pages] == [
            ["a"],
            ["b"],
            ["c", "d"],
            ["e"],
        ]

    async def test_items_are_read_with_all_that_is_stored(self, store: Store) -> None:
        """Items in the catalogue, deleted ones, and names that only events have."""
        await store.append([Event("u", "named"), Event("u", "put")])
        await store.put_items([Item("put", "Title", embedding=vector(1, 2)), Item("deleted")])
        await store.delete_item("deleted")
        number = await store.begin_import("a.csv")
        await store.put_items([Item("put", "over"), Item(IDS[3])], import_id=number)
        found = {each.item_id: each for each in await stored_items(store, limit=2)}
        assert list(found) == sorted(["named", "put", "deleted", IDS[3]])
        assert not found["named"].was_put
        assert found["deleted"].was_put
        assert found["deleted"].document is None
        ((import_no, _, document, embedding),) = found["put"].replaced
        assert (import_no, embedding) == (number, vector(1, 2).tobytes())
        assert document is not None
        assert b"Title" in document
        assert found[IDS[3]].replaced[0].document is None
        assert await store.bulk().find_items(["put", "unknown"]) == [found["put"]]
        assert await store.bulk().find_items([]) == []
        names = await store.bulk().item_names(0, 10)
        assert [name for _, name in names] == ["named", "put", "deleted", IDS[3]]
        assert await store.bulk().item_names(names[1][0], 1) == names[2:3]

    async def test_users_that_are_put_are_those_that_were_read(
        self, store: Store, bulk: BulkAccess, source: Store, another: Connect
    ) -> None:
        """Events keep ids, times, order and gaps; counts and popularity are right."""
        users = await stored_users(source)
        await bulk.put_users(users[::-1], users[-1].user_id)
        assert await stored_users(store) == users
        ours, theirs = await read_all(source), await read_all(another())
        for part in ("users", "histories", "events", "profiles"):
            assert ours[part] == theirs[part], part
        assert sorted(ours["popularity"]) == sorted(theirs["popularity"])
        assert theirs["counts"] == ours["counts"] | {"items": 0}
        # A body that is sent again is a duplicate, and the next event is the user's last.
        event = next(store.scan_events())
        assert await store.append([event]) == (0, 1)
        before = await store.history(event.user_id)
        await store.append([Event(event.user_id, "i", timestamp=NOON + 10**9)])
        after = await later_than(store, event.user_id, int(before.seqs.max()))
        (of_user,) = [each for each in users if each.user_id == event.user_id]
        assert after.seqs.tolist() == [of_user.next_seq]

    async def test_put_users_replace_what_is_stored_of_them(
        self, store: Store, bulk: BulkAccess
    ) -> None:
        """A replaced user has new versions, and nobody is in the ledger."""
        follower = LogFollower(store, None)
        await bulk.put_users([user("a", "1", "2"), user("b", "3"), user("c", "4")], "c")
        await follower.follow()
        version = await store.version("a")
        generation = (await store.history("a")).generation
        changed = replace(
            user("a", "2", "5", item="j", first=2), profile=b'{"attributes":{},"interests":[]}'
        )
        await bulk.put_users([changed], "c")
        assert await stored_users(store) == [changed, user("b", "3"), user("c", "4")]
        assert await store.version("a") > version
        assert (await store.history("a")).generation != generation
        assert await store.counts() == {"users": 3, "items": 0, "events": 4}
        ids, votes = await store.popularity()
        assert dict(zip(ids, votes.tolist(), strict=True)) == {"i": 2, "j": 2}
        assert (await store.page_forgotten())[0] == []
        assert await store.get_user("a") == User("a")
        await follower.follow()
        assert await follower.log() == [
            ("a", "j", "view", NOON, 1.0),
            ("a", "j", "view", NOON, 1.0),
            ("b", "i", "view", NOON, 1.0),
            ("c", "i", "view", NOON, 1.0),
        ]

    async def test_events_of_dropped_users_leave_no_names(
        self, store: Store, bulk: BulkAccess
    ) -> None:
        """Names that only a replaced user has used are deleted by the next clean-up."""
        await bulk.put_users([user("b", "2", item="old")], "b")
        await bulk.put_users([user("b", "2", item="new")], "b")
        await store.clean_up()
        assert [name for _, name in await bulk.item_names(0, 9)] == ["new"]

    async def test_events_may_move_between_users(self, store: Store, bulk: BulkAccess) -> None:
        """A user with an event that now is another user's is dropped, for the next pass."""
        await bulk.put_users([user("a", "1", "2"), user("b", "3"), user("c", "4")], "c")
        await bulk.put_users([user("b", "3", "2"), user("d", "5")], "d")
        assert await stored_users(store) == [user("b", "3", "2"), user("c", "4"), user("d", "5")]
        assert await store.counts() == {"users": 3, "items": 0, "events": 4}

    async def test_of_two_users_with_an_event_the_later_is_put(
        self, store: Store, bulk: BulkAccess
    ) -> None:
        """They were merged between two reads; the earlier one is left to the next pass."""
        await bulk.put_users([user("b", "old")], "b")
        await bulk.put_users([user("a", "1", "2"), user("b", "3"), user("c", "2", "4")], "c")
        assert await stored_users(store) == [user("b", "3"), user("c", "2", "4")]
        assert await store.counts() == {"users": 2, "items": 0, "events": 3}
        ids, votes = await store.popularity()
        assert (ids, votes.tolist()) == (["i"], [3])

    async def test_items_keep_both_of_their_orders(
        self, store: Store, bulk: BulkAccess, source: Store, another: Connect
    ) -> None:
        """The catalogue is in the order of its changes, and popularity in that of arrival."""
        names = [name for _, name in await source.bulk().item_names(0, 1_000)]
        await bulk.add_item_names(names[:20])
        await bulk.add_item_names(names)
        items = sorted(await stored_items(source), key=lambda item: item.place)
        await bulk.put_items([item for item in items if item.was_put])
        await bulk.put_users(await stored_users(source), "z")
        assert await stored_items(store) == await stored_items(source)
        assert [name for _, name in await bulk.item_names(0, 1_000)] == names
        ours, theirs = await read_all(source), await read_all(another())
        for part in ("items", "catalogue", "popularity", "counts"):
            assert ours[part] == theirs[part], part
        assert (await store.page_items(hidden=True))[0] == (await source.page_items(hidden=True))[0]

    async def test_parts_of_the_catalogue_come_in_its_order(
        self, store: Store, bulk: BulkAccess, source: Store
    ) -> None:
        """A follower who reads little at once gets the same changes, as many versions apart."""
        names = [name for _, name in await source.bulk().item_names(0, 1_000)]
        await bulk.add_item_names(names)
        items = sorted(await stored_items(source), key=lambda item: item.place)
        await bulk.put_items([item for item in items if item.was_put])
        await store.put_items([Item("after", "the copy")])
        await source.put_items([Item("after", "the copy")])
        read: list[list[list[str]]] = []
        for each in (source, store):
            parts: list[list[str]] = []
            version = 0
            while version < await each.catalogue_version():
                changes = await each.catalogue_changes(version, 1)
                assert changes.version > version
                version = changes.version
                parts.append([item.item_id for item in changes.upserted] + changes.deleted)
            read.append(parts)
        assert read[0] == read[1]

    async def test_put_items_replace_what_is_stored_of_them(
        self, store: Store, bulk: BulkAccess
    ) -> None:
        """Documents, embeddings and what imports replaced are those that were put last."""
        await bulk.add_item_names(["a", "b"])
        (a, b) = await stored_items(store)
        first = replace(a, was_put=True, document=b'{"title":"A"}', embedding=vector(1).tobytes())
        await bulk.put_items([first, replace(b, was_put=True, document=b"{}", place=(9, 1))])
        assert await store.get_items(["a", "b"]) == [
            Item("a", "A", embedding=vector(1)),
            Item("b"),
        ]
        await bulk.put_items([replace(first, document=None, embedding=None)])
        assert await store.get_items(["a", "b"]) == [None, Item("b")]
        assert (await store.catalogue_changes(0)).deleted == ["a"]
        assert (await store.counts())["items"] == 1

    async def test_discarded_names_are_deleted_unless_events_use_them(
        self, store: Store, bulk: BulkAccess
    ) -> None:
        """The next clean-up deletes them."""
        await bulk.add_item_names(["used", "unused", "kept"])
        await bulk.put_users([user("a", "1", item="used")], "a")
        await bulk.discard_item_names(["used", "unused"])
        assert sorted(await bulk.noted_item_names()) == ["unused", "used"]
        assert await store.clean_up()
        assert await bulk.noted_item_names() == []
        assert [name for _, name in await bulk.item_names(0, 9)] == ["used", "kept"]

    async def test_registers_are_put_as_they_are(
        self, store: Store, bulk: BulkAccess, source: Store, another: Connect
    ) -> None:
        """Keys, scenarios, imports and entries keep their times, and what can change is changed."""
        ours = await read_all(source)
        versions = [version for each in ours["scenarios"] for version in each]
        registers = Registers(ours["imports"], versions, ours["keys"], ours["forgotten"])
        await bulk.put_registers(registers)
        await bulk.put_registers(registers)
        theirs = await read_all(another())
        for part in ("imports", "scenarios", "keys", "forgotten"):
            assert ours[part] == theirs[part], part
        before = await store.keys_version()
        revoked = [replace(ours["keys"][0], revoked=NOON)]
        undone = [ours["imports"][0]._replace(is_undone=True)]
        await bulk.put_registers(Registers(undone, [], revoked, []))
        assert (await store.keys())[0].revoked == NOON
        assert await store.keys_version() > before
        assert (await store.imports())[0].is_undone
        assert await store.begin_import("next") == len(ours["imports"]) + 1
        # Users who are forgotten now are so by the salt of the copied entries.
        await store.append([Event("late", "i")])
        await store.forget("late")
        (entry,) = await store.find_forgotten("late")
        assert entry.salt == ours["forgotten"][0].salt

    async def test_an_import_is_undone_as_at_the_source(
        self, store: Store, bulk: BulkAccess, source: Store
    ) -> None:
        """The target knows events that imports share, and those that they have replaced."""
        await bulk.put_registers(Registers(await source.imports(), [], [], []))
        await bulk.add_item_names([name for _, name in await source.bulk().item_names(0, 1_000)])
        await bulk.put_items(await stored_items(source))
        await bulk.put_users(await stored_users(source), "z")
        for number in (1, 2):
            expected = await source.undo_import(number)
            assert expected.shared or number == 2
            assert await store.undo_import(number) == expected
            assert await stored_users(store) == await stored_users(source)
            assert [each.document for each in await stored_items(store)] == [
                each.document for each in await stored_items(source)
            ]

    async def test_the_position_is_recorded(
        self, store: Store, bulk: BulkAccess, another: Connect
    ) -> None:
        """Every process reads the position of the last write, until the copy is finished."""
        other = another()
        assert await other.bulk().copy_record() == CopyRecord("there", "", True, False)
        for position in ("b", IDS[-1]):
            await bulk.put_users([user("a", "1")], position)
            assert await other.bulk().copy_record() == CopyRecord("there", position, True, False)
        await bulk.put_registers(NONE)
        await bulk.add_item_names(["i"])
        record = await other.bulk().copy_record()
        assert record == CopyRecord("there", IDS[-1], True, False)
        await bulk.finish_copy()
        assert await other.bulk().copy_record() == CopyRecord("there", "", True, False)
        await bulk.mark_copy(is_whole=True)
        assert await other.bulk().copy_record() == CopyRecord("there", "", True, True)

    async def test_no_copy_was_begun(self, store: Store) -> None:
        """A store that is no target of a copy is not written to."""
        bulk = store.bulk()
        assert await bulk.copy_record() is None
        for write in (
            bulk.put_users([user("a", "1")], "a"),
            bulk.put_registers(NONE),
            bulk.add_item_names(["i"]),
            bulk.discard_item_names(["i"]),
            bulk.put_items([]),
            bulk.finish_copy(),
            bulk.mark_copy(is_whole=True),
        ):
            with pytest.raises(Conflict):
                await write
        assert await store.clock() == 0

    @pytest.mark.parametrize("change", ["event", "profile", "item", "key", "forget", "merge"])
    async def test_whoever_else_writes_ends_the_copy(
        self, store: Store, bulk: BulkAccess, another: Connect, change: str
    ) -> None:
        """The record says so, and no write of the copy changes anything any more."""
        await bulk.put_users([user("a", "1"), user("b", "2")], "b")
        other = another()
        key, _ = issue_key("k", frozenset({"read"}), NOON)
        changes: dict[str, Callable[[], Awaitable[object]]] = {
            "event": lambda: other.append([Event("c", "i")]),
            "profile": lambda: other.put_user(User("a")),
            "item": lambda: other.put_items([Item("i")]),
            "key": lambda: other.add_key(key),
            "forget": lambda: other.forget("b"),
            "merge": lambda: other.merge("a", "b"),
        }
        await changes[change]()
        for each in (store, other):
            record = await each.bulk().copy_record()
            assert record is not None
            assert not record.is_untouched
        before = await read_all(store)
        for write in (
            bulk.put_users([user("d", "4")], "d"),
            bulk.add_item_names(["j"]),
            bulk.finish_copy(),
            bulk.mark_copy(is_whole=True),
        ):
            with pytest.raises(Conflict, match="changed by something else"):
                await write
        assert await read_all(store) == before

    async def test_two_copies_do_not_meet(
        self, store: Store, bulk: BulkAccess, another: Connect
    ) -> None:
        """If two processes copy to one store, the one with the older record is refused."""
        other = another().bulk()
        assert await other.copy_record() == CopyRecord("there", "", True, False)
        await other.put_users([user("a", "1")], "a")
        with pytest.raises(Conflict, match="changed by something else"):
            await bulk.put_users([user("b", "2")], "b")
        await other.put_users([user("c", "3")], "c")
        assert [each.user_id for each in await stored_users(store)] == ["a", "c"]
