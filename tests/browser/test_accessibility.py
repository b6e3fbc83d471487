"""Every tab for everybody: by keyboard, by axe-core, in both schemes, on a phone."""

from __future__ import annotations

import re
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.driving import (
    ask_why,
    assert_fits,
    attempt,
    audit,
    choose,
    open_tab,
    recommend_in_rows,
    recommended,
    results,
    search,
    settled,
    trials,
)
from tests.support.server import Server

TABS = ("Explore", "Catalogue", "People", "Models", "Scenarios")


def fill(page: Page, tab: str) -> None:
    open_tab(page, tab)
    if tab == "Explore":
        choose(page, "u3")
        recommend_in_rows(page, True)
        expect(page.locator("#rows h3").first).to_be_visible()
        page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
        attempt(recommended(page).first)
        expect(trials(page)).to_have_count(1)
        expect(page.locator("#growth-line canvas")).to_be_visible()
        page.evaluate("document.getElementById('key').hidden = false")
    elif tab == "Catalogue":
        page.get_by_role("link", name="space-00").click()
        expect(page.locator("#catalogue-one .panel a").first).to_be_visible()
        page.get_by_text("Every field as JSON").click()
        expect(page.get_by_label(re.compile("^Item as JSON"))).to_be_visible()
    elif tab == "People":
        page.get_by_role("link", name="u3", exact=True).click()
        expect(page.locator("#people-history > li").first).to_be_visible()
        page.get_by_text("Edit the profile").click()
        page.get_by_label("Search this history").fill("moon")
        expect(page.locator("#people-found > li").first).to_be_visible()
    elif tab == "Scenarios":
        page.get_by_label("Open or begin a scenario").fill("home")
        page.locator("#new-scenario button").click()
        page.get_by_role("button", name="Preview both").click()
        expect(page.locator(".answer li").last).to_be_visible()
    else:
        expect(page.locator("#version-list > li")).to_have_count(2)


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 320), ("dark", 390), ("light", 768), ("dark", 1440)]
)
def test_every_tab_passes_the_accessibility_audit(
    browser: Browser, server: Server, scheme: Literal["light", "dark"], width: int
) -> None:
    """axe-core finds nothing wrong, no horizontal scrolling is needed, and buttons are whole."""
    # It has to be put into the page, which allows no scripts but its own.
    context = browser.new_context(
        bypass_csp=True,
        color_scheme=scheme,
        reduced_motion="reduce",  # the contrast of a colour in transition is that of neither
        viewport={"width": width, "height": 900},
    )
    page = context.new_page()
    page.goto(server.url)
    for tab in TABS:
        fill(page, tab)
        assert audit(page) == [], tab
        assert_fits(page, width)
    open_tab(page, "Explore")
    search(page, "rocket")
    assert audit(page) == []
    page.get_by_role("searchbox").fill("")
    choose(page, "u4")
    ask_why(page)
    page.get_by_role("button", name=re.compile("^Score without ")).first.click()
    expect(page.locator(".told").first).to_contain_text("without it")
    assert audit(page) == []
    context.close()


def test_the_person_comes_first_on_a_phone(browser: Browser, server: Server) -> None:
    """On a phone the person stands above all figures, which open on request."""
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(server.url)
    expect(recommended(page).first).to_be_visible()
    tops = [
        (page.locator(name).bounding_box() or {"y": -1.0})["y"]
        for name in ("#person", "#pulse", "#stage")
    ]
    assert tops == sorted(tops)
    assert 0 < tops[0] < 150
    expect(page.locator("#median")).to_be_hidden()
    page.locator("#pulse > summary").click()
    expect(page.locator("#median")).to_be_visible()
    page.close()


def test_tabs_are_walked_with_arrow_keys(page: Page) -> None:
    """Arrow keys, Home and End move between tabs; Tab leaves the list of tabs."""
    page.get_by_role("tab", name="Explore").focus()
    for key, tab in (
        ("ArrowRight", "Catalogue"),
        ("ArrowRight", "People"),
        ("ArrowRight", "Models"),
        ("ArrowRight", "Scenarios"),
        ("ArrowRight", "Explore"),
        ("ArrowLeft", "Scenarios"),
        ("Home", "Explore"),
        ("End", "Scenarios"),
    ):
        page.keyboard.press(key)
        expect(page.get_by_role("tab", name=tab)).to_be_focused()
        expect(page.get_by_role("tabpanel", name=tab)).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="API")).to_be_focused()
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"


def test_the_page_can_be_used_by_keys_alone(page: Page) -> None:
    """Skipping, choosing a user, searching, a trial and an explanation work by keyboard."""

    def walk(name: str) -> None:
        """Press Tab until the focus is on a control of this name."""
        for _ in range(120):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                """() => { const on = document.activeElement;
                return on.getAttribute('aria-label') ?? on.labels?.[0]?.textContent ??
                    on.textContent; }"""
            )
            if re.match(name, focused.strip()):
                return
        raise AssertionError(f"no control named {name}")

    expect(recommended(page).first).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    expect(page.get_by_role("tabpanel", name="Explore")).to_be_focused()
    walk("User")
    page.keyboard.press("Control+a")
    page.keyboard.type("u3")
    page.keyboard.press("Enter")
    expect(page.locator("#person")).to_have_attribute("data-shown", "u3")
    walk("What are you looking for")
    page.keyboard.type("rocket")
    expect(results(page).first).to_be_visible()
    settled(page)  # an answer that comes later replaces the controls among which the focus is
    walk("Try ")
    page.keyboard.press("Enter")
    expect(trials(page)).to_have_count(1)
    settled(page)
    walk("Why ")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name=re.compile("^Why "))).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
