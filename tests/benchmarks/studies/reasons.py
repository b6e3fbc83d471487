"""Reasons that recommendations name, compared with leaving each out of the whole model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from service.domain.settings import Settings
from service.domain.stage_clock import StageClock
from service.engine.compose import compose
from service.engine.pipeline import Request
from service.engine.recommend import recommend_items
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.benchmarks.workload.data import prepare_data
from tests.benchmarks.workload.questions import AT
from tests.support import asking

_NAMED = 2  # events in the explanation of each item
_LIST = 5  # items of a recommendation
_LEAST, _BESIDE = 5e-4, 0.1  # of what the page names: contribution, and share of the first's
_HIDDEN = 0.1  # share of the items: public data sets hide none, and a reason must name none


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts over all items of some recommendations."""

    answers: int
    items: int
    unexplained: int  # items without any reason
    reasons: int  # events with a contribution above 0, as "because of" names them
    exact: int  # of these, whose effect is not an estimate
    raising: int  # of these, without which the whole model scores the item lower
    told: int  # of the reasons, that are large enough for the sentence of the page
    told_raising: int
    repeated: int  # reasons that are named twice for one item
    same_item: int  # reasons on an item that another reason of the same recommended item is on
    hidden: int  # reasons of items that are hidden or deleted

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def measure(
    data: Path, answers: int, seed: int = 0, progress: Callable[[int], None] | None = None
) -> Figures:
    """Recommend to drawn users in turn, a tenth of the items hidden, and leave out what is named.

    Args:
        data: a data directory with a model, which is copied: hiding items changes nothing in it.
        answers: number of recommendations.
        seed: of the users and the hidden items.
        progress: called with the number of answers done.
    """
    rng = np.random.default_rng(seed)
    with prepare_data(data) as copy:
        asyncio.run(hide(copy.data, rng))
        found = asyncio.run(_ask(copy.data, answers, rng, progress))
    return summarise(found)


async def hide(data: Path, rng: np.random.Generator) -> None:
    """Hide a tenth of the items in a data directory."""
    store = SQLiteStore(data / STORE_FILE)
    try:
        items = list(store.scan_items())
        drawn = rng.choice(len(items), int(_HIDDEN * len(items)), replace=False)
        await store.put_items([replace(items[at], hidden=True) for at in drawn])
    finally:
        await store.close()


async def _ask(
    data: Path, answers: int, rng: np.random.Generator, progress: Callable[[int], None] | None
) -> list[Counter[str]]:
    parts = compose(Settings.read({"data": data}), threads=1)
    try:
        await parts.live.open()
        listed = {item.item_id for item in parts.store.scan_items() if not item.hidden}
        users = list(parts.store.scan_user_ids())
        found = list[Counter[str]]()
        for at in rng.permutation(np.resize(np.arange(len(users)), answers)):
            asked = Request(parts, question(users[at]), StageClock())
            answer = await recommend_items(asked)
            found.append(count(answer["items"], listed))
            if progress is not None:
                progress(len(found))
        return found
    finally:
        await parts.close()


def question(user: str) -> Any:
    """Return the question for a user's recommendations, with the exact effects of reasons."""
    return asking.recommend(asking.who(user, explain=_NAMED, explain_exact=True, at=AT), _LIST)


def named(item: Any) -> list[Any]:
    """Return what an item is said to be recommended because of."""
    return [each for each in asking.Told(item).explanation or () if each.contribution > 0]


def count(items: Sequence[Any], listed: Set[str]) -> Counter[str]:
    """Count the reasons of the items of one answer.

    Args:
        items: of the answer.
        listed: ids of the items of the catalogue that are neither hidden nor deleted.
    """
    found = Counter(items=len(items))
    for item in items:
        reasons = named(item)
        told = [each for each in reasons if each.contribution >= _least(reasons)]
        events = [each.event_id for each in reasons if each.event_id is not None]
        on = [each.item_id for each in reasons if each.item_id is not None]
        found["unexplained"] += not reasons
        found["reasons"] += len(reasons)
        found["exact"] += sum(each.effect_is_exact for each in reasons)
        found["raising"] += sum((each.effect or 0.0) > 0 for each in reasons)
        found["told"] += len(told)
        found["told_raising"] += sum((each.effect or 0.0) > 0 for each in told)
        found["repeated"] += len(events) - len(set(events))
        found["same_item"] += len(on) - len(set(on))
        found["hidden"] += sum(item_id not in listed for item_id in on)
    return found


def _least(named: Sequence[Any]) -> float:
    """Return the least contribution that the page names of an item's reasons, largest first."""
    return max(_LEAST, _BESIDE * named[0].contribution) if named else _LEAST


def summarise(found: Sequence[Counter[str]]) -> Figures:
    """Sum the counts of answers."""
    total = Counter(answers=len(found))
    for each in found:
        total.update(each)
    return Figures(**{name: total[name] for name in Figures.__slots__})


def shown(found: Figures, data: Path) -> Table:
    """Make the table of the report."""
    table = Table(title=f"Reasons of {found.answers:,} recommendations, {data}")
    table.add_column("figure")
    table.add_column("", justify="right")
    for name, value in (
        ("items", found.items),
        ("items without a reason", found.unexplained),
        ("reasons: events that contribute to the score", found.reasons),
        ("reasons whose effect is exact", found.exact),
        ("reasons without which the score is lower", found.raising),
        ("reasons that the page names", found.told),
        ("of these, without which the score is lower", found.told_raising),
        ("reasons named twice for an item", found.repeated),
        ("reasons on the item of another reason", found.same_item),
        ("reasons of hidden or deleted items", found.hidden),
    ):
        table.add_row(name, f"{value:,}")
    return table
