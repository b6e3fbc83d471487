"""Scores without one event, computed on the page."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.driving import amounts, ask_why, choose, recommended, score, settled
from tests.support.server import Server
from tests.support.tiny import AT, EACH, GENRES, item_id

pytestmark = pytest.mark.changes_data


def leave_out(row: Locator) -> float:
    """Press the button of a row and return the score shown without its event."""
    button = row.get_by_role("button", name=re.compile("^Score without "))
    expect(button).to_have_attribute("aria-pressed", "false")
    button.press("Enter")
    told = row.locator(".told")
    expect(told).to_contain_text("without it")
    expect(button).to_have_attribute("aria-pressed", "true")
    return float(told.get_attribute("data-without") or "nan")


def test_score_without_an_event_equals_the_score_after_deleting_it(
    page: Page, server: Server
) -> None:
    choose(page, "u3")
    ask_why(page)
    whole, bars = score(page), page.locator("#contributions rect").count()
    target = recommended(page).first.get_attribute("data-item")
    with server.client() as http:
        asked = {"user_id": "u3", "item_ids": [target], "explain": 50}
        (found,) = http.post("/v1/score", json=asked).json()["items"]
    event = found["explanation"][0]["event_id"]  # of the first row that can be left out
    row = page.locator("#contributions tbody tr", has=page.locator(".leave")).first
    without = leave_out(row)
    assert without != pytest.approx(whole, abs=1e-3)
    assert f"{without:.3f} ({without - whole:+.3f})" in row.locator(".told").inner_text()
    assert page.locator("#contributions rect").count() == bars + 1
    side = "positive" if without < whole else "negative"
    expect(row.locator(".never rect")).to_have_class(side)
    expect(page.locator("#why-note")).to_contain_text(f"would be {without:.3f} instead")
    with server.client() as http:
        http.delete(f"/v1/users/u3/history/{event}").raise_for_status()
    page.get_by_label("Temperature").press("ArrowRight")  # asks again
    page.get_by_label("Temperature").press("ArrowLeft")
    settled(page)
    expect(page.locator("#contributions .told:not(:empty)")).to_have_count(0)
    expect(page.locator("#temperature-shown")).to_have_text("1.00")
    expect(page.locator("#why-note")).to_contain_text("Score")
    assert score(page) == pytest.approx(without, abs=5e-3)  # some seconds later


def test_every_event_can_be_left_out(page: Page, server: Server) -> None:
    """Twelve events are listed first and all on request, and contributions sum to the score."""
    days = [f"2025-12-{day:02}T12:00:00Z" for day in range(1, EACH + 1)]
    events = [
        {"user_id": "long", "item_id": item_id(genre, number), "timestamp": at}
        for genre in range(2)
        for number, at in enumerate(days)
        if at < AT
    ]
    with server.client() as http:
        http.post("/v1/events", json={"events": events}).raise_for_status()
    assert len(events) == 2 * EACH <= len(GENRES) * EACH
    choose(page, "long")
    ask_why(page)
    buttons = page.get_by_role("button", name=re.compile("^Score without "))
    expect(buttons).to_have_count(12)
    whole = score(page)
    page.get_by_role("button", name=f"Show all {2 * EACH} events").click()
    expect(buttons).to_have_count(2 * EACH)
    assert sum(amounts(page)) == pytest.approx(score(page), abs=1e-3)
    assert score(page) == pytest.approx(whole, abs=5e-3)
    rows = page.locator("#contributions tbody tr", has=page.locator(".leave"))
    for at in (0, 2 * EACH - 1):
        leave_out(rows.nth(at))
    page.get_by_role("button", name="Show the first 12").click()
    expect(buttons).to_have_count(12)
