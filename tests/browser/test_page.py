"""The page at `/` around its tabs: how it opens, what it shows of the service, what it weighs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.driving import attempt, choose, open_tab, recommended
from tests.support.server import ROOT, Server
from tests.support.tiny import World


@pytest.mark.changes_data
def test_page_opens_with_a_user_and_the_store_counts(page: Page, server: Server) -> None:
    """The page opens with a user's history and recommendations, stored counts and the model."""
    expect(page.locator("#person")).to_have_attribute("data-shown", re.compile("^u"))
    user = page.get_by_label("User", exact=True).input_value()
    with server.client() as http:
        history = http.get(f"/v1/users/{user}/history").json()["events"]
        version = http.get("/health/ready").json()["checks"]["model"]
    assert page.locator("#history > li").count() == len(history) > 0
    expect(page.locator("#rows h3").first).to_contain_text("Because you viewed")
    expect(page.locator("#stored-users")).to_have_text("40")
    stored = page.locator("#stored > div").all_inner_texts()
    assert [text.split() for text in stored] == [
        ["items", "60"],
        ["events", "480"],
        ["users", "40"],
    ]
    expect(page.locator("#version")).to_have_text(version)
    expect(page.locator("#empty")).to_be_hidden()
    page.get_by_label("Record what I try as events").check()
    attempt(recommended(page).first)
    expect(page.locator("#stored-events")).to_have_text("481")
    expect(page.locator("#growth-note")).to_contain_text("+1 event here")


def test_empty_store_shows_the_commands_that_fill_it(browser: Browser, tmp_path: Path) -> None:
    with Server(tmp_path / "empty") as server, server.client() as http:
        page = browser.new_page(viewport={"width": 360, "height": 740})
        page.goto(server.url)
        expect(page.get_by_role("region", name="Nothing is stored yet")).to_be_visible()
        expect(page.locator("#empty pre")).to_contain_text(f"curl -s {server.url}/v1/items -H")
        expect(page.locator("#person-note")).to_contain_text("No history to show")
        expect(page.locator("#search-note")).to_contain_text("nothing to recommend yet")
        expect(page.locator("#stored-items")).to_have_text("0")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        open_tab(page, "People")
        expect(page.locator("#people-note")).to_contain_text("Nobody yet")
        open_tab(page, "Catalogue")
        expect(page.locator("#catalogue-note")).to_contain_text("The catalogue is empty")
        open_tab(page, "Models")
        expect(page.locator("#versions-note")).to_contain_text("None is trained yet")
        open_tab(page, "Scenarios")
        expect(page.locator("#scenarios-note")).to_contain_text("None yet")
        bodies = re.findall(r"-d '(.*)'", page.locator("#empty pre").inner_text())
        items, events = (json.loads(body) for body in bodies)
        http.post("/v1/items", json=items).raise_for_status()
        open_tab(page, "Explore")
        page.reload()
        note = "Nobody has done anything with these yet: 1 of 1 items, in no order."
        expect(page.locator("#search-note")).to_have_text(note)
        expect(page.locator("#recommended .reason")).not_to_contain_text("Popular")
        http.post("/v1/events", json=events).raise_for_status()
        page.reload()
        expect(page.locator("#person")).to_have_attribute("data-shown", "ada")
        expect(page.locator("#history > li").first).to_contain_text("Asyncio from the ground up")
        expect(page.locator("#empty")).to_be_hidden()
        page.close()


def exposed(requests: dict[str, int], buckets: dict[str, int], *, events: int) -> str:
    """Return metrics of two workers and namespaces: requests by status, worker and route.

    `buckets` are those of the latencies.
    """
    own, other = 'namespace="default"', 'namespace="other"'
    name = "heed_namespace_request_duration_seconds_bucket"
    counted = {f'{name}{{le="{le}",{own}}}': n for le, n in buckets.items()}
    counted[f'{name}{{le="+Inf",{own}}}'] = max(buckets.values())
    counted[f'{name}{{le="0.01",{other}}}'] = 999
    for key, number in requests.items():
        status, worker, route = key.split()
        labels = f'method="POST",route="{route}",status="{status}",worker="{worker}"'
        counted[f"heed_namespace_requests_total{{{own},{labels}}}"] = number
        counted[f"heed_namespace_requests_total{{{other},{labels}}}"] = 999
    counted['heed_http_requests_total{method="GET",route="/metrics",status="200"}'] = 999
    for worker in "12":
        for gauge, value in {"events": events, "items": 7, "users": 5}.items():
            counted[f'heed_{gauge}{{{own},worker="{worker}"}}'] = value
            counted[f'heed_{gauge}{{{other},worker="{worker}"}}'] = 9_999
    return "".join(f"{series} {float(value)}\n" for series, value in counted.items())


def test_live_figures_are_those_of_the_metrics(page: Page, server: Server) -> None:
    """Requests, latency, refusals and errors are counted between two readings of /metrics."""
    score, search = "/v1/score", "/v1/search"
    before = {f"200 1 {score}": 10, f"429 1 {search}": 10, f"200 2 {search}": 10}
    first = exposed(before, {"0.01": 30, "0.1": 30}, events=1000)
    after = {
        f"200 1 {score}": 60,
        f"429 1 {search}": 30,
        f"503 2 {search}": 5,
        f"200 2 {search}": 25,
    }
    after[f"500 2 {score}"] = 10
    second = exposed(after, {"0.01": 30, "0.1": 130}, events=1250)
    texts = iter([first])
    page.goto("about:blank")  # the page that is left may read /metrics at any moment
    page.route("**/metrics", lambda route: route.fulfill(body=next(texts, second)))
    page.add_init_script("sessionStorage.clear()")  # before any reading of the page itself
    page.goto(server.url)
    expect(page.locator("#stored-events")).to_have_text("1,250")
    expect(page.locator("#growth-note")).to_contain_text("+250 events here")
    # A hundred new requests, all between 0.01 s and 0.1 s: half of them within 55 ms.
    expect(page.locator("#median")).to_have_text("55 ms")
    expect(page.locator("#waiting-note")).to_contain_text("19 of 20 within 96 ms")  # 95.5
    # 25 of these hundred were refused (429, 503), and 10 are errors.
    expect(page.locator("#refused")).to_have_text("25.0 %")
    expect(page.locator("#failing")).to_have_text("10.0 %")
    expect(page.locator("#failures-note")).to_have_text(
        "of 100 requests since this page was opened; "
        "26.9 % refused, 7.7 % failed of 130 since the start"
    )
    page.get_by_text("Refusals by route").click()
    rows = page.locator("#by-route tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["all", "25.0 % refused, 10.0 % failed of 100", "26.9 % refused, 7.7 % failed of 130"],
        [
            f"POST {score}",
            "0.0 % refused, 16.7 % failed of 60",
            "0.0 % refused, 14.3 % failed of 70",
        ],
        [
            f"POST {search}",
            "62.5 % refused, 0.0 % failed of 40",
            "58.3 % refused, 0.0 % failed of 60",
        ],
    ]
    expect(page.locator("#traffic-note")).to_have_text("130 requests since the start")
    expect(page.get_by_role("img", name=re.compile("^Requests a second"))).to_be_visible()


@pytest.mark.changes_data
def test_another_model_is_served_without_a_reload(page: Page, world: World) -> None:
    """A version activated on the page is served at once, and can be rolled back."""
    expect(page.locator("#version")).to_have_text(world.first)
    choose(page, "u3")
    before = recommended(page).all_inner_texts()
    for version, other in ((world.second, world.first), (world.first, world.second)):
        open_tab(page, "Models")
        row = page.locator(f"[data-version='{version}']")
        expect(row).to_contain_text("HR@10")
        row.get_by_role("button", name="Serve version").click()
        expect(row.get_by_role("button", name="is served now")).to_be_disabled()
        expect(page.get_by_role("alert")).to_contain_text(f"To roll back, serve {other}.")
        open_tab(page, "Explore")
        expect(page.locator("#version")).to_have_text(version)
        changed = expect(recommended(page))
        if version == world.second:
            changed.not_to_have_text(before, use_inner_text=True)


def test_tabs_have_addresses_that_a_reload_keeps(page: Page, server: Server) -> None:
    """Each tab has an address; a reload, a link and the history of the browser keep to it."""
    open_tab(page, "People")
    assert page.url == f"{server.url}/#/people"
    page.reload()
    expect(page.get_by_role("tab", name="People")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_role("tabpanel", name="People")).to_be_visible()
    expect(page.get_by_role("tabpanel", name="Explore")).to_be_hidden()
    page.goto(f"{server.url}/#/models")
    expect(page.get_by_role("tabpanel", name="Models")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("tabpanel", name="People")).to_be_visible()
    page.goto(f"{server.url}/#/no-such-tab")
    expect(page.get_by_role("tabpanel", name="Explore")).to_be_visible()
    page.goto(f"{server.url}/#/explore/u9")
    expect(page.locator("#person")).to_have_attribute("data-shown", "u9")


def test_page_is_small_and_loaded_once(page: Page, server: Server) -> None:
    """The page's own files total less than 180 kB, and a second request is answered with 304."""
    folder = ROOT / "service" / "http" / "playground"
    names = ["", "docs", *(f"playground/{path.relative_to(folder).as_posix()}" for path in
             folder.rglob("*") if path.is_file() and path.suffix != ".html")]  # fmt: skip
    with server.client() as http:
        answers = [http.get(f"/{name}") for name in names]
        assert all(answer.status_code == 200 for answer in answers)
        own = [one for name, one in zip(names, answers, strict=True) if "/vendor/" not in name]
        assert sum(len(answer.content) for answer in own) < 180_000
        for name, answer in zip(names, answers, strict=True):
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            again = http.get(f"/{name}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        pages = ("index.html", "docs/index.html")  # which have addresses of their own
        for missing in (*pages, "secret.py", "__init__.py", "lib", "..%2fapp.py", "../app.py"):
            assert http.get(f"/playground/{missing}").status_code == 404
    expect(page.get_by_role("heading", name="Heed")).to_be_visible()


def test_what_the_browser_fetches_is_light(browser: Browser, server: Server) -> None:
    """Loading the page transfers at most 400 kB, API answers included."""
    page = browser.new_page()
    wire = page.context.new_cdp_session(page)
    sent: list[float] = []
    wire.on("Network.loadingFinished", lambda told: sent.append(told["encodedDataLength"]))
    wire.send("Network.enable")
    page.goto(server.url)
    expect(recommended(page).first).to_be_visible()
    expect(page.locator("#growth-line canvas")).to_be_visible()
    assert len(sent) >= 12  # the page, its styles and scripts, and what it asks the API
    assert 20_000 < sum(sent) <= 400_000
    page.close()
