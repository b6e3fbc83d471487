"""A database as of one moment: all readers see it, whatever is written meanwhile."""

from __future__ import annotations

import pytest

from service.domain.errors import HeedError, StoreReadOnly
from service.domain.records import Event, Item
from service.stores.postgres.frozen_database import frozen_database
from service.stores.postgres.store import PostgresStore
from tests.support import full_store
from tests.support.full_store import read_all, stored_items, stored_users
from tests.support.postgres_server import PostgresDatabases


async def test_readers_see_one_moment(postgres: PostgresDatabases) -> None:
    """Everything that a store reads, over many connections, is of the moment it was frozen at."""
    url = postgres.create_database()
    store = PostgresStore(url)
    await full_store.fill(store)
    store.shared.files("model").put("first", b"it", [("a", b"1")])

    async def everything(each: PostgresStore) -> object:
        names = [one.name for one in each.shared.files("model").sets()]
        return await read_all(each), await stored_users(each), await stored_items(each), names

    before = await everything(store)
    with frozen_database(url) as database:
        await full_store.change(store)
        store.shared.files("model").put("second", b"it", [("a", b"2")])
        frozen = PostgresStore(database, create=False)
        assert await everything(frozen) == before
        assert list(frozen.shared.files("model").read("first")) == [("a", b"1")]
        await store.append([Event("u", "i")])
        assert await everything(frozen) == before
        for write in (
            lambda: frozen.append([Event("u", "new item")]),
            lambda: frozen.put_items([Item("item 1", "other")]),
            lambda: frozen.forget("user 0001"),
        ):
            with pytest.raises(HeedError) as refused:
                await write()
            assert isinstance(refused.value, StoreReadOnly)
        await frozen.close()
        await database.close()  # of this event loop
    assert await everything(store) != before
    await store.close()
