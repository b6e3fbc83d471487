"""Pictures, prices, addresses and labels of items, as the settings map them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.driving import results, search
from tests.support.server import Server
from tests.support.tiny import World

PICTURE = "https://pictures.example/lamp.svg"
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30"/>'
FIELDS = (
    "image=attributes.media.picture, price=attributes.price, currency=attributes.currency, "
    "url=attributes.link, subtitle=attributes.maker, Colour=attributes.colour"
)
ITEMS: list[dict[str, Any]] = [
    {
        "item_id": "lamp",
        "title": "zeppelin lamp",
        "attributes": {
            "media": {"picture": PICTURE},
            "price": 1234.5,
            "currency": "EUR",
            "link": "https://shop.example/lamp",
            "maker": "Acme",
            "colour": ["red", "blue"],
        },
    },
    {"item_id": "bare", "title": "zeppelin bare"},
    {
        "item_id": "evil",
        "title": "zeppelin evil",
        "attributes": {"link": "javascript:document.title=1", "media": {"picture": "data:,x"}},
    },
    {
        "item_id": "lost",
        "title": "zeppelin lost",
        "attributes": {"media": {"picture": "https://pictures.example/lost.png"}, "price": "free"},
    },
]


@pytest.fixture
def mapped(world: World, tmp_path: Path) -> Iterator[Server]:
    """A server whose page shows fields of items."""
    with Server(world.copy(tmp_path / "mapped"), page_fields=FIELDS) as server:
        yield server


def test_mapped_fields_are_shown_with_each_item(browser: Browser, mapped: Server) -> None:
    """Pictures have a text alternative and are loaded lazily; only web addresses are followed."""
    with mapped.client() as http:
        http.post("/v1/items", json={"items": ITEMS}).raise_for_status()
        policy = http.get("/").headers["content-security-policy"]
    assert "img-src 'self' https: http:" in policy
    assert "script-src 'self';" in policy
    page = browser.new_page()
    asked: list[str] = []

    def picture(route: Route) -> None:
        asked.append(route.request.url)
        if "lost" in route.request.url:
            route.abort()
        else:
            route.fulfill(body=SVG, content_type="image/svg+xml")

    page.route("https://pictures.example/**", picture)
    page.goto(mapped.url)
    search(page, "zeppelin")
    expect(results(page).nth(3)).to_be_visible()
    lamp, bare, evil, lost = (page.locator(f"[data-item='{item['item_id']}']") for item in ITEMS)
    image = lamp.get_by_role("img", name="Picture of zeppelin lamp")
    expect(image).to_have_attribute("loading", "lazy")
    image.scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelector('img.picture').naturalWidth > 0")
    expect(lamp).to_contain_text("€1,234.50 · Acme")
    expect(lamp.get_by_role("link")).to_have_attribute("href", "https://shop.example/lamp")
    expect(lamp.locator("dl")).to_contain_text("Colour")
    expect(lamp.locator("dl")).to_contain_text("red, blue")
    for without in (bare, evil, lost):
        without.scroll_into_view_if_needed()
        expect(without.get_by_role("img")).to_have_count(0)
        expect(without.locator(".picture.initial")).to_have_text("z")
        expect(without.get_by_role("link")).to_have_count(0)
    expect(lost).to_contain_text("free")
    assert set(asked) <= {PICTURE, "https://pictures.example/lost.png"}
    page.close()


def test_no_picture_is_loaded_unless_the_settings_say_so(page: Page, server: Server) -> None:
    """Without `image` in the mapping the page asks nobody else; by default there is none."""
    with server.client() as http:
        fields = http.get("/playground/settings.json").json()["fields"]
    assert fields == {"price": "attributes.price", "url": "attributes.url"}
    policy = page.evaluate("fetch('.').then(page => page.headers.get('content-security-policy'))")
    assert policy.endswith("img-src 'self'")
