"""The page of a service behind a guard that requires an API key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.driving import (
    attempt,
    choose,
    recommended,
    results,
    search,
    stored_events,
    trials,
)
from tests.support.server import Server

READS, WRITES = "reads-only", "reads-and-writes"


def guard(route: Route) -> None:
    """Continue a request whose key permits it; answer 401 without a key, 403 for a weak one."""
    asked = route.request
    key = asked.headers.get("authorization", "").removeprefix("Bearer ")
    writes = asked.url.endswith("/v1/events")
    if key == WRITES or (key == READS and not writes):
        route.continue_()
    elif key == READS:
        route.fulfill(status=403, content_type="text/html", body="<h1>no</h1>")
    else:
        problem = '{"title": "Unauthorized", "detail": "A key is needed."}'
        route.fulfill(status=401, content_type="application/problem+json", body=problem)


@pytest.fixture
def guarded(browser: Browser, server: Server) -> Iterator[Page]:
    """Yield the page of a guarded service; its console may report 401 and 403 alone."""
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.set_default_timeout(15_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.route("**/v1/**", guard)
    page.goto(server.url)
    yield page
    page.close()
    assert wrong
    assert all("status of 401" in said or "status of 403" in said for said in wrong), wrong


def give(page: Page, key: str) -> None:
    """Write a key into the form and send it."""
    with page.expect_navigation():
        page.get_by_label("API key").fill(key)
        page.get_by_label("API key").press("Enter")


def test_page_prompts_for_stores_and_replaces_the_api_key(guarded: Page) -> None:
    """Without a key the page is empty; a missing, wrong or weak key each get their own message."""
    page = guarded
    form = page.get_by_role("region", name="A key is needed")
    expect(form).to_contain_text("answers only those who have one")
    expect(page.get_by_label("API key")).to_be_focused()
    expect(page.get_by_role("button", name="Change key")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.get_by_label("User", exact=True).input_value() == ""
    expect(page.locator("#history > li")).to_have_count(0)

    give(page, "guessed")
    expect(page.get_by_role("region", name="The key was not accepted")).to_be_visible()

    give(page, READS)
    search(page, "rocket")
    expect(results(page).first).to_be_visible()
    expect(page.locator("#key")).to_be_hidden()
    page.get_by_role("searchbox").fill("")
    choose(page, "u3")
    page.get_by_label("Record what I try as events").check()
    attempt(recommended(page).first)
    expect(page.get_by_role("region", name="The key is not enough")).to_be_visible()

    page.get_by_role("button", name="Change key").click()
    give(page, WRITES)
    choose(page, "u3")
    page.get_by_role("button", name="Record as events").click()  # the trial is still there
    expect(trials(page)).to_have_count(0)
    expect(stored_events(page)).to_have_count(13)
    expect(page.locator("#key")).to_be_hidden()


def test_api_key_is_stored_per_tab_and_never_in_a_url(guarded: Page) -> None:
    """The key survives a reload, can be forgotten, and is in no URL and no local storage."""
    page = guarded
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    give(page, WRITES)
    page.reload()
    expect(recommended(page).first).to_be_visible()
    expect(page.locator("#key")).to_be_hidden()
    assert asked
    assert not any(WRITES in url for url in [*asked, page.url])
    assert page.evaluate("localStorage.length") == 0
    page.get_by_role("button", name="Change key").click()
    with page.expect_navigation():
        page.get_by_role("button", name="Forget it").click()
    expect(page.get_by_role("region", name="A key is needed")).to_be_visible()
    assert WRITES not in page.evaluate("JSON.stringify(sessionStorage)")
