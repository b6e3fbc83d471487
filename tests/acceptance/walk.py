"""A script of a new user's walk over Online Retail, and the expectations of a walk.

`make walk ONLINE_RETAIL=DIR` runs it; `test_walk.py` checks the same expectations over the exports
of an invented shop.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from tests.support.shop_sales import online_retail
from tests.support.walk import Walk

Pages = list[dict[str, Any]]


def stored_once(walk: Walk) -> None:
    """Dry runs store nothing, overlapping nights are stored as their union, bad rows are kept."""
    assert walk.dry == [0] * len(walk.dry)
    assert walk.nights == [walk.exports.sales[0], walk.exports.stored]
    assert walk.bad == list(walk.exports.bad_rows)


def undo_restores(walk: Walk) -> None:
    """Undoing the last night leaves the first; in the other order, both are their union again."""
    assert walk.undone == walk.exports.sales[0]
    assert walk.again == walk.exports.stored


def as_shown(walk: Walk, answer: Any) -> None:
    """The answer to the request has all that docs/start.md shows of it."""
    assert _fits(walk.guide.shown, answer)


def rows_within_a_price(walk: Walk, pages: Pages) -> None:
    """Every page has as many rows as requested, no item twice, and no item above the price."""
    body = walk.guide.body
    for page in pages:
        assert len(page["rows"]) == body["rows"]
        ids = [item["item_id"] for item in _items(page)]
        assert len(set(ids)) == len(ids)
        assert max(walk.exports.prices[each] for each in ids) < body["filter"]["lt"]


def few_of_a_department(walk: Walk, pages: Pages) -> None:
    """No row has more items of a department than allowed."""
    (quota,) = walk.guide.body["at_most"]
    for page in pages:
        for row in page["rows"]:
            shared = Counter(name for item in row["items"] for name in _departments(item))
            assert max(shared.values()) <= quota["count"]


def boosts_are_parts(walk: Walk, pages: Pages) -> None:
    """A boost raises the items that its rule holds for, and no others, and all parts add up."""
    (rule,) = walk.guide.body["rules"]
    boosted = 0
    for item in (item for page in pages for item in _items(page)):
        holds = rule["when"]["eq"] in _departments(item)
        assert [each["name"] for each in item.get("rules", [])] == [rule["name"]] * holds
        assert all(each["boost"] == rule["boost"] for each in item.get("rules", []))
        assert (item["parts"]["rules"] > 0) == holds
        assert abs(sum(item["parts"].values()) - item["score"]) < 1e-4 * max(1, abs(item["score"]))
        boosted += holds
    assert boosted


def reasons_are_true(walk: Walk, pages: Pages) -> None:
    """A reason names an item of the history, once on a page, that raised all scores of its row."""
    rows = 0
    for page in pages:
        bought = {event["event_id"]: event["item_id"] for event in page["history"]}
        because = [row for row in page["rows"] if row["reason"]["kind"] == "because"]
        named = [row["reason"]["item_id"] for row in because]
        assert len(set(named)) == len(named)
        for row in because:
            assert {bought[each] for each in row["reason"]["event_ids"]} == {
                row["reason"]["item_id"]
            }
            for item in row["items"]:
                events = [each["event_id"] for each in item["explanation"]]
                assert len(set(events)) == len(events)
                assert {bought[each] for each in events} == {row["reason"]["item_id"]}
                assert sum(each["contribution"] for each in item["explanation"]) > 0
        rows += len(because)
    assert rows >= len(pages)


OF_STORE: tuple[Callable[[Walk], None], ...] = (stored_once, undo_restores)
OF_PAGES: tuple[Callable[[Walk, Pages], None], ...] = (
    rows_within_a_price,
    few_of_a_department,
    boosts_are_parts,
    reasons_are_true,
)


def _items(page: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for row in page["rows"] for item in row["items"]]


def _departments(item: dict[str, Any]) -> list[str]:
    names: list[str] = item["fields"]["categories"]
    return names


def _fits(shown: Any, answer: Any) -> bool:
    """Whether an answer has all fields of the shown one; each member of a list, some alike."""
    if isinstance(shown, dict):
        # Only a model whose held-out events it helps has a similarity part.
        names = [name for name in shown if name != "similarity"]
        return isinstance(answer, dict) and all(
            name in answer and _fits(shown[name], answer[name]) for name in names
        )
    if isinstance(shown, list):
        return isinstance(answer, list) and all(
            any(_fits(each, other) for other in answer) for each in shown
        )
    if isinstance(shown, str):
        return isinstance(answer, str)
    return isinstance(answer, int | float)


# ---------------------------------------------------------------------- the command line


def main(folder: Path, training: Sequence[str], customers: int | None) -> bool:
    """Walk over Online Retail; print the seconds of each step, and which expectations held."""
    out = Console()
    with tempfile.TemporaryDirectory(prefix="heed-walk-") as place:
        with out.status("writing the exports"):
            walk = Walk(online_retail(folder, customers), Path(place), training, fresh=True)
        out.print(f"{sum(walk.exports.stored.values()):,} lines of orders, "
                  f"{len(walk.exports.prices):,} products")  # fmt: skip
        with out.status("walking: the commands of docs/start.md"):
            walk.store()
            walk.train()
            with walk.serve() as http:
                answer, pages = walk.ask(http), walk.pages(http)
    steps = Table("step", Column("seconds", justify="right"))
    for name, seconds in walk.steps:
        steps.add_row(name, f"{seconds:.1f}")
    steps.add_row("in all", f"{sum(seconds for _, seconds in walk.steps):.1f}")
    out.print(steps)
    checks: list[partial[None]] = [
        *(partial(each, walk) for each in OF_STORE),
        partial(as_shown, walk, answer),
        *(partial(each, walk, pages) for each in OF_PAGES),
    ]
    held = Table("expectation", "held")
    failed = 0
    for check in checks:
        try:
            check()
            result = "yes"
        except AssertionError as error:
            failed += 1
            result = f"no: {traceback.extract_tb(error.__traceback__)[-1].line}"
        held.add_row((check.func.__doc__ or "").splitlines()[0], result)
    out.print(held)
    return not failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="has purchases.csv.xz of Online Retail")
    parser.add_argument("--customers", type=int, help="of a sample; all by default")
    parser.add_argument("--training", default="", help="further options of heed train")
    given = parser.parse_args()
    sys.exit(not main(given.folder, shlex.split(given.training), given.customers))
