"""One visit to the page, from a search to the activation of another model."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.support.driving import amounts, ask_why, choose, recommended, results, score
from tests.support.tiny import World


def test_search_watch_ask_why_and_swap_the_model(page: Page, world: World) -> None:
    """Search, watch, explanation and a change of model each update the page."""
    page.get_by_role("searchbox").press_sequentially("garlic", delay=20)
    expect(results(page).first.locator("mark").first).to_have_text("garlic")
    choose(page, "u4")  # walks through space
    before, events = recommended(page).all_inner_texts(), page.locator("#history > li").count()

    found = results(page).first.locator("h3").inner_text()
    results(page).first.get_by_role("button", name=re.compile("^Watch ")).click()
    expect(page.locator("#history > li")).to_have_count(events + 1)
    expect(page.locator("#history > li").first).to_contain_text(f"watch {found}")
    expect(recommended(page)).not_to_have_text(before, use_inner_text=True)

    ask_why(page)
    bars = page.locator("#contributions .signed > svg:first-child rect")
    assert bars.count() == len(amounts(page))
    assert sum(amounts(page)) == pytest.approx(score(page), abs=1e-3)
    # A bar is as wide as its amount, by one scale: half the width for the largest.
    widths = bars.evaluate_all("all => all.map(one => Number(one.getAttribute('width')))")
    largest = max(map(abs, amounts(page)))
    assert widths == pytest.approx([50 * abs(one) / largest for one in amounts(page)], abs=1e-6)
    heads = page.locator("#attention thead th[scope=col]").count() - 1
    rows = page.locator("#attention tbody tr")
    assert heads >= 1
    assert page.locator("#attention tbody td").count() == heads * rows.count()
    expect(page.locator("#attention tbody")).to_contain_text(found)

    first, old = recommended(page).all_inner_texts(), score(page)
    row = page.locator("#models tbody tr", has_text=world.second)
    expect(row).to_contain_text(re.compile(r"0\.\d{3}"))  # its metrics
    row.get_by_role("button", name="serve this").click()
    expect(page.locator("#version")).to_have_text(world.second)
    expect(recommended(page)).not_to_have_text(first, use_inner_text=True)
    expect(page.locator("#contributions")).not_to_contain_text(f"{old:.3f}")
    assert sum(amounts(page)) == pytest.approx(score(page), abs=1e-3)
    expect(page.locator("#latency tbody tr").first).to_contain_text("total")
