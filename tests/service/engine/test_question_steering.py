"""Rules, pins, quotas and facets of search, similar items and items taken together, by loops."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import pytest

from models.catalogue.item_filter import Condition
from service.domain.records import Item
from service.engine.engine import Engine
from tests.support import asking, tiny
from tests.support.steered_order import Holds, steered_order, unit, within_quotas
from tests.support.tiny import NOON, item_id

ITEMS = {item.item_id: item for item in tiny.items()}
SEED = item_id(0, 3)
FACETS = (asking.facet("categories", 100),)
EVERY = 1_000

Ask = Callable[..., Coroutine[Any, Any, Any]]


def questions(engine: Engine) -> dict[str, Ask]:
    """Questions that take rules, by name."""

    def search(requester: asking.Who, **fields: Any) -> Coroutine[Any, Any, Any]:
        query = asking.search(requester, "a moon rocket and garlic", fill=True, **fields)
        return asking.ask(engine, query)

    return {
        "search": lambda **fields: search(asking.who(), **fields),
        "personal search": lambda **fields: search(asking.who("u3", at=NOON), **fields),
        "similar": lambda **fields: asking.ask(engine, asking.similar(SEED, **fields)),
        "after": lambda **fields: asking.ask(engine, asking.together(SEED, at=NOON, **fields)),
        "basket": lambda **fields: asking.ask(
            engine, asking.together(SEED, "basket", at=NOON, **fields)
        ),
    }


BOOSTED: dict[str, tuple[float, Holds]] = {
    "even": (1.371, lambda item: "even" in item.categories),
    "music": (-2.113, lambda item: "music" in item.categories),
    "late": (30.0, lambda item: item.attributes["number"] > 12),
}
RULES = {
    "even": asking.rule("even", Condition("categories", {"eq": "even"}), 1.371),
    "music": asking.rule("music", Condition("categories", {"eq": "music"}), -2.113),
    "late": asking.rule("late", Condition("attributes.number", {"gt": 12}), 30.0),
}
BURIED = asking.rule("german", Condition("attributes.language", {"eq": "de"}))


def is_german(item: Item) -> bool:
    """Report whether the rule `BURIED` holds."""
    return bool(item.attributes["language"] == "de")


def draws(seed: int, names: Sequence[str]) -> Iterator[tuple[list[str], bool, Any, int]]:
    """Some rules, whether items are buried, the whole steering, and a limit."""
    rng = random.Random(seed)
    for _ in range(12):
        boosted = rng.sample(sorted(RULES), rng.randrange(4))
        buries = rng.random() < 0.5
        limit = rng.choice([3, 10, 25, EVERY])
        pinned = rng.sample(names, rng.choice([0, 0, 2]))
        places = rng.sample(range(1, min(limit, 12) + 1), len(pinned))
        fields = rng.sample(["categories", "attributes.number"], rng.randrange(3))
        yield (
            boosted,
            buries,
            asking.steering(
                (*(RULES[name] for name in boosted), *([BURIED] if buries else [])),
                tuple(asking.pin(*pin) for pin in zip(pinned, places, strict=True)),
                tuple(asking.quota(field, rng.choice([1, 2, 7])) for field in fields),
            ),
            limit,
        )


def sections(answer: Any) -> list[dict[str, float]]:
    """Scores by reason: items of similar content come after those that are taken together."""
    found: dict[bool, dict[str, float]] = {False: {}, True: {}}
    for item in answer.items:
        found[item.get("reason") == "content"][item["item_id"]] = item["score"]
    return [*found.values()]


def check_parts(item: Any, before: Mapping[str, float], boosted: Sequence[str]) -> None:
    """The boosts that hold are named, are a part, and all parts add up to the score."""
    holding = [name for name in boosted if BOOSTED[name][1](ITEMS[item["item_id"]])]
    assert [rule["name"] for rule in item.get("rules", []) if "boost" in rule] == holding
    asked = [rule["boost"] for rule in item.get("rules", []) if "boost" in rule]
    assert asked == [BOOSTED[name][0] for name in holding]
    boost = unit(before.values()) * sum(asked)
    assert item["parts"].get("rules", 0.0) == pytest.approx(boost, rel=1e-5, abs=1e-5)
    assert ("rules" in item["parts"]) == bool(boosted)
    score = before[item["item_id"]] + boost
    assert item["score"] == pytest.approx(score, rel=1e-5, abs=1e-4)
    assert sum(item["parts"].values()) == pytest.approx(item["score"], rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("name", ["search", "personal search", "similar", "after", "basket"])
async def test_rules_pins_and_quotas_order_as_a_loop_does(engine: Engine, name: str) -> None:
    """Order, scores and reasons of steered answers are those of a loop over the plain answer."""
    ask = questions(engine)[name]
    plain = await ask(limit=EVERY, facets=FACETS)
    before = {item["item_id"]: item["score"] for item in plain.items}
    assert len(before) >= 59
    reasons = {item["item_id"]: item.get("reason") for item in plain.items}
    for boosted, buries, steering, limit in draws(len(name), [*before]):
        answer = await ask(limit=limit, steering=steering, facets=FACETS)
        wanted = steered_order(
            sections(plain),
            ITEMS,
            boosts=dict(BOOSTED[each] for each in boosted),
            buried=is_german if buries else lambda _: False,
            pins=steering["pin"],
            quotas=steering["at_most"],
            limit=limit,
        )
        assert [item["item_id"] for item in answer.items] == wanted, steering
        assert (answer.warnings, answer.facets) == (plain.warnings, plain.facets)
        pinned = {pin.item_id for pin in steering["pin"]}
        for item in answer.items:
            (section,) = (each for each in sections(plain) if item["item_id"] in each)
            check_parts(item, section, boosted)
            assert item.get("reason") == reasons[item["item_id"]]
            german = is_german(ITEMS[item["item_id"]])
            moved = "pinned" if item["item_id"] in pinned else "buried"
            expected = moved if item["item_id"] in pinned or (buries and german) else None
            assert item.get("moved") == expected
            assert ({"name": "german", "bury": True} in item.get("rules", [])) == (
                buries and german
            )


async def test_a_pin_that_no_query_matches_has_no_score(engine: Engine) -> None:
    """A search shows its pins where nothing else is found, without a score, and says so."""
    steering = asking.steering(pins=(asking.pin(SEED, 2),))
    query = asking.search(asking.who(), "xqvzkwj", steering=steering)
    answer = await asking.ask(engine, query)
    (item,) = answer.items
    assert (item["item_id"], item["moved"], item["weight"]) == (SEED, "pinned", 0)
    assert {"score", "parts"}.isdisjoint(item)
    assert answer.warnings is not None
    assert answer.warnings[0].pointer == "/query"
    phrase = asking.search(asking.who(), f'"{ITEMS[item_id(2, 5)].title}"', steering=steering)
    first, second = (await asking.ask(engine, phrase)).items
    assert (first["item_id"], second["item_id"]) == (item_id(2, 5), SEED)
    assert "score" in first
    assert "score" not in second


async def test_pins_that_cannot_be_compared_are_warned_of(engine: Engine) -> None:
    """The item itself, and one without a text among items of similar content, are no pins."""
    ask = questions(engine)
    even = Condition("categories", {"eq": "even"})
    odd = next(name for name, item in ITEMS.items() if "odd" in item.categories)
    steering = asking.steering(pins=(asking.pin(SEED, 1), asking.pin(odd, 2)))
    for name in ("similar", "after", "basket"):
        plain = await ask[name](limit=5)
        answer = await ask[name](limit=5, steering=asking.steering(pins=(asking.pin(SEED, 1),)))
        assert [i["item_id"] for i in answer.items] == [i["item_id"] for i in plain.items]
        assert answer.warnings is not None
        (warning,) = answer.warnings
        assert warning.pointer == "/pin/0"
        assert "cannot be compared" in warning.detail
        filtered = await ask[name](limit=5, filter=even, steering=steering)
        assert filtered.warnings is not None
        assert [each.pointer for each in filtered.warnings] == ["/pin/0", "/pin/1"]


async def test_facets_of_items_taken_together_leave_similar_ones_out(engine: Engine) -> None:
    """Facets and total count what is taken with the item, whatever the limit, under a filter."""
    ask = questions(engine)["after"]
    for wanted in (None, Condition("categories", {"eq": "even"})):
        fields = {} if wanted is None else {"filter": wanted}
        every = await ask(limit=EVERY, **fields)
        taken = [item["item_id"] for item in every.items if item["reason"] == "after"]
        counts = Counter(name for item in taken for name in ITEMS[item].categories)
        answer = await ask(limit=1, facets=FACETS, **fields)
        assert answer.facets is not None
        assert dict(answer.facets[0].values) == counts
        assert answer.total == len(taken) > 0


@pytest.mark.parametrize("by", ["attributes.number", "title"])
async def test_quotas_of_a_list_hold_for_all_pages_together(engine: Engine, by: str) -> None:
    """Pages by cursor and by offset go on where the page before ended, as one large page does."""

    async def page(**fields: Any) -> Any:
        query = asking.search(asking.who(), **{"sort": (asking.order(by),)} | fields)
        return await asking.ask(engine, query)

    plain = [item["item_id"] for item in (await page(limit=EVERY)).items]
    assert len(plain) == len(ITEMS)
    for quotas in (
        (asking.quota("categories", 7),),
        (asking.quota("attributes.number", 2), asking.quota("categories", 9)),
    ):
        wanted = within_quotas(plain, ITEMS, quotas, Counter())
        assert 10 < len(wanted) < len(plain)
        steering = asking.steering(at_most=quotas)
        whole = await page(limit=EVERY, steering=steering)
        assert [item["item_id"] for item in whole.items] == wanted
        assert (whole.total, whole.cursor) == (len(plain), None)
        by_cursor, by_offset, cursor = list[str](), list[str](), None
        while cursor is not None or not by_cursor:
            one = await page(limit=3, steering=steering, cursor=cursor)
            by_cursor += [item["item_id"] for item in one.items]
            two = await page(limit=3, steering=steering, offset=len(by_offset))
            by_offset += [item["item_id"] for item in two.items]
            assert (one.cursor is None) == (two.cursor is None)
            cursor = one.cursor
        assert by_cursor == by_offset == wanted
