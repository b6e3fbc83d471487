"""Order of an answer under rules, pins and quotas, by a loop over its items."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from service.domain.records import Item
from service.questions.parts import AtMostIn, PinIn

Holds = Callable[[Item], bool]


def field_values(item: Item, field: str) -> list[object]:
    """The values of categories, or of an attribute."""
    if field == "categories":
        return [*item.categories]
    name = field.removeprefix("attributes.")
    return [item.attributes[name]] if name in item.attributes else []


def within_quotas(
    order: Sequence[str],
    items: Mapping[str, Item],
    quotas: Sequence[AtMostIn],
    counts: Counter[object],
) -> list[str]:
    """The items that quotas have room for, gone through from the first on; `counts` go on."""
    taken = []
    for name in order:
        values = [(each.field, v) for each in quotas for v in field_values(items[name], each.field)]
        most = {each.field: each.count for each in quotas}
        if all(counts[field, value] < most[field] for field, value in values):
            counts.update(values)
            taken.append(name)
    return taken


def unit(scores: Iterable[float]) -> float:
    """Gain by a boost of 1: the standard deviation of the 100 largest scores; 1 without any."""
    best = sorted(scores)[-100:]
    return statistics.pstdev(best) or 1.0 if best else 1.0


def steered_order(
    sections: Sequence[Mapping[str, float]],
    items: Mapping[str, Item],
    *,
    boosts: Mapping[float, Holds],
    buried: Holds,
    pins: Sequence[PinIn],
    quotas: Sequence[AtMostIn],
    limit: int,
) -> list[str]:
    """The ids of an answer.

    Args:
        sections: scores without rules, in the order of the answer without rules; items of a
            section come before those of the next.
        items: by id.
        boosts: each with the items that it holds for.
        buried: holds for items to put behind all others.
        pins: all of which can be shown, but for those behind the limit.
        quotas: the most items of a value.
        limit: the most items.
    """
    pinned = {pin.item_id for pin in pins}
    order = []
    for scores in sections:
        own = {
            name: score
            + unit(scores.values())
            * sum(boost for boost, holds in boosts.items() if holds(items[name]))
            for name, score in scores.items()
        }
        order += sorted((name for name in own if name not in pinned), key=lambda name: -own[name])
    order.sort(key=lambda name: buried(items[name]))  # stable
    shown = [pin for pin in pins if pin.position <= limit]
    counts: Counter[object] = Counter()
    for pin in shown:
        for each in quotas:
            counts.update((each.field, v) for v in field_values(items[pin.item_id], each.field))
    rest = within_quotas(order, items, quotas, counts)[: limit - len(shown)]
    answer: dict[int, str] = {}
    last = len(rest) + len(shown)
    for pin in sorted(shown, key=lambda pin: -pin.position):
        last = min(pin.position - 1, last - 1)
        answer[last] = pin.item_id
    free = iter(rest)
    return [answer.get(at) or next(free) for at in range(len(rest) + len(shown))]
