"""Items taken together against loops over the events of the store."""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from typing import Any

import pytest

from models.catalogue.item_filter import Condition
from models.ranking.event_counts import MIN_SIGNIFICANCE
from service.domain.errors import NotFound
from service.domain.records import Event, Item
from service.engine.engine import Engine
from service.stores import base
from service.stores.base import Store
from tests.support import asking, tiny

HOUR = 3_600_000_000
NOW = 1_767_268_800_000_000
RELATIONS: tuple[Any, ...] = ("after", "basket")


async def ask(engine: Engine, item_id: str, **fields: Any) -> Any:
    """The answer of an engine as of `at`."""
    query = asking.together(item_id, **{"at": NOW, "limit": 100} | fields)
    return await asking.ask(engine, query)


def baskets(store: Store, at: int) -> dict[str, list[set[str]]]:
    """The items of each user's baskets, oldest first."""
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for event in store.scan_events():
        if event.timestamp is not None and event.timestamp <= at:
            found[event.user_id][event.timestamp].add(event.item_id)
    return {user: [own[time] for time in sorted(own)] for user, own in found.items()}


def expected(
    store: Store, item: str, relation: Any, at: int
) -> dict[str, tuple[float, int, float]]:
    """Score, support and lift of every item, by loops over users and their baskets."""
    # Takes a second, which every process that collects this file would spend.
    from scipy.stats import chi2_contingency

    taken = baskets(store, at)
    weights: dict[str, float] = defaultdict(float)
    support: dict[str, set[Any]] = defaultdict(set)
    units: dict[str, set[Any]] = defaultdict(set)
    every = set[Any]()
    for user, own in taken.items():
        for place, basket in enumerate(own):
            unit = user if relation == "after" else (user, place)
            every.add(unit)
            for other in basket:
                units[other].add(unit)
            if item not in basket:
                continue
            if relation == "basket":
                for other in basket - {item}:
                    support[other].add(unit)
            else:
                for distance, later in enumerate(own[place + 1 : place + 21], 1):
                    for other in later - {item}:
                        support[other].add(user)
                        weights[other] += 1 / distance**2
    found = {}
    for other, both in support.items():
        a, b, n = len(units[item]), len(units[other]), len(every)
        lift = len(both) / (a * b / n)
        table = [[len(both), a - len(both)], [b - len(both), max(0, n - a - b + len(both))]]
        if len(both) < 2 or lift <= 1:
            continue
        if 0 in (sum(table[1]), table[0][1] + table[1][1]):
            continue  # it is in every one
        g2 = float(chi2_contingency(table, correction=False, lambda_="log-likelihood")[0])
        if g2 >= MIN_SIGNIFICANCE:
            found[other] = (weights[other] if relation == "after" else g2, len(both), lift)
    return found


@pytest.mark.parametrize("seed", range(3))
async def test_companions_are_those_of_loops_over_the_log(fresh: Engine, seed: int) -> None:
    """Score, support and lift of what is taken together are exact, at any time."""
    rng = random.Random(seed)
    times = [NOW - n * HOUR for n in range(60)]

    def drawn(count: int) -> list[Event]:
        # Items of one kind are taken together, and mostly by users of that kind.
        made = []
        for _ in range(count):
            user, time = rng.randrange(40), rng.choice(times)
            kind = user % 4 if rng.random() < 0.9 else rng.randrange(4)
            made += [
                Event(f"u{user}", f"i{kind * 5 + rng.randrange(5)}", timestamp=time)
                for _ in range(rng.randrange(1, 4))
            ]
        return made

    await fresh.live.catalogue.put_items(
        [Item(f"i{n}", hidden=n == 7, categories=(f"k{n % 2}",)) for n in range(20)]
    )
    met = 0
    for step in range(4):
        await fresh.store.append(drawn(100))
        if step == 2:
            await fresh.store.forget("u3")
        for relation in RELATIONS * 4:
            item, at = f"i{rng.randrange(20)}", rng.choice(times[:30])
            wanted = expected(fresh.store, item, relation, at)
            wanted.pop("i7", None)
            answer = await ask(fresh, item, relation=relation, at=at)
            found = {
                each["item_id"]: (each["score"], each["support"], each["lift"])
                for each in answer.items
                if each["reason"] == relation
            }
            assert found.keys() == wanted.keys()
            for other, numbers in found.items():
                assert numbers == pytest.approx(wanted[other], rel=1e-9)
            scores = [numbers[0] for numbers in found.values()]
            assert scores == sorted(scores, reverse=True)
            met += len(found)
            odd = Condition("categories", {"eq": "k1"})
            some = await ask(fresh, item, relation=relation, at=at, filter=odd)
            assert all(int(each["item_id"][1:]) % 2 for each in some.items)
            assert {each["item_id"] for each in some.items if "lift" in each} == {
                other for other in wanted if int(other[1:]) % 2
            }
    assert met > 10


async def test_a_trained_model_says_what_follows(trained: Engine) -> None:
    """With a model, items follow by its transition counts, and similar ones fill the list up."""
    item = tiny.item_id(0, 3)
    answer = await ask(trained, item, limit=10)
    follow = [each for each in answer.items if each["reason"] == "after"]
    rest = list(answer.items)[len(follow) :]
    assert follow
    assert {each["reason"] for each in rest} == {"content"}
    assert len(answer.items) == 10
    assert follow[0]["item_id"] == tiny.item_id(0, 4)  # the next of the walk
    snapshot = trained.live.snapshot
    counted = snapshot.model.statistics.transition_counts
    own = int(snapshot.trained_rows[snapshot.catalogue.row(item)])
    for each in follow:
        other = int(snapshot.trained_rows[snapshot.catalogue.row(each["item_id"])])
        place = counted.items[own].tolist().index(other)
        assert each["score"] == pytest.approx(float(counted.counts[own, place]))
    wanted = expected(trained.store, item, "after", NOW)
    assert {each["item_id"] for each in follow} <= wanted.keys()
    for each in follow:
        assert (each["support"], each["lift"]) == pytest.approx(wanted[each["item_id"]][1:])


async def test_an_item_without_events_has_similar_ones(fresh: Engine) -> None:
    """Without events the list is by content; an unknown item has none, a hidden one is in none."""
    await fresh.live.catalogue.put_items(
        [
            Item("a", "a rocket to the moon"),
            Item("b", "a rocket and a comet"),
            Item("c", "bread from the oven"),
            Item("d", "a rocket", hidden=True),
        ]
    )
    answer = await ask(fresh, "a", relation="basket")
    assert [(each["item_id"], each["reason"]) for each in answer.items] == [
        ("b", "content"),
        ("c", "content"),
    ]
    assert all(math.isclose(each["score"], each["parts"]["content"]) for each in answer.items)
    with pytest.raises(NotFound, match="unknown"):
        await ask(fresh, "unknown")


async def test_an_empty_answer_says_why(fresh: Engine) -> None:
    """The warning says whether the item has a text, is in the catalogue, and what events it has."""
    await fresh.live.catalogue.put_items([Item("a", "a rocket"), Item("b"), Item("c")])
    await fresh.store.append([Event("u", "only events", timestamp=NOW - HOUR)])
    await fresh.live.refresh_popularity()
    why = {
        "only events": "(1 events that count) by 2 users or more and oftener than by chance; "
        "it is not in the catalogue, and has no text to be compared by",
        "b": "(0 events that count) by 2 users or more and oftener than by chance; it has no "
        "text to be compared by",
        "a": "; no such item has a text to compare with its own",
    }
    for item_id, end in why.items():
        answer = await ask(fresh, item_id)
        assert answer.items == []
        (warning,) = answer.warnings
        assert warning.pointer == "/item_id"
        begin = f"no item that may be answered is taken with {item_id!r} ("
        assert warning.detail.startswith(begin)
        assert warning.detail.endswith(end)


@pytest.mark.parametrize("relation", ["after", "basket"])
async def test_ratings_with_the_time_of_an_import_follow_nothing(
    fresh: Engine, relation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside dated orders, events that were stored without a time change no answer.

    Not even if they arrive at a whole millisecond, as the times of exports are.
    """
    monkeypatch.setattr(base, "_now", lambda: time.time_ns() // 1_000_000 * 1_000)
    orders = [
        Event(f"u{user}", f"i{item}", timestamp=NOW - (24 * user + 3 - step // 2) * HOUR)
        for user in range(40)
        for step, item in enumerate([0, 1, 2, 3] if user % 2 else [4, 5, 6, 7])
    ]
    await fresh.live.catalogue.put_items([Item(f"i{n}") for n in range(20)])
    await fresh.store.append(orders)
    at = time.time_ns() // 1_000 + HOUR
    before = await ask(fresh, "i0", relation=relation, at=at)
    assert before.items
    await fresh.store.append(
        [Event(f"u{user}", f"i{8 + user % 2}", type="rating") for user in range(40)]
    )
    after = await ask(fresh, "i0", relation=relation, at=at)
    assert [item["item_id"] for item in after.items] == [i["item_id"] for i in before.items]


async def test_without_times_nothing_comes_after_another(fresh: Engine) -> None:
    """If most users have all events at one time, what the same users took is the answer."""
    rng = random.Random(0)
    await fresh.live.catalogue.put_items([Item(f"i{n}") for n in range(20)])
    sent = [
        Event(f"u{user}", f"i{user % 4 * 5 + item}", timestamp=NOW - HOUR)
        for user in range(40)
        for item in rng.sample(range(5), 3)
    ]
    await fresh.store.append([*sent, Event("u0", "i19", timestamp=NOW)])
    together = await ask(fresh, "i0", relation="basket")
    default = await ask(fresh, "i0")
    assert {"i1", "i2", "i3", "i4"} <= {each["item_id"] for each in default.items}
    assert default.items == together.items
