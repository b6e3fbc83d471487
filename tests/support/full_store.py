"""A store with everything in it that a store can hold, and readings of two stores to compare."""

from __future__ import annotations

import random
from typing import Any

from service.domain.keys import Rate, issue_key
from service.domain.records import Event, Item, ItemPatch, User
from service.stores.base import Store
from service.stores.values import StoredItem, StoredUser
from tests.support.store_contract import IDS, NOON, rows, vector

TYPES = ("view", "buy", "dislike", "ätsch")


async def fill(store: Store, users: int = 40) -> None:
    """Fill an empty store: odd ids, ties, gaps, vectors, merged and forgotten users, imports.

    There are at least 12 users, with some 12 events each.
    """
    rng = random.Random(17)
    await _fill_registers(store)
    await _fill_catalogue(store)
    names = [f"user {n:04}" for n in range(users)]
    events = [
        Event(
            rng.choice(names[: 1 + rng.randrange(users)]),
            f"item {rng.randrange(30)}",
            f"{n:032x}" if n % 3 else f"00000000-0000-4000-8000-{n:012x}",
            rng.choice(TYPES),
            rng.choice([1.0, 0.1, 2.5]),
            NOON + rng.randrange(20),  # so that many are at one time
            vector(n, 0.5) if n % 7 == 0 else None,
            vector(-n) if n % 11 == 0 else None,
        )
        for n in range(12 * users)
    ]
    first, second, undone = [await store.begin_import(f"{n}.csv") for n in range(3)]
    third = len(events) // 3
    await store.append(events[:third], import_id=first)
    await store.append(events[third:])
    # The second import contains events of the first and of none, and the third one of both.
    await store.append(events[third // 2 : third + 9], import_id=second)
    await store.append(
        [Event("user 0001", "item 2", f"own-{n}") for n in range(5)], import_id=second
    )
    await store.append(events[:20], import_id=undone)
    await store.append([Event("undone", "item 3", "e-undone")], import_id=undone)
    for n, name in enumerate(names):
        if n % 3 == 0:
            await store.put_user(User(name, {"n": n, "π": [1, None, 2.5]}, ("cat", f"item {n}")))
        if n % 6 == 0:
            await store.put_user(User(name, {"imported": n}), import_id=first)
        if n % 12 == 0:
            await store.put_user(User(name, {"imported": "again"}), import_id=second)
    await store.put_user(User("profile alone", {"shy": True}))
    await store.put_items([Item("item 1", "first import"), Item("new 1")], import_id=first)
    await store.put_items([Item("item 1", "second import"), Item("new 2")], import_id=second)
    await store.delete_item("new 2")
    await store.append([Event(name, name, name, name) for name in IDS])
    await store.append([Event(name, "unnamed") for name in names[:5]])  # the store names these
    await store.undo_import(undone)
    for event in events[5:60:5]:
        assert event.event_id is not None
        await store.delete_event(event.user_id, event.event_id)
    await store.merge(names[2], names[3])
    await store.merge(names[4], "nobody")
    await store.merge("made by a merge", names[7])
    await store.append([Event("forgotten", "item of the forgotten", "e-gone")])
    for name in ("forgotten", names[9], names[10]):
        await store.forget(name)
    await store.append([Event(names[9], "item 5", "e-back", timestamp=NOON)])


async def change(store: Store) -> None:
    """Change a filled store in each way that there is."""
    await store.append([Event("user 0000", "item 1", "late-1"), Event("late user", "i", "late-2")])
    page, _ = await store.page("user 0001", limit=2)
    for event in page:
        assert event.event_id is not None
        await store.delete_event("user 0001", event.event_id)
    await store.merge("user 0000", "user 0002")
    await store.merge("zz", "user 0006")
    await store.forget("user 0005")
    await store.put_user(User("user 0008", {"late": 1}))
    await store.put_items([Item("late item", "x"), Item("item 4", "late")])
    await store.delete_item("item 6")
    await store.put_scenario("home", {"question": "popular", "limit": 9})
    await store.delete_scenario("back")
    for key in await store.keys():
        await store.revoke_key(key.key_id)
    number = await store.begin_import("late.csv")
    await store.append([Event("user 0008", "item 1", "late-3")], import_id=number)
    await store.undo_import(2)


async def _fill_registers(store: Store) -> None:
    for n in range(3):
        key, _ = issue_key(
            f"key{n}",
            frozenset({"read", "write"}) if n else frozenset({"admin"}),
            NOON + n,
            namespace="shop" if n else "default",
            expires=NOON + 10**9 if n == 1 else None,
            rate=Rate(5, 60) if n == 2 else None,
        )
        await store.add_key(key)
        if n == 1:
            await store.revoke_key(key.key_id)
    await store.put_scenario("shelf", {"question": "popular"})
    await store.put_scenario("home", {"question": "recommend", "limit": 0.1})
    await store.put_scenario("home", {"question": "recommend", "ü": ["\u2028", None]})
    await store.put_scenario("gone", {"question": "popular", "fallback": "shelf"})
    await store.delete_scenario("gone")
    await store.put_scenario("back", {"question": "popular"})
    await store.delete_scenario("back")
    await store.put_scenario("back", {"question": "popular", "fallback": "shelf"})


async def _fill_catalogue(store: Store) -> None:
    await store.append([Event("user 0000", "named first", "e-first", timestamp=NOON)])
    items = [
        Item(
            f"item {n}",
            f"Title {n}",
            "text" * n,
            ("tag",) * (n % 3),
            ("cat",),
            {"price": n / 7, "deep": {"a": [None, "\u2028"]}},
            vector(0, n, 1 / (n + 1)) if n % 2 else None,
            n % 5 == 0,
            NOON + n if n % 4 == 0 else None,
        )
        for n in range(20)
    ]
    await store.put_items(items[10:])
    await store.put_items(items[:10])
    await store.patch_items([ItemPatch("item 12", {"title": "patched"})])
    await store.append([Event("user 0000", "item 7", "e-seven", timestamp=NOON)])
    for name in ("item 7", "item 15"):
        await store.delete_item(name)
    await store.put_items([Item(name, name) for name in IDS])


async def stored_users(store: Store, events: int = 50) -> list[StoredUser]:
    bulk, found = store.bulk(), list[StoredUser]()
    while page := await bulk.users(found[-1].user_id if found else "", events):
        found += page
    return found


async def stored_items(store: Store, limit: int = 7) -> list[StoredItem]:
    bulk, found = store.bulk(), list[StoredItem]()
    while page := await bulk.items(found[-1].item_id if found else "", limit):
        found += page
    return found


async def read_all(store: Store) -> dict[str, Any]:
    """Everything that users of a store can read, but versions and names of its own."""
    changes = await store.catalogue_changes(0)
    user_ids = list(store.scan_user_ids())
    histories = [await store.history(user_id) for user_id in user_ids]
    scenarios = [
        (await store.page_scenario_versions(scenario.name))[0]
        for deleted in (False, True)
        for scenario in (await store.page_scenarios(deleted=deleted))[0]
    ]
    ids, votes = await store.popularity()
    return {
        "users": user_ids,
        "histories": [(each.user_id, rows(each), each.user) for each in histories],
        "events": sorted(store.scan_events(), key=lambda event: str(event.event_id)),
        "items": list(store.scan_items()),
        "catalogue": (changes.upserted, changes.deleted),
        "popularity": list(zip(ids, votes.tolist(), strict=True)),
        "profiles": list(store.scan_users()),
        "scenarios": scenarios,
        "imports": await store.imports(),
        "import counts": await store.import_counts(),
        "keys": await store.keys(),
        "forgotten": (await store.page_forgotten(limit=1_000))[0],
        "counts": await store.counts(),
    }
