"""One visit to the page, from a search to the activation of another model."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.support.driving import (
    amounts,
    ask_why,
    attempt,
    choose,
    open_tab,
    recommended,
    results,
    score,
    settled,
    trials,
)
from tests.support.tiny import World

pytestmark = pytest.mark.changes_data


def test_search_try_ask_why_and_swap_the_model(page: Page, world: World) -> None:
    """Search, a trial, explanation and a change of model each update the page."""
    choose(page, "u4")  # walks through space
    before = recommended(page).all_inner_texts()
    page.get_by_role("searchbox").press_sequentially("garlic", delay=20)
    expect(results(page).first.locator("mark").first).to_have_text("garlic")
    found = results(page).first.locator("h3").inner_text()
    attempt(results(page).first)
    expect(trials(page).first).to_contain_text(found)
    page.get_by_role("button", name="Back to what is recommended").click()
    settled(page)
    expect(recommended(page).first).to_be_visible()
    assert recommended(page).all_inner_texts() != before

    ask_why(page)
    bars = page.locator("#contributions .signed > svg:first-child rect")
    assert bars.count() == len(amounts(page))
    assert sum(amounts(page)) == pytest.approx(score(page), abs=1e-3)
    # A bar is as wide as its amount, by one scale: half the width for the largest.
    widths = bars.evaluate_all("all => all.map(one => Number(one.getAttribute('width')))")
    largest = max(map(abs, amounts(page)))
    assert widths == pytest.approx([50 * abs(one) / largest for one in amounts(page)], abs=1e-6)
    expect(page.locator("#picture-caption")).to_contain_text("1 trial is not stored")
    expect(page.locator("#contributions tbody")).to_contain_text(found)
    page.get_by_role("button", name="Close").click()

    first = recommended(page).all_inner_texts()
    open_tab(page, "Models")
    row = page.locator(f"[data-version='{world.second}']")
    expect(row).to_contain_text(re.compile(r"0\.\d{3}"))  # its metrics
    row.get_by_role("button", name="Serve version").click()
    expect(row.get_by_role("button", name="is served now")).to_be_disabled()
    open_tab(page, "Explore")
    expect(page.locator("#version")).to_have_text(world.second)
    expect(recommended(page)).not_to_have_text(first, use_inner_text=True)
