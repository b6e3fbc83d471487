"""What a person does with the page, by what is written on it."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect


def results(page: Page) -> Locator:
    """What the search found."""
    return page.locator("#results > li")


def recommended(page: Page) -> Locator:
    """What is recommended to the user."""
    return page.locator("#recommended > li")


def choose(page: Page, user: str) -> None:
    """Show a user and wait until everything about them is there."""
    page.get_by_label("User", exact=True).fill(user)
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.locator("#person")).to_have_attribute("data-shown", user)
    expect(recommended(page).first).to_be_visible()


def ask_why(page: Page) -> None:
    """Open what the score of the first recommendation is made of, and where it attends."""
    recommended(page).first.get_by_role("button", name=re.compile("^Why ")).click()
    expect(page.locator("#attention td").first).to_be_visible()


def amounts(page: Page) -> list[float]:
    """What each row of the table adds."""
    cells = page.locator("#contributions td[data-adds]")
    return [float(text) for text in cells.evaluate_all("all => all.map(one => one.dataset.adds)")]


def score(page: Page) -> float:
    """The score that the service gave."""
    total = page.locator("#contributions tr.total td[data-score]")
    return float(total.get_attribute("data-score") or "nan")
