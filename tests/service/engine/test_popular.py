"""Popular, trending, newest and best rated items against loops over the events of the store."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from models.catalogue.item_filter import Condition
from service.domain.records import Event, Item
from service.engine.engine import Engine
from service.stores.base import Store
from tests.support import asking
from tests.support.engine_story import opened
from tests.support.steered_order import unit

HOUR = 3_600_000_000
DAY = 24 * HOUR
NOW = 1_767_268_800_000_000
KINDS: tuple[Any, ...] = ("popular", "trending", "newest", "rated")


async def ask(engine: Engine, **fields: Any) -> Any:
    """The answer of an engine as of `at`."""
    requester = asking.who(user_id=fields.pop("user_id", None), at=fields.pop("at", NOW))
    return await asking.ask(engine, asking.popular(requester, **fields))


def items() -> list[Item]:
    """Twenty items, some hidden, half of them published at some time."""
    return [
        Item(
            f"i{n}",
            categories=("even" if n % 2 == 0 else "odd",),
            hidden=n % 7 == 3,
            published_at=NOW - (n - 2) * DAY if n % 2 else None,
        )
        for n in range(20)
    ]


def drawn(source: random.Random, count: int) -> list[Event]:
    """Events of the last 40 days and the next one."""
    return [
        Event(
            f"u{source.randrange(8)}",
            f"i{int(source.paretovariate(1)) % 22}",
            type=source.choice(["view", "buy", "dislike"]),
            weight=source.choice([1.0, 2.0, 4.5]),
            timestamp=NOW + DAY - source.randrange(41 * DAY),
        )
        for _ in range(count)
    ]


def expected(
    store: Store, by: Any, at: int, window: int | None, half_life: int | None
) -> dict[str, float]:
    """The score of every item that is ranked, by loops over the log."""
    log = [event for event in store.scan_events() if (event.timestamp or 0) <= at]
    oldest = min(event.timestamp or 0 for event in store.scan_events())
    if by == "trending":
        half_life, window = half_life or 6 * HOUR, window or 28 * DAY
    counted: dict[str, list[tuple[int, float]]] = {}
    for event in log:
        age = at - (event.timestamp or 0)
        if event.type != "dislike" and (window is None or age < window or by == "newest"):
            counted.setdefault(event.item_id, []).append((age, event.weight))
    scores: dict[str, float] = {}
    everything = [weight for own in counted.values() for _, weight in own]
    for item in store.scan_items():
        own = counted.get(item.item_id, [])
        if item.hidden:
            continue
        if by == "newest":
            time = item.published_at
            if time is None and own:
                time = at - max(age for age, _ in own)
            if time is not None and time <= at and (window is None or time > at - window):
                scores[item.item_id] = time / 1e6
        elif by == "rated" and own:
            prior, mean = len(everything) / len(counted), sum(everything) / len(everything)
            weight = sum(weight for _, weight in own)
            scores[item.item_id] = (weight + prior * mean) / (len(own) + prior)
        elif by == "popular" and own:
            scores[item.item_id] = sum(
                weight * (0.5 ** (age / half_life) if half_life else 1) for age, weight in own
            )
        elif by == "trending" and half_life and window:
            now = sum(weight * 0.5 ** (age / half_life) for age, weight in own)
            evenly = half_life / math.log(2)
            past = sum(weight for _, weight in own) * evenly / max(evenly, min(window, at - oldest))
            score = (now - past) / math.sqrt(past + 1)
            if score > 1:
                scores[item.item_id] = score
    return scores


async def check(engine: Engine, source: random.Random) -> None:
    """Assert that each kind of popularity is that of the store's log."""
    for by in KINDS:
        at = NOW - source.randrange(3 * DAY)
        window = source.choice([None, 2 * DAY, 9 * DAY])
        half_life = source.choice([None, 5 * HOUR]) if by in ("popular", "trending") else None
        answer = await ask(engine, by=by, at=at, window=window, half_life=half_life, limit=100)
        wanted = expected(engine.store, by, at, window, half_life)
        found = {item["item_id"]: item["score"] for item in answer.items}
        assert found == pytest.approx(wanted, abs=1e-9, rel=1e-9)
        order = sorted(answer.items, key=lambda item: (-item["score"], item["item_id"]))
        assert list(answer.items) == order
        for item in answer.items:
            assert sum(item["parts"].values()) == pytest.approx(item["score"], abs=1e-9)
            assert item["reason"] == by
        few = await ask(engine, by=by, at=at, window=window, half_life=half_life, limit=3)
        assert list(few.items) == order[:3]


async def test_every_kind_is_that_of_loops_over_the_log(tmp_path: Path) -> None:
    """After appends, deletions, forgotten users and undone imports each answer is exact."""
    source = random.Random(3)
    async with opened(tmp_path) as engine, opened(tmp_path) as other:  # as another worker
        store = engine.store
        await engine.live.catalogue.put_items(items())
        for step in range(12):
            import_id = await store.begin_import("night")
            await store.append(drawn(source, 30), import_id=import_id)
            await store.append(drawn(source, source.choice([1, 60])))
            await check(source.choice([engine, other]), source)
            if step % 4 == 1:
                await store.undo_import(import_id)
            elif step % 4 == 2:
                await store.forget(f"u{source.randrange(8)}")
            elif step % 4 == 3:
                (event, *_), _ = await store.page("u1", limit=1)
                assert await store.delete_event("u1", str(event.event_id))
            await check(engine, source)
            await check(other, source)
    async with opened(tmp_path) as engine:  # after a restart
        await check(engine, source)


async def test_steered_answers_are_those_of_a_loop(fresh: Engine) -> None:
    """Boosts are a part of the score, pins stand, buried items come last, quotas hold."""
    source = random.Random(5)
    even = Condition("categories", {"eq": "even"})
    buried = Condition("item_id", {"in": ["i1", "i2"]})
    steering = asking.steering(
        (asking.rule("even", even, 2.5), asking.rule("old", buried)),
        (asking.pin("i19", 2), asking.pin("i3", 1)),  # i3 is hidden
        (asking.quota("categories", 3),),
    )
    await fresh.live.catalogue.put_items(items())
    await fresh.store.append(drawn(source, 90))
    for by in ("popular", "trending", "rated"):
        scores = expected(fresh.store, by, NOW, None, None)
        added = 2.5 * unit(scores.values())
        for name in scores:
            scores[name] += added * (int(name[1:]) % 2 == 0)
        scores.pop("i19", None)
        ranked = sorted(scores, key=lambda name: (name in {"i1", "i2"}, -scores[name], name))
        left = {0: 3, 1: 2}  # even, and odd beside the pin
        wanted = []
        for name in ranked:
            left[int(name[1:]) % 2] -= 1
            if left[int(name[1:]) % 2] >= 0:
                wanted.append(name)
        wanted.insert(1, "i19")
        answer = await ask(fresh, by=by, steering=steering, limit=20)
        assert [item["item_id"] for item in answer.items] == wanted
        for item in answer.items:
            assert sum(item["parts"].values()) == pytest.approx(item["score"], abs=1e-6)
            boosted = int(item["item_id"][1:]) % 2 == 0
            assert item["parts"]["rules"] == pytest.approx(added * boosted, rel=1e-5)
            asked = {rule["name"]: rule.get("boost") for rule in item.get("rules", [])}
            assert asked.get("even") == (2.5 if boosted else None)
        moved = {item["item_id"]: item.get("moved") for item in answer.items}
        assert moved.pop("i19") == "pinned"
        assert {name for name, why in moved.items() if why} == {"i1", "i2"} & moved.keys()
        (warning,) = answer.warnings
        assert (warning.pointer, warning.detail) == ("/pin/1", "item 'i3' is hidden")


async def test_filters_types_and_exclusions(fresh: Engine) -> None:
    """Only items that pass are ranked and counted, of events of the given types."""
    await fresh.live.catalogue.put_items(items())
    await fresh.store.append(
        [Event(f"u{n % 3}", f"i{n % 8}", type="buy", timestamp=NOW) for n in range(40)]
        + [Event("u9", "i2", timestamp=NOW), Event("u9", "i9", timestamp=NOW - 1)]
    )
    odd = Condition("categories", {"eq": "odd"})
    facets = (asking.facet("categories"),)
    answer = await ask(fresh, filter=odd, facets=facets, exclude=frozenset({"i5"}))
    assert [item["item_id"] for item in answer.items] == ["i1", "i7", "i9"]
    assert answer.facets is not None
    assert answer.facets[0].values == (("odd", 3),)
    seen = await ask(fresh, types=frozenset({"view"}), user_id="u9", exclude_seen=True)
    assert list(seen.items) == []
    views = await ask(fresh, types=frozenset({"view"}), fields=("categories",))
    assert [(item["item_id"], item["fields"]) for item in views.items] == [
        ("i2", {"categories": ("even",)}),
        ("i9", {"categories": ("odd",)}),
    ]


async def test_a_window_without_events_says_where_they_are(fresh: Engine) -> None:
    """An answer that is empty because the log is old names the newest event until `at`."""
    assert (await ask(fresh, window=DAY)).warnings is None  # there is no log at all
    await fresh.live.catalogue.put_items(items())
    await fresh.store.append([Event("u", "i0", timestamp=NOW + DAY)])
    assert (await ask(fresh, window=DAY)).warnings is None  # there is no event before
    await fresh.store.append([Event("u", "i0", timestamp=NOW - 90 * DAY)])
    answer = await ask(fresh, window=DAY)
    assert answer.warnings is not None
    assert (answer.warnings[0].pointer, list(answer.items)) == ("/window", [])
    assert "2025-10-03T12:00:00Z" in answer.warnings[0].detail
    trending = await ask(fresh, by="trending")
    assert [warning.pointer for warning in trending.warnings or ()] == ["/at"]
    assert (await ask(fresh)).warnings is None
    wrong = await ask(fresh, types=frozenset({"view", "veiw"}))  # of the one until `at`
    assert (len(wrong.items), [(w.pointer, w.detail) for w in wrong.warnings or ()]) == (
        1, [("/type", "no event has the type 'veiw'")],
    )  # fmt: skip


PURCHASES = [1, 1, 1, 1, 2, 2, 3, 4, 6, 12] * 20


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([1, 2, 3, 4, 5], None),
        ([0.5, 4, 4.5, 5, 5, 5], None),
        ([1] * 9 + [2], None),  # thumbs
        (list(range(1, 101)), None),  # per cent
        (PURCHASES, None),  # of a scale to 12 too: they may be ratings
        ([3], None),  # nothing to compare with
        ([1] * 9, "all weights are 1, so that every item has the same mean"),
        ([*PURCHASES, 2_880], "the weights, 1 to 2880, look like quantities: fewer than 1 % are"),
        (
            [n / 4 for n in range(1, 102)],
            "the weights, 0.25 to 25.25, look like prices or quantities:",
        ),
    ],
)
async def test_weights_that_are_no_ratings_are_warned_of(
    fresh: Engine, weights: list[float], problem: str | None
) -> None:
    """`rated` warns where its events have weights of no scale; other questions never do."""
    await fresh.live.catalogue.put_items(items())
    # Events of another type, and after the request, count for no answer.
    others = [Event("u", "i0", type="view", weight=n, timestamp=NOW) for n in range(1, 900)]
    later = [Event("u", "i0", type="rating", weight=9_999, timestamp=NOW + 1)]
    ratings = [
        Event("u", f"i{n % 20}", type="rating", weight=weight, timestamp=NOW)
        for n, weight in enumerate(weights)
    ]
    await fresh.store.append([*others, *later, *ratings])
    fields = {"types": frozenset({"rating"}), "window": DAY}
    warnings = (await ask(fresh, by="rated", **fields)).warnings
    if problem is None:
        assert warnings is None
    else:
        (warning,) = warnings
        assert warning.pointer == "/by"
        assert warning.detail.startswith(problem)
    for by in ("popular", "newest"):
        assert (await ask(fresh, by=by)).warnings is None
