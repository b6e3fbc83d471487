"""Actions of a person on the page, by what is written on it."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.support.server import Server


def stored(server: Server) -> list[Any]:
    """Content of the server's store: its events by number, the rest as lists."""
    paths = ("users", "items", "models", "jobs", "scenarios", "users/u4/history")
    with server.client() as http:
        lists = [http.get(f"/v1/{path}").text for path in paths]
        return [*lists, re.findall("^heed_events.*$", http.get("/metrics").text, re.MULTILINE)]


def open_tab(page: Page, name: str) -> None:
    """Open one of the tabs, and wait until everything on it is there."""
    tab = page.get_by_role("tab", name=name, exact=True)
    tab.click()
    # The page is told of the new address some time after the click; then it selects the tab and
    # sends its requests at once. Until then it is settled, on the old tab.
    expect(tab).to_have_attribute("aria-selected", "true")
    settled(page)


def settled(page: Page) -> None:
    """Wait until every question that the page has sent is answered and shown."""
    expect(page.locator("main")).to_have_attribute("aria-busy", "false")


def results(page: Page) -> Locator:
    return page.locator("#results > li")


def recommended(page: Page) -> Locator:
    """Recommendations to the user, in rows or in one list."""
    return page.locator("#rows li[data-item], #recommended > li")


def stored_events(page: Page) -> Locator:
    """The events of the user, without trials."""
    return page.locator("#history > li:not(.trial)")


def trials(page: Page) -> Locator:
    """Events that were tried for the user and are not stored."""
    return page.locator("#history > li.trial")


def recommend_in_rows(page: Page, rows: bool) -> None:
    """Ask for rows, or for one list; no pointer is used, since a page that loads moves the box."""
    expect(page.locator("#person")).to_have_attribute("data-shown", re.compile("."))
    box = page.get_by_label("recommend in rows")
    if box.is_checked() != rows:
        box.evaluate("box => box.click()")
    expect(box).to_be_checked(checked=rows)
    settled(page)


def choose(page: Page, user: str) -> None:
    """Show a user, with one list of recommendations, and wait until all about them is there."""
    recommend_in_rows(page, False)
    page.get_by_label("User", exact=True).fill(user)
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.locator("#person")).to_have_attribute("data-shown", user)
    expect(page.get_by_role("heading", name=f"Recommended for {user}", exact=True)).to_be_visible()
    settled(page)
    expect(page.locator("#recommended > li").first).to_be_visible()


def search(page: Page, query: str) -> None:
    """Search, and wait for the results."""
    page.get_by_role("searchbox").fill(query)
    expect(page.get_by_role("heading", name=f"Results for “{query.strip()}”")).to_be_visible()
    settled(page)


def attempt(card: Locator) -> None:
    """Press the button of a card that tries its item, and wait until the page has taken it in."""
    card.get_by_role("button", name=re.compile("^Try ")).click()
    settled(card.page)


def ask_why(page: Page) -> None:
    """Open what the score of the first recommendation is made of, and its picture."""
    recommended(page).first.get_by_role("button", name=re.compile("^Why ")).click()
    settled(page)
    expect(page.locator("#events .cell").first).to_be_visible()


def amounts(page: Page) -> list[float]:
    cells = page.locator("#contributions td[data-adds]")
    return [float(text) for text in cells.evaluate_all("all => all.map(one => one.dataset.adds)")]


def score(page: Page) -> float:
    total = page.locator("#contributions tr.total td[data-score]")
    return float(total.get_attribute("data-score") or "nan")


def audit(page: Page) -> list[Any]:
    """Faults that axe-core finds; the page's context must bypass its Content-Security-Policy."""
    settled(page)  # half of a list that is being replaced is neither the old nor the new
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text())
    # Every rule runs. It lists one element that passes a rule; to list all takes two thirds
    # of the time.
    found = page.evaluate("axe.run({resultTypes: ['violations']})")
    assert len(found["passes"]) > 20
    return [
        (wrong["id"], [node["html"] for node in wrong["nodes"]]) for wrong in found["violations"]
    ]


def assert_fits(page: Page, width: int) -> None:
    """The page needs no horizontal scrolling, and shows its buttons whole, but in sideways rows."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Buttons of a closed part have no width.
    edges = page.locator("button:not(#rows .cards button)").evaluate_all(
        """all => all.map(one => one.getBoundingClientRect()).filter(box => box.width > 0)
        .map(box => [box.left, box.right])"""
    )
    assert edges
    assert [edge for edge in edges if edge[0] < 0 or edge[1] > width] == []
