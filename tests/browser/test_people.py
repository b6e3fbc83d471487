"""People: histories, profiles and forgetting."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.support.driving import open_tab
from tests.support.server import Server

pytestmark = pytest.mark.changes_data


def test_people_are_listed_page_by_page_and_opened(page: Page, server: Server) -> None:
    """Everybody is listed; a person's page shows their events, earlier ones on request."""
    events = [{"user_id": f"more-{n:02}", "item_id": "space-00"} for n in range(30)]
    events += [{"user_id": "u7", "item_id": "music-01"} for _ in range(60)]
    with server.client() as http:
        http.post("/v1/events", json={"events": events}).raise_for_status()
        history = http.get("/v1/users/u7/history?limit=100").json()["events"]
    open_tab(page, "People")
    listed = page.locator("#people-list > li")
    expect(listed).to_have_count(50)
    page.get_by_role("button", name="Show more").click()
    expect(listed).to_have_count(70)
    expect(page.get_by_role("button", name="Show more")).to_be_hidden()
    page.get_by_role("link", name="u7", exact=True).click()
    expect(page.get_by_role("heading", name="u7")).to_be_visible()
    rows = page.locator("#people-history > li time")
    expect(rows).to_have_count(50)
    page.get_by_role("button", name="Show earlier events").click()
    expect(page.get_by_role("button", name="Show earlier events")).to_be_hidden()
    expect(rows).to_have_count(len(history))
    times = rows.evaluate_all("all => all.map(one => one.dateTime)")
    assert times == [event["timestamp"] for event in history]
    assert page.url.endswith("#/people/u7")


def test_people_are_found_by_the_beginning_of_their_id(page: Page, server: Server) -> None:
    """Typing lists the ids that begin so, with their counts; here and where Explore asks."""
    events = [{"user_id": f"zoe-{n}", "item_id": "space-00"} for n in (1, 2, 2)]
    with server.client() as http:
        http.post("/v1/events", json={"events": events}).raise_for_status()
    open_tab(page, "People")
    expect(page.get_by_role("heading", name="Choose a person")).to_be_visible()
    page.get_by_label("Find by the beginning of the id").fill("zoe")
    listed = page.locator("#people-list > li")
    expect(listed).to_have_count(2)
    expect(listed.nth(0)).to_contain_text("zoe-1")
    expect(listed.nth(1)).to_contain_text("2 events")
    page.get_by_label("Find by the beginning of the id").fill("zoe-9")
    expect(page.locator("#people-note")).to_have_text("No id begins with “zoe-9”.")
    open_tab(page, "Explore")
    page.get_by_label("User", exact=True).fill("zo")
    options = page.locator("#users > option")
    expect(options).to_have_count(2)
    assert [one.get_attribute("value") for one in options.all()] == ["zoe-1", "zoe-2"]


def test_a_history_is_searched(page: Page, server: Server) -> None:
    """Typing shows the events that match, best first; an empty box shows the history."""
    titles = {"quartz": "Quartz clocks", "walls": "Garden walls", "roofs": "Roofs of slate"}
    with server.client() as http:
        items = [{"item_id": id_, "title": title} for id_, title in titles.items()]
        http.post("/v1/items", json={"items": items}).raise_for_status()
        events = [{"user_id": "finder", "item_id": id_, "type": "watch"} for id_ in titles]
        http.post("/v1/events", json={"events": events}).raise_for_status()
    page.goto(f"{server.url}/#/people/finder")
    expect(page.locator("#people-history > li")).to_have_count(3)
    box = page.get_by_role("searchbox", name="Search this history")
    box.focus()
    page.keyboard.type("quatrz")  # is corrected
    found = page.locator("#people-found > li")
    expect(found).to_have_count(1)
    expect(found.locator("mark")).to_have_text("Quartz")
    expect(found).to_contain_text("Matches in title.")
    expect(page.locator("#people-history")).to_be_hidden()
    expect(page.locator("#people-found-note")).to_have_text("1 event, the best match first.")
    page.get_by_role("button", name="Forget watch Quartz clocks").click()
    page.get_by_role("button", name="Forget it", exact=True).last.click()
    expect(found).to_have_count(0)
    box.fill("")
    expect(page.locator("#people-history > li")).to_have_count(2)
    expect(page.locator("#people-found-note")).to_be_hidden()


def test_an_event_is_forgotten_after_a_question(page: Page, server: Server) -> None:
    """An event is deleted once that is confirmed, and kept when it is not."""
    with server.client() as http:

        def stored() -> int:
            return len(http.get("/v1/users/u2/history").json()["events"])

        before = stored()
        page.goto(f"{server.url}/#/people/u2")
        rows = page.locator("#people-history > li")
        expect(rows).to_have_count(before)
        rows.first.get_by_role("button", name=re.compile("^Forget ")).click()
        expect(page.get_by_role("dialog", name="Forget this event?")).to_be_visible()
        expect(page.get_by_role("button", name="Cancel")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert stored() == before
        rows.first.get_by_role("button", name=re.compile("^Forget ")).click()
        page.get_by_role("button", name="Forget it", exact=True).last.click()
        expect(rows).to_have_count(before - 1)
        assert stored() == before - 1


def test_a_person_is_forgotten_after_a_question(page: Page, server: Server) -> None:
    """A person is deleted once that is confirmed; Escape keeps them."""
    page.goto(f"{server.url}/#/people/u5")
    forget = page.get_by_role("button", name="Forget this user")
    forget.click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="u5")).to_be_visible()
    forget.click()
    page.get_by_role("button", name="Forget everything").click()
    expect(page.get_by_role("alert")).to_contain_text("u5 is forgotten: 12 events deleted.")
    expect(page.get_by_role("link", name="u5", exact=True)).to_have_count(0)
    with server.client() as http:
        assert http.get("/v1/users/u5").status_code == 404
        assert http.get("/v1/users/u5/history").json()["events"] == []


def test_profiles_are_edited_as_json(page: Page, server: Server, refusals: list[int]) -> None:
    """A profile is saved as written; what is no JSON is not sent."""
    refusals.append(404)  # there is no profile yet
    page.goto(f"{server.url}/#/people/u6")
    page.get_by_text("Edit the profile").click()
    editor = page.get_by_label("Profile as JSON")
    editor.fill('{"attributes": {"country": "NL"}, "interests": ["space"]')
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#people-profile .errors")).to_contain_text("not JSON")
    editor.fill('{"attributes": {"country": "NL"}, "interests": ["space"]}')
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#people-profile dl")).to_contain_text("space")
    with server.client() as http:
        profile = http.get("/v1/users/u6").json()
    assert (profile["attributes"], profile["interests"]) == ({"country": "NL"}, ["space"])


def test_ids_of_any_kind_have_an_address(page: Page, server: Server) -> None:
    """An id with slashes, markup and spaces is opened, linked and explored."""
    odd = "a/b #<b>%20é " + "x" * 120
    with server.client() as http:
        event = {"user_id": odd, "item_id": "space-00", "type": "watch"}
        http.post("/v1/events", json={"events": [event]}).raise_for_status()
    page.goto(f"{server.url}/#/people")
    page.get_by_label("Find by the beginning of the id").fill(odd)
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#people-title")).to_contain_text(odd)
    expect(page.locator("#people-history > li")).to_have_count(1)
    page.reload()
    expect(page.locator("#people-title")).to_contain_text(odd)
    page.get_by_role("link", name="Explore as this user").click()
    expect(page.locator("#person")).to_have_attribute("data-shown", odd)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1300
