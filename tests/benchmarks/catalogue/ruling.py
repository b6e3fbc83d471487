"""Recommendations with a filter, rules and quotas, beside the same without, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from models.catalogue.item_filter import EVERYTHING, Condition, Group
from models.catalogue.item_filter import ItemFilter as Filter
from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory, build_memory
from models.ranking.recommend import Ranked, recommend
from service.engine.selection import select_items, steer_items
from tests.benchmarks.catalogue.filtering import Values, drawn_catalogue
from tests.benchmarks.harness.tables import ratio, seconds
from tests.benchmarks.harness.timing import ProgressCallback, Spread, alternate, no_progress
from tests.support import asking
from tests.support.small import DAY, random_model, random_past, trained

_LIMIT, _EVENTS = 20, 100
_DIM, _HEADS = 64, 4

FILTER = Group(
    "all",
    (
        Condition("attributes.price", {"gte": 10}),
        Group("none", (Condition("categories", {"eq": "category 199"}),)),
    ),
)
BOOSTS = (
    asking.rule("shelves", Condition("categories", {"in": ["category 3", "category 5"]}), 0.5),
    asking.rule("fresh", Condition("published_at", {"gte": 1_768_464_000_000_000}), 0.2),
)
BURY = (asking.rule("brand", Condition("attributes.brand", {"eq": "brand 0"})),)
QUOTA = (asking.quota("categories", 2),)
QUESTIONS: Mapping[str, tuple[Filter, dict[str, Any]]] = {
    "plain": (EVERYTHING, {}),
    "a filter": (FILTER, {}),
    "two boosts": (EVERYTHING, {"rules": BOOSTS}),
    "buried items": (EVERYTHING, {"rules": BURY}),
    "at most two of a category": (EVERYTHING, {"at_most": QUOTA}),
    "all of it": (FILTER, {"rules": BOOSTS + BURY, "at_most": QUOTA}),
}


@dataclass(frozen=True, slots=True)
class Ruling:
    """Seconds of each question, and times those of the plain one."""

    items: int
    indexed: bool
    seconds: Mapping[str, Spread]
    ratios: Mapping[str, Spread]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "items": self.items,
            "indexed": self.indexed,
            "questions": {
                name: {
                    "seconds": self.seconds[name].as_dict(),
                    "ratio": self.ratios[name].as_dict(),
                }
                for name in self.seconds
            },
        }


def measure(items: int, rounds: int, *, progress: ProgressCallback = no_progress) -> Ruling:
    """Recommend to one drawn user from drawn items and a drawn model, the questions in turns."""
    catalogue, _ = drawn_catalogue(Values.drawn(items), progress)
    model = random_model(1, n_items=items, content_dim=catalogue.dimension, dim=_DIM, heads=_HEADS)
    ids = tuple(f"item-{row}" for row in range(items))
    counts = np.random.default_rng(0).integers(0, 100, items)
    made = replace(trained(model), item_ids=ids)
    snapshot = Snapshot.build("drawn", made, catalogue, counts)
    user = build_memory(snapshot, random_past(1, _EVENTS, items), 6 * DAY)
    works = {name: _work(snapshot, user, *each) for name, each in QUESTIONS.items()}
    timed = alternate(works, rounds)
    return Ruling(
        items,
        snapshot.index is not None,
        {name: timed.seconds(name) for name in works},
        {name: timed.ratio(name, "plain") for name in works},
    )


def shown(found: Ruling) -> Table:
    """Return the table of what was measured."""
    retrieval = "an index" if found.indexed else "no index"
    table = Table(title=f"{found.items:,} items, {retrieval}", title_justify="left")
    for column in ("question", "time", "times the plain one"):
        table.add_column(column)
    for name, taken in found.seconds.items():
        table.add_row(name, seconds(taken.median), ratio(found.ratios[name]))
    return table


def _work(
    snapshot: Snapshot, user: UserMemory, wanted: Filter, steering: dict[str, Any]
) -> Callable[[], Ranked]:
    none = np.zeros(0, np.int64)

    def work() -> Ranked:
        allowed = select_items(snapshot, wanted).allowed
        steered = steer_items(snapshot, allowed=allowed, limit=_LIMIT, **steering)
        return recommend(
            snapshot,
            user,
            limit=_LIMIT,
            allowed=allowed,
            excluded=none,
            steering=steered.steering,
        )

    return work
