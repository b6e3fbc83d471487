"""Scenarios: saved questions, edited, put back and compared."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.driving import open_tab
from tests.support.server import Server

pytestmark = pytest.mark.changes_data

HOME = {"question": "recommend", "limit": 4, "filter": {"field": "categories", "eq": "space"}}
OTHER = HOME | {"filter": {"field": "categories", "eq": "music"}}


def write(page: Page, scenario: Any) -> None:
    page.get_by_label("Question as JSON").fill(json.dumps(scenario))


def items(side: Locator) -> list[str]:
    found: list[str] = side.evaluate_all("all => all.map(one => one.dataset.item)")
    return found


def test_a_scenario_is_created_changed_and_put_back(page: Page, server: Server) -> None:
    """Saving makes a version; one of before is put back as a new one; all are on the API."""
    open_tab(page, "Scenarios")
    expect(page.locator("#scenarios-note")).to_contain_text("None yet")
    page.get_by_label("Open or begin a scenario").fill("home")
    page.get_by_role("button", name="Open", exact=True).last.click()
    write(page, HOME)
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("alert")).to_contain_text("Saved as version 1")
    expect(page.locator("#scenarios-list a")).to_contain_text("home")
    write(page, OTHER)
    page.get_by_role("button", name="Save as a new version").click()
    expect(page.locator("#scenarios-one h2")).to_contain_text("version 2")
    page.get_by_text("Versions before").click()
    page.get_by_role("button", name="Put version 1 back").click()
    expect(page.locator("#scenarios-one h2")).to_contain_text("version 3")
    with server.client() as http:
        versions = http.get("/v1/scenarios/home/versions").json()["versions"]
    assert [each["scenario"] for each in versions] == [HOME, OTHER, HOME]
    page.reload()
    expect(page.get_by_label("Question as JSON")).to_have_value(json.dumps(HOME, indent=2))


def test_a_scenario_begins_with_a_template(page: Page, server: Server) -> None:
    """Every template is a scenario that the service takes; another one can be chosen first."""
    open_tab(page, "Scenarios")
    links = page.locator("#scenarios-one .list a").evaluate_all("all => all.map(one => one.hash)")
    assert len(links) > 4
    for link in links:
        page.goto(f"{server.url}/{link}")
        page.get_by_role("button", name="Create").click()
        expect(page.locator("#scenarios-one .badge")).to_have_text("version 1")
    with server.client() as http:
        stored = http.get("/v1/scenarios").json()["scenarios"]
    assert len(stored) == len(links)
    assert {each["scenario"]["question"] for each in stored} == {
        "recommend", "search", "similar", "popular", "together", "rows",
    }  # fmt: skip
    page.goto(f"{server.url}/#/scenarios/mine")
    page.get_by_label("Template").select_option(label="New arrivals")
    expect(page.get_by_text("The newest items first.")).to_be_visible()
    assert json.loads(page.get_by_label("Question as JSON").input_value())["by"] == "newest"


def test_two_answers_are_previewed_side_by_side(page: Page, server: Server) -> None:
    """Draft and version in use are answered as by the API, and differences are marked."""
    with server.client() as http:
        http.put("/v1/scenarios/home", json=HOME).raise_for_status()
        page.goto(f"{server.url}/#/scenarios/home")
        write(page, OTHER)
        page.get_by_label("Ask for user").fill("u3")
        page.get_by_role("button", name="Preview both").click()
        left, right = (page.locator(".answer").nth(at).locator("li") for at in (0, 1))
        expect(right).to_have_count(4)
        asked = {name: value for name, value in OTHER.items() if name != "question"}
        draft = http.post("/v1/recommend", json={**asked, "user_id": "u3"}).json()["items"]
        saved = http.post("/v1/scenarios/home", json={"user_id": "u3"}).json()["items"]
    assert items(left) == [item["item_id"] for item in draft]
    assert items(right) == [item["item_id"] for item in saved]
    expect(left.first).to_contain_text("only here")
    write(page, HOME)
    page.get_by_role("button", name="Preview both").click()
    expect(left.first).not_to_contain_text("only here")
    assert items(left) == items(right)


def test_a_scenario_is_deleted_after_a_question(page: Page, server: Server) -> None:
    """A deleted scenario is gone from the list, and its versions can be put back."""
    with server.client() as http:
        http.put("/v1/scenarios/home", json=HOME).raise_for_status()
        page.goto(f"{server.url}/#/scenarios/home")
        page.get_by_role("button", name="Delete this scenario").click()
        page.get_by_role("button", name="Delete it", exact=True).click()
        expect(page.locator("#scenarios-note")).to_contain_text("None yet")
        assert http.get("/v1/scenarios/home").status_code == 404
