"""The page of a service that requires an API key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.driving import (
    attempt,
    choose,
    recommended,
    results,
    search,
    stored_events,
    trials,
)
from tests.support.heed_process import HeedProcess
from tests.support.server import Server

pytestmark = pytest.mark.changes_data

Create = Callable[..., str]


@pytest.fixture
def create(server: Server, tmp_path: Path) -> Create:
    """A function that creates a key with scopes beside the running server, and returns it."""

    def create(*scopes: str) -> str:
        options = [part for scope in scopes for part in ("--scope", scope)]
        log = tmp_path / f"{'-'.join(scopes)}.log"
        command = ("keys", "create", "--data", server.data, "--name", "page")
        process = HeedProcess(*command, *options, log=log)
        assert process.wait() == 0, process.log()
        return process.out().strip()

    return create


@pytest.fixture
def reads(create: Create) -> str:
    return create("read")


@pytest.fixture
def writes(create: Create) -> str:
    return create("read", "write")


@pytest.fixture
def guarded(browser: Browser, server: Server, reads: str) -> Iterator[Page]:
    """Yield the page of a service with keys; its console may report only 401 and 403."""
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.set_default_timeout(15_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
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


def test_page_prompts_for_stores_and_replaces_the_api_key(
    guarded: Page, reads: str, writes: str
) -> None:
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

    give(page, reads)
    search(page, "rocket")
    expect(results(page).first).to_be_visible()
    expect(page.locator("#key")).to_be_hidden()
    page.get_by_role("searchbox").fill("")
    choose(page, "u3")
    page.get_by_label("Record what I try as events").check()
    attempt(recommended(page).first)
    expect(page.get_by_role("region", name="The key is not enough")).to_be_visible()

    page.get_by_role("button", name="Change key").click()
    give(page, writes)
    choose(page, "u3")
    page.get_by_role("button", name="Record as events").click()  # the trial is still there
    expect(trials(page)).to_have_count(0)
    expect(stored_events(page)).to_have_count(13)
    expect(page.locator("#key")).to_be_hidden()


def test_api_key_is_stored_per_tab_and_never_in_a_url(guarded: Page, writes: str) -> None:
    """The key survives a reload, can be forgotten, and is in no URL and no local storage."""
    page = guarded
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    give(page, writes)
    page.reload()
    expect(recommended(page).first).to_be_visible()
    expect(page.locator("#key")).to_be_hidden()
    assert asked
    assert not any(writes in url for url in [*asked, page.url])
    assert page.evaluate("localStorage.length") == 0
    page.get_by_role("button", name="Change key").click()
    with page.expect_navigation():
        page.get_by_role("button", name="Forget it").click()
    expect(page.get_by_role("region", name="A key is needed")).to_be_visible()
    assert writes not in page.evaluate("JSON.stringify(sessionStorage)")


def test_live_figures_need_an_admin_key(guarded: Page, reads: str, create: Create) -> None:
    """The page asks for /metrics once with a key that may not read it, and gets it with another."""
    page = guarded
    admin = create("admin")
    asked: list[int] = []
    page.on(
        "response",
        lambda answer: asked.append(answer.status) if answer.url.endswith("/metrics") else None,
    )
    give(page, reads)
    expect(recommended(page).first).to_be_visible()
    page.wait_for_timeout(2_000)  # in which it would ask some times more
    assert asked.count(403) == 1
    page.get_by_role("button", name="Change key").click()
    with page.expect_response(lambda answer: answer.url.endswith("/metrics") and answer.ok):
        give(page, admin)
    expect(page.locator("#key")).to_be_hidden()
