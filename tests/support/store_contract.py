"""The contract of every store, as tests to inherit.

`connect` is a fixture: a function each call of which gives another client of one fresh database,
as another process would have it. `limited` gives one with a quota.
"""

import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from service.domain.errors import Conflict, Invalid, NotFound, QuotaExceeded, Unavailable
from service.domain.keys import Rate, Scope, issue_key
from service.domain.records import MAX_ATTRIBUTES, Event, Item, ItemPatch, User, Vector
from service.stores.base import Store
from service.stores.quota import StoreQuota
from service.stores.values import History, LogColumns, Shard
from tests.support.store_model import Notebook

Connect = Callable[[], Store]
Limited = Callable[[StoreQuota], Store]

NOON = 1_700_000_000_000_000  # some microsecond
IDS = [
    "a",
    " ",
    "\x01\x7f",
    "Zürich",
    "Zu\u0308rich",  # looks like the one above, is another
    "\u202eabc\u202c",  # reads backwards
    "\u200f\u2067שלום\u2069",
    "𝔘𓀀🏳️\u200d🌈",
    "\U0010ffff",
    "\ufeffbom",
    "../../etc/passwd",
    "'; DROP TABLE users; --",
    "%00\\u0000{}",
    "line\nbreak\ttab",
    "x" * 256,
    "𓀀" * 64,  # 256 bytes
]
REFUSED = ["", "x" * 257, "ü" * 129, "nul\0inside", "\0", "\ud800", "a\udfffb", 7, None, b"bytes"]


def vector(*numbers: float) -> Vector:
    return np.array(numbers, np.float32)


async def events_of(store: Store, user_id: str) -> list[Event]:
    """The whole history, oldest first, read page by page."""
    found: list[Event] = []
    cursor = None
    while True:
        events, cursor = await store.page(user_id, cursor=cursor, limit=7)
        found += events
        if cursor is None:
            return found[::-1]


async def later_than(store: Store, user_id: str, seq: int) -> History:
    """The events after `seq`, as a reader of the history up to there gets them."""
    generation = (await store.history(user_id)).generation
    later = await store.changed_history(user_id, version=0, generation=generation, seq=seq)
    assert later is not None
    return later


def rows(history: History) -> list[tuple[Any, ...]]:
    """A history as rows: seq, timestamp, weight, item, type, key, value."""
    found = []
    for i in range(len(history)):
        key, value = history.vectors.get(i, (None, None))
        found.append(
            (
                int(history.seqs[i]),
                int(history.timestamps[i]),
                float(history.weights[i]),
                history.item_ids[i],
                history.types[i],
                None if key is None else key.tolist(),
                None if value is None else value.tolist(),
            )
        )
    return found


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.01)


def _is_announced(store: Store, version: int) -> bool:
    return store.announced_catalogue() == version


def _histories(scan: Iterable[LogColumns]) -> dict[str, list[tuple[str, str, int, float]]]:
    """The histories in the slices of a scan, by user; each must come in one piece."""
    found: dict[str, list[tuple[str, str, int, float]]] = {}
    newest = None
    for slice_ in scan:
        for row in range(len(slice_)):
            user = slice_.user_ids[slice_.users[row]]
            assert user == newest or user not in found
            newest = user
            found.setdefault(user, []).append(
                (
                    slice_.item_ids[slice_.items[row]],
                    slice_.type_names[slice_.types[row]],
                    int(slice_.timestamps[row]),
                    float(slice_.weights[row]),
                )
            )
    return found


class _Contract:
    @pytest.fixture
    def connect(self) -> Connect:
        raise NotImplementedError

    @pytest.fixture
    def limited(self) -> Limited:
        raise NotImplementedError

    @pytest.fixture
    async def another(self, connect: Connect) -> AsyncIterator[Connect]:
        opened: list[Store] = []

        def another() -> Store:
            opened.append(connect())
            return opened[-1]

        yield another
        for store in opened:
            await store.close()

    @pytest.fixture
    async def store(self, another: Connect) -> Store:
        return another()


class LogFollower:
    """Keeps the log of a store by its changes."""

    def __init__(self, store: Store, limit: int | None) -> None:
        self.store, self.limit = store, limit
        self.version = 0
        self.rows: dict[int, dict[int, tuple[Any, ...]]] = {}  # by user's number and seq

    def known(self) -> NDArray[np.int64]:
        """The last seq of each user."""
        known = np.zeros(max(self.rows, default=0) + 1, np.int64)
        for number, rows_ in self.rows.items():
            known[number] = max(rows_, default=0)
        return known

    async def follow(self) -> None:
        """Read all that happened."""
        while self.version < await self.store.clock():
            changes = await self.store.log_changes(self.version, self.known(), self.limit)
            assert changes.version > self.version
            self.version = changes.version
            for number in changes.rewritten.tolist():
                del self.rows[number]
            events = changes.events
            for at, seq in enumerate(changes.seqs.tolist()):
                row = (
                    events.item_ids[events.items[at]],
                    events.type_names[events.types[at]],
                    int(events.timestamps[at]),
                    float(events.weights[at]),
                )
                own = self.rows.setdefault(int(events.users[at]), {})
                assert seq not in own
                own[seq] = row

    async def log(self) -> list[tuple[Any, ...]]:
        """The events of all users, sorted."""
        numbers = [number for number, own in self.rows.items() if own]
        names = await self.store.user_ids(numbers)
        return sorted(
            (name, *row)
            for name, number in zip(names, numbers, strict=True)
            for row in self.rows[number].values()
        )


class AppendContract(_Contract):
    """Appending events: round trips, validation, duplicates, conflicts and concurrency."""

    async def test_an_event_comes_back_with_every_field(self, store: Store) -> None:
        """The history and the page say what was sent, vectors bit for bit."""
        key, value = vector(1.5, -2.25, 1e-38), vector(0.1)
        event = Event("u", "i", "e", "buy", 2.5, NOON, key, value)
        assert await store.append([event]) == (1, 0)
        assert await store.page("u") == ([event], None)
        history = await store.history("u")
        assert rows(history) == [(1, NOON, 2.5, "i", "buy", key.tolist(), value.tolist())]
        assert history.vectors[0].key is not None
        assert history.vectors[0].key.dtype == np.float32
        types = [a.dtype.name for a in (history.seqs, history.timestamps, history.weights)]
        assert types == ["uint32", "int64", "float32"]
        assert history.user is None

    async def test_defaults_of_an_event(self, store: Store) -> None:
        """An event without type, weight, id and time gets the defaults."""
        before = time.time_ns() // 1000
        await store.append([Event("u", "i"), Event("u", "i")])
        after = time.time_ns() // 1000
        first, second = await events_of(store, "u")
        assert (first.type, first.weight, first.key, first.value) == ("view", 1.0, None, None)
        assert first.timestamp is not None
        assert before <= first.timestamp <= after
        assert first.event_id is not None
        assert second.event_id is not None
        assert first.event_id < second.event_id
        assert await store.append([first, second]) == (0, 2)

    @pytest.mark.parametrize("name", IDS)
    async def test_ids_come_back_byte_for_byte(self, store: Store, name: str) -> None:
        """Any valid string names a user, an item, an event or a type, and no other."""
        await store.append([Event(other, other, other, other) for other in IDS])
        history = await store.history(name)
        assert (history.user_id, history.item_ids, history.types) == (name, [name], [name])
        (event,) = await events_of(store, name)
        assert (event.user_id, event.item_id, event.event_id, event.type) == (name,) * 4
        await store.put_user(User(name, {"name": name}, (name,)))
        assert await store.get_user(name) == User(name, {"name": name}, (name,))
        item = Item(name, name, name, (name,), (name,), {name: name})
        await store.put_items([Item("other"), item])
        assert await store.get_items([name]) == [item]

    @pytest.mark.parametrize("name", REFUSED, ids=ascii)
    async def test_what_is_no_id_is_refused(self, store: Store, name: Any) -> None:
        """An invalid id is refused with its pointer, and nothing is stored."""
        good = Event("u", "i", "e")
        bad = {
            "/events/1/user_id": Event(name, "i"),
            "/events/1/item_id": Event("u", name),
            "/events/1/event_id": Event("u", "i", name if name is not None else ""),
            "/events/1/type": Event("u", "i", type=name),
        }
        for pointer, event in bad.items():
            with pytest.raises(Invalid) as caught:
                await store.append([good, event])
            assert caught.value.pointer == pointer
        for ask in (store.version, store.history, store.page, store.get_user, store.forget):
            with pytest.raises(Invalid) as caught:
                await ask(name)
            assert caught.value.pointer == "/user_id"
        for call in (
            store.put_user(User(name)),
            store.put_items([Item(name)]),
            store.get_items([name]),
            store.delete_item(name),
            store.delete_event(name, "e"),
            store.delete_event("u", name),
            store.merge(name, "u"),
            store.merge("u", name),
            store.event_ids(name, [1], [1]),
        ):
            with pytest.raises(Invalid):
                await call
        assert await store.counts() == {"users": 0, "items": 0, "events": 0}

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("weight", float("nan")),
            ("weight", float("inf")),
            ("weight", 1e39),
            ("weight", 0.0),
            ("weight", -1.0),
            ("weight", 1e-39),
            ("weight", True),
            ("weight", "1"),
            ("timestamp", 10**18),
            ("timestamp", -(10**17)),
            ("timestamp", 1.0),
            ("key", vector(float("nan"))),
            ("key", vector()),
            ("value", np.ones((2, 2), np.float32)),
            ("value", np.ones(2)),
            ("value", [1.0]),
        ],
    )
    async def test_bad_numbers_are_refused(self, store: Store, field: str, value: Any) -> None:
        """A number outside its range is refused with its pointer, and nothing is stored."""
        fields: dict[str, Any] = {field: value}
        with pytest.raises(Invalid) as caught:
            await store.append([Event("u", "i", **fields)])
        assert caught.value.pointer == f"/events/0/{field}"
        assert await store.version("u") == 0

    @pytest.mark.parametrize("timestamp", [0, -1, -62_135_596_800_000_000, 253_402_300_799_999_999])
    async def test_timestamps_of_years_1_to_9999_are_valid(
        self, store: Store, timestamp: int
    ) -> None:
        await store.append([Event("u", "i", timestamp=timestamp)])
        assert (await store.history("u")).timestamps.tolist() == [timestamp]

    async def test_a_repeated_event_is_a_duplicate(self, store: Store) -> None:
        """Same id and body, sent again or twice in a batch, with or without its time: one event."""
        event = Event("u", "i", "e", timestamp=NOON, key=vector(1, 2))
        retry = Event("u", "i", "e", key=vector(1, 2))
        assert await store.append([event, retry, event]) == (1, 2)
        version = await store.version("u")
        assert await store.append([retry, event]) == (0, 2)
        assert await events_of(store, "u") == [event]
        assert await store.version("u") == version

    async def test_a_retry_without_time_matches_the_stamp(self, store: Store) -> None:
        """An event that was stamped on arrival may be retried, without a time or with that one."""
        assert await store.append([Event("u", "i", "e")]) == (1, 0)
        assert await store.append([Event("u", "i", "e")]) == (0, 1)
        (stamped,) = await events_of(store, "u")
        assert await store.append([stamped]) == (0, 1)
        with pytest.raises(Conflict):
            await store.append([Event("u", "i", "e", timestamp=NOON)])

    @pytest.mark.parametrize(
        "changed",
        [
            {"user_id": "v"},
            {"item_id": "j"},
            {"type": "buy"},
            {"weight": 2.0},
            {"timestamp": NOON + 1},
            {"key": None},
            {"key": vector(1, 3)},
            {"key": None, "value": vector(1, 2)},
            {"value": vector(1)},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("together", [False, True])
    async def test_another_body_is_a_conflict(
        self, store: Store, changed: dict[str, Any], together: bool
    ) -> None:
        """The same id with another body is refused by name, and nothing of its batch is stored."""
        fields: dict[str, Any] = {
            "user_id": "u",
            "item_id": "i",
            "event_id": "e-7",
            "timestamp": NOON,
            "key": vector(1, 2),
        }
        first, other = Event(**fields), Event(**(fields | changed))
        await store.append([Event("w", "i")] if together else [first, Event("w", "i")])
        before = await store.counts(), [await store.version(user) for user in "uvw"]
        batch = [Event("new", "new"), *([first] if together else []), other, Event("w", "i")]
        with pytest.raises(Conflict, match="e-7"):
            await store.append(batch)
        assert before == (await store.counts(), [await store.version(user) for user in "uvw"])
        assert await store.version("new") == 0
        # The names that the refused batch brought must work afterwards.
        await store.append([Event("new", "new")])
        assert (await store.history("new")).item_ids == ["new"]

    async def test_empty_batches_store_nothing(self, store: Store) -> None:
        assert await store.append([]) == (0, 0)
        assert await store.put_items([]) == 0

    async def test_catalogue_change_is_announced_before_it_is_readable(self, store: Store) -> None:
        """`on_change` gets the previous and the new version, and no call without a change."""
        told: list[tuple[int, int]] = []

        def on_change(previous: int, version: int) -> None:
            told.append((previous, version))

        await store.put_items([Item("a"), Item("b")], on_change=on_change)
        first = await store.catalogue_version()
        await store.put_items([Item("a")], on_change=on_change)
        await store.delete_item("b", on_change=on_change)
        await store.delete_item("b", on_change=on_change)
        assert told == [(0, first), (first, await store.catalogue_version())]

    async def test_arrival_order_does_not_matter(self, store: Store) -> None:
        """Events sent in any order, in batches of any size, give the history of the sorted log."""
        rng = random.Random(7)
        log = [Event("u", f"i{n}", f"e{n}", timestamp=NOON + n) for n in range(200)]
        for user in ("u", "v"):
            sent = [
                Event(user, e.item_id, user + str(e.event_id), timestamp=e.timestamp) for e in log
            ]
            rng.shuffle(sent)
            while sent:
                size = rng.randint(1, 40)
                await store.append(sent[:size])
                sent = sent[size:]
            history = await store.history(user)
            assert history.item_ids == [event.item_id for event in log]
            assert history.timestamps.tolist() == [event.timestamp for event in log]

    async def test_ties_stay_in_the_order_of_arrival(self, store: Store) -> None:
        """If timestamps are equal, the first to arrive is the older."""
        await store.append([Event("u", f"i{n}", timestamp=NOON) for n in range(5)])
        await store.append([Event("u", "late", timestamp=NOON), Event("u", "0", timestamp=0)])
        history = await store.history("u")
        assert history.item_ids == ["0", "i0", "i1", "i2", "i3", "i4", "late"]
        assert history.seqs.tolist() == [7, 1, 2, 3, 4, 5, 6]

    async def test_the_clock_ticks_with_every_change(self, store: Store) -> None:
        ticks = [await store.clock()]
        event = Event("u", "i", "1")
        for change in (
            store.append([event]),
            store.put_items([Item("i", title="A title")]),
            store.put_user(User("u", interests=("i",))),
            store.append([Event("v", "j", "2")]),
            store.merge("u", "v"),
            store.delete_event("u", "1"),
            store.delete_item("i"),
            store.forget("u"),
        ):
            await change
            ticks.append(await store.clock())
        assert ticks == sorted(set(ticks))
        assert ticks[0] == 0
        await store.append([Event("w", "k", "3")])
        last = await store.clock()
        await store.append([Event("w", "k", "3")])
        await store.history("w")
        await store.popularity()
        assert await store.clock() == last

    async def test_popularity_is_what_the_log_holds(self, store: Store) -> None:
        """Popularity counts stored events once each, without negative ones, after every change."""

        async def popular() -> dict[str, int]:
            ids, counts = await store.popularity()
            assert counts.dtype == np.int64
            return dict(zip(ids, counts.tolist(), strict=True))

        assert await popular() == {}
        batch = [Event("u", "i", "1"), Event("u", "i", "2"), Event("v", "i"), Event("v", "j")]
        await store.append(batch)
        await store.append([*batch[:2], Event("w", "k")])
        assert await popular() == {"i": 3, "j": 1, "k": 1}
        await store.delete_event("u", "1")
        await store.merge("u", "w")
        await store.forget("v")
        assert await popular() == {"i": 1, "k": 1}
        await store.append([Event("x", "i", "3", "dislike"), Event("x", "l", "4", "return")])
        assert await popular() == {"i": 1, "k": 1, "l": 0}  # events all the same, but no votes

    @pytest.mark.parametrize("seed", range(3))
    async def test_popularity_is_a_count_of_the_log_after_any_changes(
        self, store: Store, seed: int
    ) -> None:
        """Popularity equals a count over the whole log after random changes of every kind."""
        rng = random.Random(seed)
        users, items = [f"u{n}" for n in range(6)], [f"i{n}" for n in range(5)]
        imports: list[int] = []

        async def append() -> None:
            import_id = rng.choice([None, *imports])
            events = [
                Event(rng.choice(users), rng.choice(items), f"e{rng.randrange(400)}-{n}",
                      rng.choice(["view", "dislike", "return"]), timestamp=NOON)
                for n in range(rng.randrange(1, 9))
            ]  # fmt: skip
            with suppress(Conflict):
                await store.append(events, import_id=import_id)

        async def delete() -> None:
            if events := await events_of(store, user := rng.choice(users)):
                await store.delete_event(user, str(rng.choice(events).event_id))

        async def undo() -> None:
            if imports:
                await store.undo_import(imports.pop(rng.randrange(len(imports))))

        for _ in range(60):
            change = rng.choice(["append"] * 4 + ["delete", "forget", "merge", "import", "undo"])
            if change == "append":
                await append()
            elif change == "delete":
                await delete()
            elif change == "forget":
                await store.forget(rng.choice(users))
            elif change == "merge":
                await store.merge(*rng.sample(users, 2))
            elif change == "import":
                imports.append(await store.begin_import("a file"))
            else:
                await undo()
            counted: Counter[str] = Counter()
            for event in store.scan_events():
                counted[event.item_id] += event.type == "view"
            ids, counts = await store.popularity()
            assert dict(zip(ids, counts.tolist(), strict=True)) == counted

    async def test_many_writers_on_one_user_all_count(self, store: Store, another: Connect) -> None:
        """64 writers, half of them in another process's place: each event is there exactly once."""
        clients = [store, another()]

        async def write(writer: int) -> None:
            for n in range(20):
                events = [Event("u", f"i{writer}", f"{writer}-{n}-{k}") for k in range(3)]
                assert await clients[writer % 2].append(events) == (3, 0)

        await asyncio.gather(*(write(writer) for writer in range(64)))
        history = await store.history("u")
        assert sorted(history.seqs.tolist()) == list(range(1, 64 * 20 * 3 + 1))
        ids = [event.event_id for event in await events_of(store, "u")]
        assert len(set(ids)) == len(ids) == 64 * 20 * 3

    async def test_racing_retries_are_stored_once(self, store: Store, another: Connect) -> None:
        """The same batch sent 16 times at once, by two clients, is stored by one of them."""
        clients = [store, another()]
        batch = [Event("u", "i", f"e{n}", timestamp=NOON) for n in range(50)]
        answers = await asyncio.gather(*(clients[n % 2].append(batch) for n in range(16)))
        assert sorted(answers) == [(0, 50)] * 15 + [(50, 0)]
        assert len(await store.history("u")) == 50

    async def test_a_cancelled_append_is_all_or_nothing(self, store: Store) -> None:
        tasks = [
            asyncio.create_task(store.append([Event(f"u{n}", "i") for _ in range(5)]))
            for n in range(40)
        ]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [answer for answer in done if not isinstance(answer, BaseException)] == [(5, 0)] * 20
        await store.append([Event("last", "i")])  # whatever was to be written has been by now
        for n in range(40):
            assert len(await store.history(f"u{n}")) in ({5} if n % 2 else {0, 5})


class HistoryContract(_Contract):
    """Histories: versions, paging, deletion, merging and profiles."""

    async def test_an_unknown_user_is_empty(self, store: Store) -> None:
        history = await store.history("u")
        assert (history.version, history.generation, len(history), history.user) == (0, 0, 0, None)
        assert (history.seqs.shape, history.timestamps.shape) == ((0,), (0,))
        assert await store.version("u") == 0
        assert await store.page("u") == ([], None)
        assert await store.get_user("u") is None
        assert await store.event_ids("u", [1, 2], [1, 2]) == [None, None]
        assert await store.forget("u") == 0
        assert not await store.delete_event("u", "e")
        assert await store.merge("v", "u") == 0
        assert await store.counts() == {"users": 0, "items": 0, "events": 0}

    async def test_versions_only_grow(self, store: Store) -> None:
        """Each change of a user gives a greater version, no change gives none, forgetting 0."""
        seen = [0]

        async def grown() -> bool:
            seen.append(await store.version("u"))
            return seen[-1] > max(seen[:-1])

        await store.append([Event("u", "i", "e1"), Event("u", "i", "e2")])
        assert await grown()
        await store.append([Event("u", "i", "late", timestamp=0)])
        assert await grown()
        await store.put_user(User("u", {"a": 1}))
        assert await grown()
        await store.delete_event("u", "e1")
        assert await grown()
        await store.append([Event("x", "i")])
        await store.merge("u", "x")
        assert await grown()
        await store.append([Event("u", "i", "e2")])
        await store.delete_event("u", "e1")
        assert not await grown()
        for _ in range(3):
            await store.forget("u")
            assert await store.version("u") == 0
            await store.append([Event("u", "i")])
            assert await grown()

    async def test_generations_change_with_all_but_appends(self, store: Store) -> None:
        async def generation() -> int:
            return (await store.history("u")).generation

        await store.append([Event("u", "i", "e1")])
        first = await generation()
        assert first > 0
        await store.append([Event("u", "i", "e2"), Event("u", "i", timestamp=0)])
        await store.put_user(User("u"))
        assert await generation() == first
        await store.delete_event("u", "e1")
        second = await generation()
        await store.append([Event("x", "i")])
        await store.merge("u", "x")
        third = await generation()
        await store.forget("u")
        await store.append([Event("u", "i")])
        assert len({first, second, third, await generation()}) == 4

    async def test_reading_on_from_a_seq(self, store: Store) -> None:
        """Events after a seq, late ones included, complete those read before."""
        rng = random.Random(3)
        known: list[tuple[Any, ...]] = []
        last = 0
        for _ in range(30):
            await store.append(
                [
                    Event("u", f"i{rng.randrange(9)}", timestamp=NOON + rng.randrange(50))
                    for _ in range(rng.randint(1, 4))
                ]
            )
            await store.append([Event("u", "v", timestamp=NOON, key=vector(last))])
            news = await later_than(store, "u", last)
            assert min(news.seqs) == last + 1
            known = sorted(known + rows(news), key=lambda row: (row[1], row[0]))
            last = max(row[0] for row in known)
            assert known == rows(await store.history("u"))
        assert len(await later_than(store, "u", last)) == 0
        assert (await later_than(store, "u", last)).version == await store.version("u")
        assert rows(await later_than(store, "u", 0)) == known
        assert len(await later_than(store, "u", last + 100)) == 0

    async def test_changed_histories_complete_what_a_reader_has(
        self, store: Store, another: Connect
    ) -> None:
        """A reader of changes has the history at each version, and is sent nothing twice."""
        rng = random.Random(8)
        other = another()
        version = generation = last = 0
        known: list[tuple[Any, ...]] = []
        for step in range(60):
            kind = rng.choice(["append"] * 5 + ["delete", "merge", "profile", "forget", "nothing"])
            writer = rng.choice([store, other])
            if kind == "append":
                times = [rng.randrange(9) for _ in range(rng.randint(1, 3))]
                await writer.append(
                    [Event("u", f"i{step}", timestamp=time, key=vector(time)) for time in times]
                )
            elif kind == "delete" and (events := await events_of(store, "u")):
                await writer.delete_event("u", str(rng.choice(events).event_id))
            elif kind == "merge":
                await writer.append([Event("v", "i", timestamp=rng.randrange(9))])
                await writer.merge("u", "v")
            elif kind == "profile":
                await writer.put_user(User("u", {"step": step}))
            elif kind == "forget":
                await writer.forget("u")
            whole = await store.history("u")
            changed = await other.changed_history(
                "u", version=version, generation=generation, seq=last
            )
            if changed is None:
                assert whole.version == version
                continue
            assert whole.version != version
            if changed.generation != generation:
                known = []
            assert not {row[0] for row in known} & {row[0] for row in rows(changed)}
            known = sorted(known + rows(changed), key=lambda row: (row[1], row[0]))
            assert (known, changed.user) == (rows(whole), whole.user)
            version, generation = changed.version, changed.generation
            last = max((row[0] for row in known), default=0)
        assert await store.changed_history("w", version=0, generation=0, seq=0) is None

    async def test_news_come_in_order_with_their_vectors(self, store: Store) -> None:
        """Events after a seq are still oldest first, each with its own vectors."""
        times = [5, 1, 4, 2, 3]
        await store.append([Event("u", str(t), timestamp=t, key=vector(t)) for t in times])
        news = await later_than(store, "u", 2)
        assert news.item_ids == ["2", "3", "4"]
        keys = {i: v.key.tolist() for i, v in news.vectors.items() if v.key is not None}
        assert keys == {0: [2.0], 1: [3.0], 2: [4.0]}

    async def test_pages_go_back_in_time(self, store: Store) -> None:
        """Pages are newest first, and what arrives or goes meanwhile neither repeats nor hides."""
        await store.append(
            [Event("u", str(n), f"e{n}", timestamp=NOON + n // 3) for n in range(10)]
        )
        first, cursor = await store.page("u", limit=4)
        assert [event.item_id for event in first] == ["9", "8", "7", "6"]
        await store.append([Event("u", "new", timestamp=NOON + 99), Event("u", "old", timestamp=0)])
        await store.delete_event("u", "e6")
        await store.delete_event("u", "e4")
        second, cursor = await store.page("u", cursor=cursor, limit=4)
        assert [event.item_id for event in second] == ["5", "3", "2", "1"]
        third, cursor = await store.page("u", cursor=cursor, limit=2)
        assert [event.item_id for event in third] == ["0", "old"]
        assert cursor is None

    @pytest.mark.parametrize(
        "cursor", ["", "x", "!!!", "bnVsbA", "WzFd", "WzEsMl0x", "WyJhIiwxXQ", "\ud800", "W10" * 99]
    )
    async def test_foreign_cursors_are_refused(self, store: Store, cursor: str) -> None:
        for call in (store.page("u", cursor=cursor), store.page_items(cursor=cursor)):
            with pytest.raises(Invalid) as caught:
                await call
            assert caught.value.pointer == "/cursor"
        for ask in (
            store.page("u", limit=0),
            store.page_items(limit=-1),
            store.page_users(limit=0),
        ):
            with pytest.raises(Invalid):
                await ask

    async def test_seqs_lead_to_event_ids(self, store: Store) -> None:
        """`event_ids` maps seqs to ids in any order, and deleted ones to None."""
        await store.append([Event("u", "i", f"e{n}", timestamp=NOON - n) for n in range(9)])
        await store.append([Event("v", "i", "other", timestamp=NOON)])
        await store.delete_event("u", "e4")
        history = await store.history("u")
        names = {seq: f"e{seq - 1}" for seq in history.seqs.tolist()}
        for order in (slice(None), slice(None, None, -1), slice(2, 5), slice(0)):
            seqs, times = history.seqs[order].tolist(), history.timestamps[order].tolist()
            assert await store.event_ids("u", seqs, times) == [names[seq] for seq in seqs]
        assert await store.event_ids("u", [5], [NOON - 4]) == [None]

    async def test_an_event_is_deleted_by_its_owner_only(self, store: Store) -> None:
        """Deleting names user and event; it takes the vectors along and frees the id."""
        event = Event("u", "i", "e", timestamp=NOON, key=vector(1))
        await store.append([event, Event("u", "j", "f", timestamp=NOON), Event("v", "i", "g")])
        assert not await store.delete_event("v", "e")
        assert not await store.delete_event("u", "g")
        assert await store.delete_event("u", "e")
        assert not await store.delete_event("u", "e")
        assert rows(await store.history("u")) == [(2, NOON, 1.0, "j", "view", None, None)]
        assert await store.append([Event("u", "other", "e", timestamp=NOON + 1)]) == (1, 0)
        assert (await store.history("u")).vectors == {}

    async def test_deleted_users_are_absent(self, store: Store, another: Connect) -> None:
        """Events, vectors, profile and ids go at once, for every client; others keep theirs."""
        other = another()
        await store.append([Event("u", "i", f"e{n}", key=vector(n)) for n in range(5)])
        await store.append([Event("v", "i", "kept")])
        await store.put_user(User("u", {"a": 1}, ("jazz",)))
        assert len(await other.history("u")) == 5
        assert await store.forget("u") == 5
        for client in (store, other):
            assert await client.version("u") == 0
            assert len(await client.history("u")) == 0
            assert await client.get_user("u") is None
            assert await client.page("u") == ([], None)
            assert (await client.history("v")).item_ids == ["i"]
        assert await store.counts() == {"users": 1, "items": 0, "events": 1}
        assert await store.append([Event("u", "other", "e0")]) == (1, 0)
        history = await store.history("u")
        assert (history.item_ids, history.vectors, history.user) == (["other"], {}, None)

    async def test_merging_moves_everything(self, store: Store) -> None:
        """Events with ids, times and vectors; interests united; the target's attributes win."""
        await store.append([Event("u", "a", "a", timestamp=1), Event("u", "b", "b", timestamp=3)])
        await store.append(
            [
                Event("anon", "y", "y", timestamp=3, key=vector(3)),
                Event("anon", "x", "x", timestamp=2),
                Event("anon", "gone", "gone", timestamp=2),
                Event("anon", "z", "z", timestamp=3),
            ]
        )
        await store.delete_event("anon", "gone")
        await store.put_user(User("u", {"a": 1, "b": 1}, ("jazz", "rock")))
        await store.put_user(User("anon", {"b": 2, "c": 2}, ("rock", "folk")))
        assert await store.merge("u", "anon") == 3
        history = await store.history("u")
        assert history.item_ids == ["a", "x", "b", "y", "z"]
        assert history.user == User("u", {"b": 1, "c": 2, "a": 1}, ("jazz", "rock", "folk"))
        assert {i: v.key.tolist() for i, v in history.vectors.items() if v.key is not None} == {
            3: [3.0]
        }
        seqs, times = history.seqs.tolist(), history.timestamps.tolist()
        assert await store.event_ids("u", seqs, times) == ["a", "x", "b", "y", "z"]
        assert await store.version("anon") == 0
        assert await store.get_user("anon") is None
        assert await store.counts() == {"users": 1, "items": 0, "events": 5}
        # A retry of what was sent before signing in is still a duplicate.
        assert await store.append([Event("anon", "x", "x", timestamp=2)]) == (0, 1)
        await store.append([Event("u", "last", timestamp=9)])
        assert (await later_than(store, "u", int(max(history.seqs)))).item_ids == ["last"]

    async def test_merging_with_nothing(self, store: Store) -> None:
        """Merging an unknown source changes nothing, and self-merging is refused."""
        await store.append([Event("u", "i")])
        version = await store.version("u")
        assert await store.merge("u", "nobody") == 0
        assert await store.merge("ghost", "nobody") == 0
        assert await store.version("u") == version
        assert await store.version("ghost") == 0
        assert await store.merge("new", "u") == 1
        assert (await store.history("new")).item_ids == ["i"]
        assert await store.get_user("new") == User("new")
        with pytest.raises(Invalid):
            await store.merge("new", "new")

    async def test_profiles(self, store: Store) -> None:
        """A profile replaces the previous one and is part of the history."""
        await store.put_user(User("p", {"n": None, "list": [1, 2.5, {"deep": "ü"}]}, ("b", "a")))
        assert await store.get_user("p") == User(
            "p", {"n": None, "list": [1, 2.5, {"deep": "ü"}]}, ("b", "a")
        )
        assert (await store.history("p")).user == await store.get_user("p")
        await store.put_user(User("p"))
        assert (await store.history("p")).user == User("p")
        await store.append([Event("e", "i")])
        assert await store.get_user("e") == User("e")
        assert (await store.history("e")).user is None
        assert await store.counts() == {"users": 2, "items": 0, "events": 1}

    @pytest.mark.parametrize(
        ("attributes", "pointer"),
        [
            ({"a": float("nan")}, "/attributes/a"),
            ({"a": {"b/c": [0, float("inf")]}}, "/attributes/a/b~1c/1"),
            ({"a": "\ud800"}, "/attributes/a"),
            ({"\udfff": 1}, "/attributes"),
            ({7: 1}, "/attributes"),
            ({"a": 2**63}, "/attributes/a"),
            ({"a": b"x"}, "/attributes/a"),
            ({"a": {1, 2}}, "/attributes/a"),
            ([], "/attributes"),
        ],
        ids=ascii,
    )
    async def test_attributes_must_be_json(
        self, store: Store, attributes: Any, pointer: str
    ) -> None:
        """Attributes that JSON cannot represent exactly are refused with their pointer."""
        with pytest.raises(Invalid) as caught:
            await store.put_user(User("u", attributes))
        assert caught.value.pointer == pointer
        with pytest.raises(Invalid) as caught:
            await store.put_items([Item("a"), Item("b", attributes=attributes)])
        assert caught.value.pointer == f"/items/1{pointer}"
        assert await store.counts() == {"users": 0, "items": 0, "events": 0}

    @pytest.mark.parametrize("seed", range(3))
    async def test_any_sequence_of_changes_agrees_with_the_notebook(
        self, store: Store, another: Connect, seed: int
    ) -> None:
        """300 random changes through two clients give what lists and dicts give."""
        rng = random.Random(seed)
        clients, book, users = [store, another()], Notebook(), ["a", "b", "c", "d"]
        versions = dict.fromkeys(users, 0)
        highest = 0
        for step in range(300):
            client, user, other = rng.choice(clients), *rng.sample(users, 2)
            match rng.choices(["append", "delete", "forget", "merge", "profile"], [9, 4, 1, 1, 1])[
                0
            ]:
                case "append":
                    batch = [
                        Event(
                            user_id=rng.choice([user, user, other]),
                            item_id=f"i{rng.randrange(20)}",
                            event_id=f"e{rng.randrange(3 * step + 3)}",
                            timestamp=NOON + rng.randrange(30),
                            key=vector(step) if rng.random() < 0.1 else None,
                        )
                        for _ in range(rng.randint(1, 6))
                    ]
                    if rng.random() < 0.2 and book.bodies:
                        batch = [*rng.choices(list(book.bodies.values()), k=2), *batch[:1]]
                    try:
                        expected: object = book.append(batch)
                    except Conflict:
                        with pytest.raises(Conflict):
                            await client.append(batch)
                    else:
                        assert await client.append(batch) == expected
                case "delete":
                    known = [str(e.event_id) for e in book.history(user)] or ["none"]
                    name = rng.choice(known)
                    deleted = await client.delete_event(user, name)
                    assert deleted == book.delete_event(user, name)
                case "forget":
                    assert await client.forget(user) == book.forget(user)
                case "merge":
                    assert await client.merge(user, other) == book.merge(user, other)
                case "profile":
                    book.profiles[user] = User(user, {"step": step}, (str(step), other))
                    await client.put_user(book.profiles[user])
            for name in users:
                version = await rng.choice(clients).version(name)
                if version != versions[name]:
                    assert version == 0 or version > highest or version > versions[name]
                    versions[name] = version
            highest = max(highest, *versions.values())
            checked = rng.choice(users)
            assert await events_of(rng.choice(clients), checked) == book.history(checked)
        for name in users:
            history = await store.history(name)
            assert history.item_ids == [event.item_id for event in book.history(name)]
            assert history.user == book.profiles.get(name)
        assert (await store.counts())["events"] == len(book.bodies)
        everything = [event for name in users for event in book.history(name)]
        scanned = list(store.scan_events())
        assert sorted(scanned, key=lambda e: e.user_id) == everything


class CatalogueContract(_Contract):
    """Items: round trips, replacement, paging and the feed of changes."""

    async def test_an_item_comes_back_with_every_field(self, store: Store) -> None:
        """Items are got as they were put, the bare one and the full one."""
        full = Item(
            "full",
            "Title",
            "Text\nof two lines",
            ("t1", "t2"),
            ("c",),
            {"year": 1999, "ok": True, "deep": {"list": [1, None, "ü", 2.5]}},
            vector(0.1, -0.2, 3e38),
            True,
            NOON,
        )
        assert await store.put_items([Item("bare"), full]) == 2
        assert await store.get_items(["full", "none", "bare", "full"]) == [
            full,
            None,
            Item("bare"),
            full,
        ]
        assert await store.get_items([]) == []
        assert await store.counts() == {"users": 0, "items": 2, "events": 0}

    async def test_putting_replaces(self, store: Store) -> None:
        """A second put replaces the whole item; within one put the last wins."""
        await store.put_items([Item("a", "old", tags=("x",), embedding=vector(1))])
        assert await store.put_items([Item("a", "older"), Item("b"), Item("a", "new")]) == 2
        assert await store.get_items(["a"]) == [Item("a", "new")]
        assert (await store.counts())["items"] == 2

    @pytest.mark.parametrize(
        ("item", "pointer"),
        [
            (Item("a", title="\ud800"), "/title"),
            (Item("a", description="\udc00"), "/description"),
            (Item("a", tags=("", "b")), "/tags/0"),
            (Item("a", categories=("b", "c\0")), "/categories/1"),
            (Item("a", embedding=vector(float("inf"))), "/embedding"),
            (Item("a", published_at=10**18), "/published_at"),
        ],
        ids=ascii,
    )
    async def test_batch_with_an_invalid_item_stores_nothing(
        self, store: Store, item: Item, pointer: str
    ) -> None:
        """One bad field refuses the call, and nothing of it is stored."""
        with pytest.raises(Invalid) as caught:
            await store.put_items([Item("good"), item])
        assert caught.value.pointer == f"/items/1{pointer}"
        assert await store.get_items(["good"]) == [None]
        assert await store.catalogue_version() == 0

    async def test_changes_can_be_followed(self, store: Store, another: Connect) -> None:
        """Applying the changes since the last look gives the catalogue, whoever made them."""
        rng = random.Random(5)
        clients, book, mirror = [store, another()], Notebook(), dict[str, Item]()
        seen = await store.catalogue_version()
        assert seen == 0
        for step in range(120):
            client, name = rng.choice(clients), f"i{rng.randrange(12)}"
            if rng.random() < 0.3:
                assert await client.delete_item(name) == (book.items.pop(name, None) is not None)
            else:
                items = [Item(f"i{rng.randrange(12)}", str(rng.randrange(3))) for _ in range(3)]
                book.items |= {item.item_id: item for item in items}
                await client.put_items(items)
            await client.append([Event("u", name)])  # no change of the catalogue
            if rng.random() < 0.5:
                continue
            reader = rng.choice(clients)
            version, upserted, deleted = await reader.catalogue_changes(seen)
            assert version == await reader.catalogue_version()
            assert version >= seen
            assert not {item.item_id for item in upserted} & set(deleted)
            mirror |= {item.item_id: item for item in upserted}
            for name in deleted:
                mirror.pop(name, None)
            seen = version
            assert mirror == book.items, step
            assert (await reader.counts())["items"] == len(book.items)
        _, upserted, _ = await store.catalogue_changes(0)
        assert {item.item_id: item for item in upserted} == book.items

    @pytest.mark.parametrize("limit", [1, 3, 100])
    async def test_changes_come_in_parts(self, store: Store, limit: int) -> None:
        """Limited parts of the changes end at version boundaries and add up to all changes."""
        for batch in range(5):
            await store.put_items([Item(f"i{batch}.{at}") for at in range(batch + 1)])
        await store.delete_item("i0.0")
        whole = await store.catalogue_changes(0)
        seen, there, gone, parts = 0, [], [], 0
        while seen < whole.version:
            seen, upserted, deleted = await store.catalogue_changes(seen, limit)
            assert len({item.item_id[:2] for item in upserted}) <= max(1, limit)
            there += upserted
            gone += deleted
            parts += 1
        assert (there, gone) == (whole.upserted, whole.deleted)
        assert parts == {1: 5, 3: 4, 100: 1}[limit]
        assert await store.catalogue_changes(seen, limit) == (seen, [], [])

    async def test_catalogue_changes_are_announced(self, store: Store, another: Connect) -> None:
        """A client's own change is announced to it at once, and before long to the others."""
        reader = another()
        assert (store.announced_catalogue(), reader.announced_catalogue()) == (0, 0)
        for n in range(3):
            await store.put_items([Item(f"i{n}")])
            version = await store.catalogue_version()
            assert store.announced_catalogue() == version
            await _until(partial(_is_announced, reader, version))
        await store.append([Event("u", "i0")])
        assert store.announced_catalogue() == version

    async def test_the_digest_of_the_catalogue_changes_with_every_item(self, store: Store) -> None:
        """Any change of an item gives another digest; events, and writes of the same, give none."""
        vector = np.ones(3, np.float32)
        seen = [await store.catalogue_digest()]
        for item in (Item("a"), Item("b"), Item("a", title="x"), Item("a", embedding=vector)):
            await store.put_items([item])
            seen.append(await store.catalogue_digest())
            assert seen[-1].version == await store.catalogue_version()
        await store.delete_item("b")
        seen.append(await store.catalogue_digest())
        assert len({digest for _, digest in seen}) == 6
        await store.append([Event("u", "a"), Event("u", "c")])
        await store.put_items([Item("a", embedding=vector)])
        assert await store.catalogue_digest() == seen[-1]

    async def test_patches_change_what_they_name(self, store: Store) -> None:
        """Patches of one call follow one another; without `create` an unknown item stops all."""
        old = Item("a", "t", tags=("x",), attributes={"n": 1, "o": {"p": 1}}, embedding=vector(1))
        await store.put_items([old])
        patches = [
            ItemPatch("a", {"attributes": {"n": None, "o": {"q": 2}}}),
            ItemPatch("b", {"title": "new"}),
            ItemPatch("a", {"title": None, "hidden": True}),
        ]
        with pytest.raises(NotFound, match="no item 'b'"):
            await store.patch_items(patches, create=False)
        assert await store.get_items(["a", "b"]) == [old, None]
        assert await store.patch_items(patches) == (2, ("b",))
        assert await store.patch_items(patches[1:2]) == (1, ())
        changed = replace(old, title="", hidden=True, attributes={"o": {"p": 1, "q": 2}})
        assert await store.get_items(["a", "b"]) == [changed, Item("b", "new")]
        with pytest.raises(Invalid) as refused:
            await store.patch_items([ItemPatch("a", {}), ItemPatch("b", {"tags": ("",)})])
        assert refused.value.pointer == "/items/1/tags/0"

    async def test_merged_attributes_are_bounded(self, store: Store) -> None:
        """Patches with few names cannot make an item with too many: that one is refused."""
        half = {str(n): n for n in range(MAX_ATTRIBUTES)}
        await store.put_items([Item("a", attributes=half)])
        more = [ItemPatch("b", {"title": "B"}), ItemPatch("a", {"attributes": {"more": 1}})]
        with pytest.raises(Invalid, match=r"'a', once changed: has more than 1,000 names"):
            await store.patch_items(more)
        assert await store.get_items(["a", "b"]) == [Item("a", attributes=half), None]
        await store.patch_items([ItemPatch("a", {"attributes": {"0": None, "more": 1}})])

    async def test_integers_of_64_bits_are_exact(self, store: Store) -> None:
        """They and floats of their size come back as they were, in items and in profiles."""
        numbers = [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 1e300, 2.0**63, 0.1, True]
        attributes = {"a": numbers, **{str(n): {"n": number} for n, number in enumerate(numbers)}}
        await store.put_items([Item("a", attributes=attributes)])
        await store.put_user(User("u", attributes))
        (item,) = await store.get_items(["a"])
        assert item is not None
        user = await store.get_user("u")
        assert user is not None
        for found in (item.attributes, user.attributes):
            assert repr(found) == repr(attributes)

    async def test_a_patch_meets_no_other_write(self, store: Store, connect: Connect) -> None:
        """Patches of several clients at once are all there in the end."""
        await store.put_items([Item("a")])
        clients = [store, connect()]
        await asyncio.gather(
            *(
                clients[n % 2].patch_items([ItemPatch("a", {"attributes": {str(n): n}})])
                for n in range(40)
            )
        )
        await clients[1].close()
        (item,) = await store.get_items(["a"])
        assert item is not None
        assert item.attributes == {str(n): n for n in range(40)}

    async def test_no_change_is_no_version(self, store: Store) -> None:
        """Writes that change no item keep the catalogue version."""
        await store.put_items([Item("a", "t", embedding=vector(1)), Item("b")])
        await store.delete_item("b")
        version = await store.catalogue_version()
        assert await store.put_items([Item("a", "t", embedding=vector(1))]) == 1
        assert not await store.delete_item("b")
        assert not await store.delete_item("never")
        await store.append([Event("u", "seen only here")])
        assert await store.catalogue_version() == version
        assert await store.catalogue_changes(version) == (version, [], [])
        await store.put_items([Item("a", "t", embedding=vector(2))])
        assert await store.catalogue_version() > version

    async def test_a_deleted_item_stays_in_histories(self, store: Store) -> None:
        """Events may be on items before they are stored and after they are deleted."""
        await store.append([Event("u", "i")])
        assert await store.get_items(["i"]) == [None]
        await store.put_items([Item("i", "t")])
        assert await store.delete_item("i")
        assert await store.get_items(["i"]) == [None]
        assert await store.page_items() == ([], None)
        await store.append([Event("u", "i")])
        assert (await store.history("u")).item_ids == ["i", "i"]
        await store.put_items([Item("i", "back")])
        assert await store.get_items(["i"]) == [Item("i", "back")]

    async def test_pages_of_items_are_in_byte_order(self, store: Store) -> None:
        """Items come by the bytes of their ids; what is added or deleted meanwhile does no harm."""
        names = sorted(IDS, key=str.encode)
        await store.put_items([Item(name) for name in IDS])
        await store.append([Event("u", "not in the catalogue")])
        found: list[str] = []
        cursor = None
        while True:
            items, cursor = await store.page_items(cursor=cursor, limit=3)
            found += [item.item_id for item in items]
            if cursor is None:
                break
            await store.put_items([Item("\x01first")])
            await store.delete_item(found[-1])
        assert found == names

    async def test_hidden_items_are_listed_alone(self, store: Store) -> None:
        """Pages of hidden items hold only these; an attribute of that name hides nothing."""
        hidden = [Item(f"hidden-{n}", 'a "hidden":true', hidden=True) for n in range(5)]
        shown = [Item(f"i{n}", '{"hidden":true}', attributes={"hidden": True}) for n in range(9)]
        await store.put_items([*shown, *hidden])
        found, cursor = await store.page_items(limit=3, hidden=True)
        assert cursor is not None
        rest, end = await store.page_items(cursor=cursor, limit=3, hidden=True)
        assert (found + rest, end) == (hidden, None)

    async def test_pages_of_users_are_in_byte_order(self, store: Store) -> None:
        """Everybody with events or a profile, with that; who comes meanwhile does no harm."""
        names = sorted(IDS, key=str.encode)
        await store.append([Event(name, "i") for name in IDS[::2]])
        profiles = [User(name, {"n": at}, ("i",)) for at, name in enumerate(IDS[1::2])]
        for user in profiles:
            await store.put_user(user)
        assert await store.page_users(limit=len(IDS)) == (
            [next((u for u in profiles if u.user_id == name), User(name)) for name in names],
            None,
        )
        found: list[str] = []
        cursor = None
        while True:
            users, cursor = await store.page_users(cursor=cursor, limit=3)
            found += [user.user_id for user in users]
            if cursor is None:
                break
            await store.put_user(User("\x01first"))
            await store.forget(found[-1])
        assert found == names

    async def test_users_are_found_by_the_beginning_of_their_ids(self, store: Store) -> None:
        """Every id that begins with a prefix is found, page by page, and no other one."""
        ids = ["Ab", "a", "a\x01", "ab", "ab%", "ab-1", "ab-2", "ab_", "abé", "ab\U0010ffff", "b"]
        await store.append([Event(name, "i") for name in ids for _ in range(len(name))])
        await store.put_user(User("ab-0"))
        everybody = sorted([*ids, "ab-0"], key=str.encode)
        for prefix in ("", "a", "ab", "ab-", "ab%", "ab_", "A", "ab\U0010ffff", "b", "c"):
            found: list[str] = []
            cursor = None
            while True:
                users, cursor = await store.page_users(cursor=cursor, limit=2, prefix=prefix)
                found += [user.user_id for user in users]
                if cursor is None:
                    break
            assert found == [name for name in everybody if name.startswith(prefix)]
        counts = await store.event_counts([*ids, "ab-0", "nobody"])
        assert counts == [*map(len, ids), 0, 0]
        assert await store.event_counts([]) == []
        _, elsewhere = await store.page_users(limit=1)
        users, _ = await store.page_users(cursor=elsewhere, limit=1, prefix="ab-")
        assert [user.user_id for user in users] == ["ab-0"]


class ScenarioContract(_Contract):
    """Saved questions."""

    async def test_every_version_of_a_scenario_is_kept(
        self, store: Store, another: Connect
    ) -> None:
        """The last version is in use, at once and for every client; the others are listed."""
        reader = another()
        bodies: list[dict[str, Any]] = [
            {"question": "recommend", "limit": n, "filter": {"all": []}} for n in (5, 9, 5)
        ]
        for number, body in enumerate(bodies, 1):
            stored = await store.put_scenario("home", body)
            assert (stored.name, stored.version, stored.body) == ("home", number, body)
            assert await reader.scenario("home") == stored
            assert await reader.put_scenario("home", body) == stored  # nothing changed
        assert (stored.question, stored.fallback, stored.fields["limit"]) == ("recommend", None, 5)
        listed, cursor = await reader.page_scenario_versions("home")
        assert [each.body for each in listed] == bodies[::-1]
        assert [each.version for each in listed] == [3, 2, 1]
        assert cursor is None
        assert [each.written for each in listed] == sorted(
            (each.written for each in listed), reverse=True
        )

    async def test_a_deleted_scenario_keeps_its_versions(
        self, store: Store, another: Connect
    ) -> None:
        """A deletion is a version; what is stored after it goes on counting."""
        await store.put_scenario("home", {"question": "search"})
        assert await store.delete_scenario("home")
        assert not await store.delete_scenario("home")
        assert not await store.delete_scenario("never")
        reader = another()
        assert await reader.scenario("home") is None
        assert await reader.page_scenarios() == ([], None)
        stored = await store.put_scenario("home", {"question": "search"})
        assert stored.version == 3
        listed, _ = await reader.page_scenario_versions("home")
        body = {"question": "search"}
        assert [each.body for each in listed] == [body, None, body]
        assert await reader.page_scenario_versions("never") == ([], None)

    async def test_scenarios_are_paged_by_name(self, store: Store) -> None:
        """Pages of scenarios and of versions are disjoint, in order and complete."""
        for n in range(7):
            await store.put_scenario(f"s{n}", {"question": "popular", "limit": 1})
            await store.put_scenario("s0", {"question": "popular", "limit": 100 + n})
        names, numbers = list[str](), list[int]()
        cursor = None
        while True:
            page, cursor = await store.page_scenarios(cursor=cursor, limit=3)
            names += [each.name for each in page]
            if cursor is None:
                break
        while True:
            page, cursor = await store.page_scenario_versions("s0", cursor=cursor, limit=3)
            numbers += [each.version for each in page]
            if cursor is None:
                break
        assert names == [f"s{n}" for n in range(7)]
        assert numbers == list(range(8, 0, -1))
        with pytest.raises(Invalid):
            await store.page_scenarios(cursor="no cursor")

    async def test_deleted_scenarios_are_listed_apart(self, store: Store) -> None:
        """By name, each with the version that says so; one that came back is in use."""
        for name in ("c", "a", "b", "used"):
            await store.put_scenario(name, {"question": "popular"})
        for name in ("a", "b", "c"):
            await store.delete_scenario(name)
        await store.put_scenario("b", {"question": "popular"})
        page, cursor = await store.page_scenarios(deleted=True, limit=1)
        assert [(each.name, each.version, each.body) for each in page] == [("a", 2, None)]
        page, cursor = await store.page_scenarios(deleted=True, limit=1, cursor=cursor)
        assert [(each.name, each.version, each.body) for each in page] == [("c", 2, None)]
        assert cursor is None
        assert [each.name for each in (await store.page_scenarios())[0]] == ["b", "used"]

    async def test_fallbacks_exist_and_lead_nowhere_back(
        self, store: Store, another: Connect
    ) -> None:
        """A fallback is stored before, is no circle, and is not deleted under its user."""
        await store.put_scenario("a", {"question": "popular"})
        await store.put_scenario("b", {"question": "popular", "fallback": "a"})
        await store.put_scenario("c", {"question": "popular", "fallback": "b"})
        for name, fallback in (("a", "c"), ("a", "a"), ("new", "new"), ("d", "missing")):
            with pytest.raises(Invalid) as raised:
                await another().put_scenario(name, {"question": "popular", "fallback": fallback})
            assert raised.value.pointer == "/fallback"
        with pytest.raises(Conflict):
            await store.delete_scenario("a")
        await store.put_scenario("b", {"question": "popular"})
        assert await store.delete_scenario("a")
        assert await store.delete_scenario("c")
        assert await store.delete_scenario("b")


class WholeContract(_Contract):
    """Scans, several clients and closing."""

    async def test_a_scan_is_every_history(self, store: Store) -> None:
        """A scan in slices of any size has the complete history of every user."""
        rng = random.Random(11)
        users = [f"u{n}" for n in range(17)]
        await store.append(
            [
                Event(
                    rng.choice(users),
                    f"i{rng.randrange(40)}",
                    type=rng.choice(["view", "buy"]),
                    weight=rng.uniform(0.1, 9),
                    timestamp=NOON + rng.randrange(1000),
                )
                for _ in range(500)
            ]
        )
        await store.forget("u3")
        expected = {user: await store.history(user) for user in users}
        for size in (1, 7, 10_000):
            found: dict[str, list[tuple[Any, ...]]] = {user: [] for user in users}
            order: list[str] = []
            for slice_ in store.scan(size):
                assert len(slice_) <= size
                assert slice_.users.dtype == slice_.items.dtype == slice_.types.dtype == np.int32
                for u, i, t, when, weight in zip(
                    slice_.users,
                    slice_.items,
                    slice_.types,
                    slice_.timestamps.tolist(),
                    slice_.weights.tolist(),
                    strict=True,
                ):
                    order.append(slice_.user_ids[u])
                    row = (slice_.item_ids[i], slice_.type_names[t], when, weight)
                    found[order[-1]].append(row)
            assert sum(a != b for a, b in pairwise(order)) == 15  # each user in one piece
            for user, history in expected.items():
                assert found[user] == list(
                    zip(
                        history.item_ids,
                        history.types,
                        history.timestamps.tolist(),
                        history.weights.tolist(),
                        strict=True,
                    )
                )

    async def test_scans_by_shard_divide_the_log_by_users(self, store: Store) -> None:
        """Each shard's scan has the whole histories of its own users, in the order of `scan`."""
        rng = random.Random(1)
        users = [*IDS, *(f"u{n}" for n in range(30))]
        await store.append(
            [
                Event(rng.choice(users), f"i{rng.randrange(9)}", timestamp=NOON + rng.randrange(50))
                for _ in range(700)
            ]
        )
        await store.put_user(User("without events"))
        await store.forget("u3")
        whole = _histories(store.scan(11))
        for count in (1, 2, 3, 64):
            parts = [_histories(store.scan(7, shard=Shard(n, count))) for n in range(count)]
            assert sum(map(len, parts)) == len(whole)  # no user is in two shards
            for number, part in enumerate(parts):
                for user, history in part.items():
                    hashed = hashlib.blake2b(user.encode(), digest_size=8).digest()
                    assert int.from_bytes(hashed, "big") % 2**63 % count == number
                    assert history == whole[user]
        with pytest.raises(ValueError, match="no shard 2 of 2"):
            Shard(2, 2)

    @pytest.mark.parametrize("seed", range(4))
    async def test_followers_of_the_log_have_all_of_it(
        self, store: Store, another: Connect, seed: int
    ) -> None:
        """Whatever happens between two readings, what a follower has is the log of the store."""
        rng = random.Random(seed)
        writer, users = another(), [f"u{n}" for n in range(6)]
        followers = [LogFollower(store, limit=None), LogFollower(store, limit=3)]
        for step in range(60):
            event = Event(rng.choice(users), f"i{rng.randrange(9)}", timestamp=NOON - step)
            if (kind := rng.randrange(8)) == 0:
                await writer.forget(rng.choice(users))
            elif kind == 1:
                await writer.merge(*rng.sample(users, 2))
            elif kind == 2:
                await writer.put_user(User(rng.choice(users), {"n": step}))
            elif kind == 3:
                import_id = await writer.begin_import("night")
                await writer.append([event, replace(event, type="buy")], import_id=import_id)
                await writer.append([replace(event, weight=2.0)])
                await followers[0].follow()
                await writer.undo_import(import_id)
            elif kind == 4 and (stored := await events_of(store, event.user_id)):
                assert await writer.delete_event(event.user_id, str(stored[0].event_id))
            else:
                await writer.append([event] * rng.randrange(1, 4))
            if rng.random() < 0.5:
                follower = rng.choice(followers)
                await follower.follow()
                assert await follower.log() == sorted(
                    (e.user_id, e.item_id, e.type, e.timestamp, e.weight)
                    for e in store.scan_events()
                )

    async def test_a_followed_user_is_read_from_the_last_seq_on(self, store: Store) -> None:
        """After appends, only the new events are read; an unknown number has no user."""
        await store.append([Event("u", "i"), Event("v", "i")])
        follower = LogFollower(store, limit=None)
        await follower.follow()
        await store.append([Event("u", "j", timestamp=NOON)])
        changes = await store.log_changes(follower.version, follower.known())
        assert (changes.events.item_ids, changes.seqs.tolist()) == (["j"], [2])
        assert not len(changes.rewritten)
        assert await store.user_ids([*changes.events.users.tolist(), 99]) == ["u", None]

    async def test_scans_of_an_empty_store(self, store: Store) -> None:
        assert list(store.scan()) == []
        assert list(store.scan_events()) == []
        assert list(store.scan_items()) == []
        assert list(store.scan_users()) == []
        assert list(store.scan_user_ids()) == []

    async def test_scan_user_ids_lists_every_user(self, store: Store) -> None:
        await store.append([Event(name, "i", f"of {name}") for name in ("b", "é", "a", "gone")])
        await store.put_user(User("Z"))
        await store.append([Event("merged", "i")])
        await store.merge("a", "merged")
        await store.delete_event("b", "of b")
        await store.forget("gone")
        assert list(store.scan_user_ids()) == ["Z", "a", "b", "é"]
        assert (await store.counts())["users"] == 4

    async def test_scanned_events_are_duplicates_when_appended(
        self, store: Store, another: Connect
    ) -> None:
        events = [Event(f"u{n % 3}", "i", weight=n + 1, key=vector(n)) for n in range(30)]
        await store.append(events)
        items, users = [Item("b", "t"), Item("a", tags=("x",))], [User("u1", {"a": 1}), User("u9")]
        await store.put_items(items)
        await store.delete_item("none")
        for user in users:
            await store.put_user(user)
        assert list(store.scan_items()) == items[::-1]
        assert list(store.scan_users()) == users
        assert await another().append(list(store.scan_events())) == (0, 30)

    async def test_a_scan_sees_one_state(self, store: Store) -> None:
        """A scan has nothing that is written while it goes on."""
        await store.append([Event(f"u{n}", "i", f"e{n}") for n in range(100)])
        scan, records = store.scan(10), store.scan_events()
        first = next(scan)
        next(records)
        await store.forget("u50")
        await store.append([Event(f"u{n}", "j") for n in range(200)])
        assert len(first) + sum(len(slice_) for slice_ in scan) == 100
        assert {event.item_id for event in records} == {"i"}
        abandoned = store.scan(10)
        next(abandoned)
        del abandoned
        assert sum(len(slice_) for slice_ in store.scan()) == 299

    async def test_forgotten_users_are_in_the_ledger(self, store: Store, another: Connect) -> None:
        """Each forgotten user has an entry without the id, which only the id finds."""
        before = time.time_ns() // 1000
        for n in range(5):
            await store.append([Event(f"u{n}", "i") for _ in range(n + 1)])
            assert await store.forget(f"u{n}") == n + 1
        await store.forget("unknown")
        entries, cursor = [], None
        while True:
            page, cursor = await store.page_forgotten(cursor=cursor, limit=2)
            assert len(page) <= 2
            entries += page
            if cursor is None:
                break
        assert [entry.events for entry in entries] == [1, 2, 3, 4, 5]
        assert await store.count_forgotten(before) == 5
        assert await store.count_forgotten(entries[-1].forgotten + 1) == 0
        reader = another()
        for n, entry in enumerate(entries):
            assert await reader.find_forgotten(f"u{n}") == [entry]
            assert hashlib.sha256(entry.salt + f"u{n}".encode()).digest() == entry.digest
        assert await reader.find_forgotten("unknown") == []
        await store.clean_up()
        assert not await store.clean_up()

    async def test_clients_see_each_other_at_once(self, store: Store, another: Connect) -> None:
        """A client reads what another was told is done, whatever both remember."""
        clients = [store, another(), another()]
        for n in range(30):
            writer, reader = clients[n % 3], clients[(n + 1) % 3]
            # Each client meets names that it, another or nobody has met before.
            await writer.append([Event("u", f"i{n // 2}", type=f"t{n // 3}", timestamp=NOON + n)])
            history = await reader.history("u")
            assert history.item_ids == [f"i{k // 2}" for k in range(n + 1)]
            assert history.types == [f"t{k // 3}" for k in range(n + 1)]
            assert history.version == await writer.version("u")
            await reader.put_items([Item(f"i{n}", str(n))])
            assert await writer.get_items([f"i{n}"]) == [Item(f"i{n}", str(n))]

    async def test_sizes_and_commits_are_measured(self, connect: Connect) -> None:
        """Measures count the commits, and nothing is queued or failed once they are done."""
        store = connect()
        before = store.measures()
        for n in range(3):
            await store.append([Event("u", f"i{n}")])
        after = store.measures()
        assert after.commits == before.commits + 3
        assert after.database_bytes + after.log_bytes > 0
        assert (after.queued_rows, after.failures, after.failed) == (0, 0, False)

    async def test_a_closed_store_says_so(self, connect: Connect) -> None:
        """Closing completes accepted writes, and later calls raise Unavailable."""
        store = connect()
        pending = [asyncio.ensure_future(store.append([Event("u", str(n))])) for n in range(20)]
        await asyncio.sleep(0)
        assert await store.problem() is None
        await store.close()
        await store.close()
        assert await asyncio.gather(*pending) == [(1, 0)] * 20
        assert await store.problem() is not None
        for call in (
            store.append([Event("u", "i")]),
            store.history("u"),
            store.version("u"),
            store.put_items([Item("a")]),
            store.catalogue_changes(0),
            store.counts(),
        ):
            with pytest.raises(Unavailable):
                await call
        with pytest.raises(Unavailable):
            next(iter(store.scan()))
        reopened = connect()
        assert len(await reopened.history("u")) == 20
        await reopened.close()


class KeyContract(_Contract):
    """API keys."""

    async def test_keys_are_stored_as_they_were_issued(
        self, store: Store, another: Connect
    ) -> None:
        """A key comes back field by field, to every client, and the list is in order of time."""
        reader = another()
        assert await reader.keys() == []
        scopes: frozenset[Scope] = frozenset({"write", "read"})
        first, _ = issue_key("shop", scopes, NOON, expires=NOON + 9, rate=Rate(600, 60))
        second, _ = issue_key("shop", frozenset({"admin"}), NOON + 1, namespace="acme")
        await store.add_key(second)
        await store.add_key(first)
        assert await reader.key(first.key_id) == first
        assert await reader.keys() == [first, second]
        assert await reader.key("0" * 12) is None
        with pytest.raises(Conflict, match=first.key_id):
            await reader.add_key(first)
        assert await reader.keys() == [first, second]

    async def test_a_revoked_key_keeps_its_record(self, store: Store, another: Connect) -> None:
        """Revoking sets a time once, and only for this key."""
        kept, _ = issue_key("kept", frozenset({"read"}), NOON)
        gone, _ = issue_key("gone", frozenset({"read"}), NOON)
        for key in (kept, gone):
            await store.add_key(key)
        reader = another()
        assert await reader.revoke_key(gone.key_id)
        found = await store.key(gone.key_id)
        assert found is not None
        assert found.revoked is not None
        assert replace(found, revoked=None) == gone
        assert await store.key(kept.key_id) == kept
        assert not await store.revoke_key(gone.key_id)
        assert not await store.revoke_key("0" * 12)
        assert await store.key(gone.key_id) == found

    async def test_each_change_of_keys_raises_their_version(
        self, store: Store, another: Connect
    ) -> None:
        """The version is 0 before the first key, and rises only with changes of keys."""
        reader = another()
        assert await reader.keys_version() == 0
        await store.append([Event("u", "i")])
        assert await reader.keys_version() == 0
        first, _ = issue_key("first", frozenset({"read"}), NOON)
        second, _ = issue_key("second", frozenset({"read"}), NOON)
        versions = [0]
        for change in (store.add_key(first), store.add_key(second), store.revoke_key(first.key_id)):
            await change
            versions.append(await reader.keys_version())
        assert versions == sorted(set(versions))
        await store.append([Event("u", "i")])
        await store.revoke_key(first.key_id)
        assert await reader.keys_version() == versions[-1]
        assert store.announced_keys() == versions[-1]
        await _until(lambda: reader.announced_keys() == versions[-1])


class QuotaContract(_Contract):
    """Quotas, checked in the transaction that would exceed them."""

    async def test_a_write_beyond_the_quota_stores_nothing(
        self, store: Store, limited: Limited
    ) -> None:
        """As many concurrent batches are stored as fit, each whole; deletions free."""
        bounded = limited(StoreQuota(events=10))
        batches = [[Event("u", f"i{n}", f"{n}-{m}") for m in range(3)] for n in range(8)]
        answers = await asyncio.gather(
            *(bounded.append(batch) for batch in batches), return_exceptions=True
        )
        stored = [n for n, answer in enumerate(answers) if answer == (3, 0)]
        refused = [answer for answer in answers if isinstance(answer, QuotaExceeded)]
        assert (len(stored), len(refused)) == (3, 5)
        assert "9 events and may hold 10 (HEED_MAX_EVENTS)" in refused[0].detail
        assert (await store.counts())["events"] == 9
        assert await bounded.append(batches[stored[0]]) == (0, 3)  # duplicates add nothing
        await bounded.append([Event("v", "i")])
        with pytest.raises(QuotaExceeded):
            await bounded.append([Event("v", "i")])
        assert await bounded.forget("u") == 9
        assert await bounded.append([Event("v", "i")]) == (1, 0)

    async def test_items_in_the_catalogue_are_bounded(self, store: Store, limited: Limited) -> None:
        """New items beyond the quota are refused; replacing and deleting go on."""
        bounded = limited(StoreQuota(items=2))
        await bounded.put_items([Item("a"), Item("b")])
        with pytest.raises(QuotaExceeded, match="HEED_MAX_ITEMS"):
            await bounded.put_items([Item("a", "new"), Item("c")])
        with pytest.raises(QuotaExceeded):
            await bounded.patch_items([ItemPatch("c", {"title": "new"})])
        assert await store.get_items(["a", "c"]) == [Item("a"), None]
        assert await bounded.put_items([Item("a", "new")]) == 1
        await store.put_items([Item("c")])  # by a client without a quota
        assert await bounded.put_items([Item("a", "newer")]) == 1
        assert await bounded.delete_item("b")
        assert await bounded.delete_item("c")
        assert await bounded.put_items([Item("d")]) == 1

    async def test_bytes_are_bounded(self, store: Store, limited: Limited) -> None:
        """A store that has grown to its quota takes no more events, items or profiles."""
        bounded = limited(StoreQuota(bytes=1 << 20))
        sent, full = 0, False
        while not full:
            try:
                await bounded.put_items([Item(f"{sent}", "x" * 60_000)])
                sent += 1
            except QuotaExceeded as error:
                full = "HEED_MAX_STORE_BYTES" in error.detail
        assert 8 <= sent <= 18
        assert (await store.counts())["items"] == sent
        with pytest.raises(QuotaExceeded):
            await bounded.put_user(User("u", {"text": "x" * 60_000}, ()))
        for n in range(sent):
            await bounded.delete_item(f"{n}")
        assert await bounded.put_items([Item("a", "x" * 60_000)]) == 1


class StoreContract(
    AppendContract,
    HistoryContract,
    CatalogueContract,
    ScenarioContract,
    KeyContract,
    QuotaContract,
    WholeContract,
):
    """The whole store contract: inherit it and define the fixtures `connect` and `limited`."""
