"""The API's documentation at `/docs`, in a browser that reaches no other host."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.support.server import Server


def test_docs_work_without_another_host(page: Page, server: Server) -> None:
    """Swagger UI lists the routes and calls one, asking only this service."""
    page.goto(f"{server.url}/docs")  # the fixture fails on requests elsewhere and on its console
    expect(page.get_by_role("heading", name=re.compile("^Heed"))).to_be_visible()
    route = page.locator("#operations-run-ready")
    expect(route).to_contain_text("/health/ready")
    route.get_by_role("button").first.click()
    route.get_by_role("button", name="Try it out").click()
    route.get_by_role("button", name="Execute").click()
    expect(route.locator(".live-responses-table")).to_contain_text('"ready": true')
    with server.client() as http:
        paths = http.get("/openapi.json").json()["paths"]
    operations = sum(len(methods) for methods in paths.values())
    expect(page.locator(".opblock")).to_have_count(operations)


def test_docs_follow_the_colour_scheme_and_lead_back(page: Page, server: Server) -> None:
    """The documentation is dark where the page is, and a link returns to it."""
    page.emulate_media(color_scheme="dark")
    page.goto(f"{server.url}/docs")
    expect(page.get_by_role("heading", name=re.compile("^Heed"))).to_be_visible()
    dark = "getComputedStyle(document.documentElement).backgroundColor"
    channels = [int(number) for number in re.findall(r"\d+", page.evaluate(dark))[:3]]
    assert max(channels) < 100
    page.get_by_role("link", name="Heed").first.click()
    expect(page.get_by_role("tab", name="Explore")).to_be_visible()


@pytest.mark.parametrize("name", ["swagger-ui-bundle.js", "swagger-ui.css", "", "../docs"])
def test_docs_are_served_under_a_strict_policy(server: Server, name: str) -> None:
    """No script but the service's own runs in the documentation; what is not there is a 404."""
    with server.client() as http:
        answer = http.get(f"/docs/{name}" if name else "/docs")
        assert http.get("/docs/no-such-file.js").status_code == 404
    policy = answer.headers["content-security-policy"]
    assert answer.status_code == 200
    assert "script-src 'self';" in policy
    assert "default-src 'none'" in policy
