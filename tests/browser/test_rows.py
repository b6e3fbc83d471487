"""Rows of a home page, as Explore opens with them."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.support.driving import attempt, recommend_in_rows, recommended, trials
from tests.support.server import Server


def test_rows_are_those_of_the_api_each_with_its_reason(page: Page, server: Server) -> None:
    """Rows, their reasons and their items are those of POST /v1/rows; each can be walked by key."""
    expect(page.locator("#rows h3").first).to_be_visible()
    user = page.get_by_label("User", exact=True).input_value()
    with server.client() as http:
        asked = {"user_id": user, "rows": 6, "limit": 10}
        rows = http.post("/v1/rows", json=asked).json()["rows"]
    assert page.locator("#rows h3.row-reason").all_inner_texts() == [
        row["reason"]["text"] for row in rows
    ]
    shown = recommended(page).evaluate_all("all => all.map(one => one.dataset.item)")
    assert shown == [item["item_id"] for row in rows for item in row["items"]]
    walked = page.locator("#rows .cards").first
    walked.focus()
    before = walked.evaluate("list => list.scrollLeft")
    if walked.evaluate("list => list.scrollWidth > list.clientWidth + 40"):
        page.keyboard.press("ArrowRight")
        page.wait_for_function("([list, before]) => list.scrollLeft > before",
                               arg=[walked.element_handle(), before])  # fmt: skip


def test_a_trial_and_a_filter_change_the_rows(page: Page) -> None:
    """Rows take trials into account and leave tried items out, and keep to the filters."""
    expect(page.locator("#rows h3").first).to_be_visible()
    item = recommended(page).first.get_attribute("data-item")
    attempt(recommended(page).first)
    expect(trials(page)).to_have_count(1)
    tried = page.locator(f"#rows li[data-item='{item}']")
    expect(page.locator("#rows h3").first).to_be_visible()
    expect(tried).to_have_count(0)
    page.locator("#filters > summary").click()
    page.get_by_role("group", name="categories").get_by_role("button", name="music").click()
    expect(page.locator("#rows li:not([data-item^='music-'])")).to_have_count(0)
    expect(recommended(page).first).to_be_visible()
    recommend_in_rows(page, False)
    expect(page.locator("#recommended > li").first).to_be_visible()
    expect(page.locator("#rows li")).to_have_count(0)
