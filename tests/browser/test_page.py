"""The page at `/`, driven as a person would: by what is written on it."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.driving import amounts, ask_why, choose, recommended, results, score
from tests.support.server import Server
from tests.support.tiny import World


def test_page_opens_with_a_user_and_the_store_counts(page: Page, server: Server) -> None:
    """The page opens with a user's history and recommendations, stored counts and the model."""
    expect(page.locator("#person")).to_have_attribute("data-shown", re.compile("^u"))
    user = page.get_by_label("User", exact=True).input_value()
    with server.client() as http:
        history = http.get(f"/v1/users/{user}/history").json()["events"]
        version = http.get("/health/ready").json()["checks"]["model"]
    assert page.locator("#history > li").count() == len(history) > 0
    expect(recommended(page).first).to_contain_text("because of")
    stored = page.locator("#stored > div").all_inner_texts()
    assert [text.split() for text in stored] == [
        ["Items", "60"],
        ["Events", "480"],
        ["Users", "40"],
        ["Model", version],
    ]
    expect(page.locator("#empty")).to_be_hidden()
    recommended(page).first.get_by_role("button", name=re.compile("^Watch ")).click()
    expect(page.locator("#stored-events")).to_have_text("481")


def test_empty_store_shows_the_commands_that_fill_it(browser: Browser, tmp_path: Path) -> None:
    """On an empty store the page shows commands, which fill it when they are run."""
    with Server(tmp_path / "empty") as server, server.client() as http:
        page = browser.new_page(viewport={"width": 360, "height": 740})
        page.goto(server.url)
        expect(page.get_by_role("region", name="Nothing is stored yet")).to_be_visible()
        expect(page.locator("#empty pre")).to_contain_text(f"curl -s {server.url}/v1/items -H")
        expect(page.locator("#person-note")).to_contain_text("No history to show")
        expect(page.locator("#stored-items")).to_have_text("0")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        bodies = re.findall(r"-d '(.*)'", page.locator("#empty pre").inner_text())
        for path, body in zip(("/v1/items", "/v1/events"), bodies, strict=True):
            http.post(path, json=json.loads(body)).raise_for_status()
        page.reload()
        expect(page.locator("#person")).to_have_attribute("data-shown", "ada")
        expect(page.locator("#history > li").first).to_contain_text("Asyncio from the ground up")
        expect(page.locator("#empty")).to_be_hidden()
        page.close()


def test_only_positive_contributions_are_shown_as_reasons(page: Page) -> None:
    """Only events of positive contribution are listed after "because of"."""

    def answer(route: Route) -> None:
        told = route.fetch().json()
        first = told["items"][0]
        kept, lowering = (dict(first["explanation"][0]) for _ in range(2))
        lowering |= {"title": "a deterrent", "contribution": -1.0}
        first["explanation"] = [kept | {"title": "an attraction", "contribution": 1.0}, lowering]
        told["items"][1]["explanation"] = [lowering]
        route.fulfill(json=told)

    page.route("**/v1/recommend", answer)
    choose(page, "u3")
    expect(recommended(page).first).to_contain_text("because of an attraction")
    expect(page.locator("#recommended")).not_to_contain_text("a deterrent")
    expect(recommended(page).nth(1)).not_to_contain_text("because of")


def test_results_come_while_typing(page: Page) -> None:
    """Results appear during typing, with marked words, matched fields and weights."""
    page.get_by_role("searchbox").press_sequentially("rocket", delay=5)
    expect(results(page).first).to_contain_text("rocket")
    expect(results(page)).to_have_count(10)
    expect(results(page).first.locator("mark").first).to_have_text("rocket")
    expect(results(page).first).to_contain_text("matched in")
    expect(results(page).first.get_by_role("img", name=re.compile("weight: .*%"))).to_be_visible()
    expect(page.locator("#search-note")).to_contain_text(
        "titles, descriptions and tags were compared"
    )
    page.get_by_role("searchbox").fill("")
    expect(results(page)).to_have_count(0)


def test_page_shows_the_correction_of_a_typo(page: Page) -> None:
    """The correction of a mistyped word is shown above the results."""
    page.get_by_role("searchbox").fill("catsle ")
    expect(page.locator("#search-note")).to_contain_text("“catsle” is taken for “castle”")
    page.get_by_role("searchbox").fill('"no such phrase"')
    expect(page.locator("#search-note")).to_contain_text("Nothing was found.")


def test_only_the_latest_text_is_answered(page: Page) -> None:
    """The results of an earlier query never replace those of the latest."""
    box = page.get_by_role("searchbox")
    for text in ("castle", "garlic", "choir", "rocket"):
        box.fill(text)
        page.wait_for_timeout(70)
    expect(results(page).first.locator("mark").first).to_have_text("rocket")


def test_watching_changes_the_recommendations_at_once(page: Page) -> None:
    """A watched item changes history and recommendations; deleting the event restores both."""
    choose(page, "u3")
    listed = recommended(page)
    before, titles = listed.all_inner_texts(), listed.locator("h3").all_inner_texts()
    events = page.locator("#history > li").count()
    first = listed.first.locator("h3").inner_text()
    listed.first.get_by_role("button", name=re.compile("^Watch ")).click()
    expect(page.locator("#history > li")).to_have_count(events + 1)
    expect(page.locator("#history > li").first).to_contain_text(f"watch {first}")
    expect(listed).not_to_have_text(before, use_inner_text=True)
    page.get_by_role("button", name=f"Forget watch {first}").first.click()
    expect(page.locator("#history > li")).to_have_count(events)
    expect(listed.locator("h3")).to_have_text(titles)


def test_a_guest_begins_with_nothing(page: Page) -> None:
    """A new guest gets popular items, and personal ones after the first event."""
    page.get_by_role("button", name="New guest").click()
    expect(page.locator("#person-note")).to_contain_text("No event yet")
    expect(page.locator("#recommended > li").first).to_contain_text("popular")
    page.get_by_role("searchbox").fill("rocket")
    results(page).first.get_by_role("button", name=re.compile("^Watch ")).click()
    expect(page.locator("#recommended > li").first).to_contain_text("from their history")


def test_shown_contributions_sum_to_the_score(page: Page) -> None:
    """The signed contributions shown for a score sum to it."""
    choose(page, "u3")
    ask_why(page)
    expect(page.locator("#why")).to_be_visible()
    expect(page.locator("#why-title")).to_be_focused()
    assert sum(amounts(page)) == pytest.approx(score(page), abs=1e-3)
    total = page.locator("#contributions tr.total td[data-score]")
    assert total.inner_text() == f"{score(page):.3f}"
    bars = page.locator("#contributions rect")
    assert bars.count() == len(amounts(page))
    signs = bars.evaluate_all("all => all.map(one => one.getAttribute('class'))")
    assert signs == ["negative" if amount < 0 else "positive" for amount in amounts(page)]


def test_attention_table_follows_the_options(page: Page) -> None:
    """The table shows weights in percent, and 100 % for one row under hard attention."""
    choose(page, "u3")
    ask_why(page)
    soft = page.locator("#attention td").all_inner_texts()
    assert all(re.fullmatch(r"(< )?\d+\.\d %\s*", text) for text in soft)
    page.get_by_label("to the one best row").check()
    expect(page.locator("#attention")).to_contain_text("100.0 %")
    hard = [text.strip() for text in page.locator("#attention td").all_inner_texts()]
    assert set(hard) <= {"100.0 %", "0.0 %"}
    page.get_by_label("exactly", exact=True).check()
    expect(page.locator("#attention")).not_to_contain_text("100.0 %")
    page.get_by_label(re.compile("^Temperature")).fill("2")
    expect(page.locator("#temperature-shown")).to_have_text("100.00")


def test_another_model_is_served_without_a_reload(page: Page, world: World) -> None:
    """A version activated on the page is named, and its recommendations appear without a reload."""
    expect(page.locator("#version")).to_have_text(world.first)
    choose(page, "u3")
    before = recommended(page).all_inner_texts()
    row = page.locator("#models tr", has_text=world.second)
    row.get_by_role("button", name="serve this").click()
    expect(page.locator("#version")).to_have_text(world.second)
    expect(row.get_by_role("button", name="served")).to_be_disabled()
    expect(recommended(page)).not_to_have_text(before, use_inner_text=True)


def test_page_shows_the_time_of_each_stage(page: Page) -> None:
    """The latency table lists the stages of the last requests."""
    page.get_by_role("searchbox").fill("rocket")
    search = page.locator("#latency tr", has_text="POST /v1/search").first
    expect(search).to_contain_text("attend")
    expect(search).to_contain_text("total")


def test_markup_in_titles_is_escaped(page: Page, server: Server) -> None:
    """Markup in a title is shown as text and is not executed."""
    evil = '<img src=x onerror="document.title=1"> <script>document.title=2</script> zeppelin'
    with server.client() as http:
        item = {"item_id": "evil", "title": evil, "description": evil}
        http.post("/v1/items", json={"items": [item]}).raise_for_status()
    page.get_by_role("searchbox").fill("zeppelin")
    expect(results(page).first.locator("h3")).to_have_text(evil)
    assert page.title() == "Heed"
    assert page.locator("main img").count() == 0


def test_the_page_can_be_used_by_keys_alone(page: Page) -> None:
    """Search and the choice of a user work with the keyboard alone."""
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to search"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab") if page.evaluate("document.activeElement.id") != "query" else None
    page.keyboard.type("rocket")
    expect(results(page).first).to_be_visible()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "user":
            break
    page.keyboard.type("u3")
    page.keyboard.press("Enter")
    expect(page.locator("#recommended > li").first).to_be_visible()


@pytest.mark.parametrize("width", [320, 360, 768, 1300])
def test_nothing_is_cut_off_on_a_small_screen(browser: Browser, server: Server, width: int) -> None:
    """At every width the page needs no horizontal scrolling and shows whole buttons."""
    page = browser.new_page(viewport={"width": width, "height": 700})
    page.goto(server.url)
    choose(page, "u3")
    page.get_by_role("searchbox").fill("rocket")
    ask_why(page)
    page.get_by_role("button", name=re.compile("^Score without ")).first.click()
    expect(page.locator(".told").first).to_contain_text("without it")
    page.evaluate("document.getElementById('key').hidden = false")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for button in page.get_by_role("button").all():
        box = button.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_passes_the_accessibility_audit(
    browser: Browser, server: Server, scheme: Literal["light", "dark"]
) -> None:
    """axe-core finds nothing wrong with names, roles, order or contrast, with everything open."""
    # It has to be put into the page, which allows no scripts but its own.
    context = browser.new_context(bypass_csp=True, color_scheme=scheme)
    page = context.new_page()
    page.goto(server.url)
    choose(page, "u3")
    page.get_by_role("searchbox").fill("rocket")
    ask_why(page)
    page.get_by_role("button", name=re.compile("^Score without ")).first.click()
    expect(page.locator(".told").first).to_contain_text("without it")
    page.evaluate("document.getElementById('key').hidden = false")
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text())
    found = page.evaluate("axe.run()")
    assert [(wrong["id"], wrong["nodes"]) for wrong in found["violations"]] == []
    assert len(found["passes"]) > 20
    context.close()


def test_page_is_small_and_loaded_once(page: Page, server: Server) -> None:
    """The files of the page total less than 100 kB, and a second request is answered with 304."""
    with server.client() as http:
        names = ["", *(f"playground/{name}" for name in
                       ("style.css", "main.js", "api.js", "dom.js", "search.js", "person.js",
                        "key.js", "why.js", "running.js", "stored.js", "icon.svg"))]  # fmt: skip
        answers = [http.get(f"/{name}") for name in names]
        assert all(answer.status_code == 200 for answer in answers)
        assert sum(len(answer.content) for answer in answers) < 100_000
        for name, answer in zip(names, answers, strict=True):
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            again = http.get(f"/{name}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert http.get("/playground/secret.py").status_code == 404
        assert http.get("/playground/__init__.py").status_code == 404
    expect(page.get_by_role("heading", name="Heed")).to_be_visible()


def test_what_the_browser_fetches_is_light(browser: Browser, server: Server) -> None:
    """Loading the page transfers at most 400 kB, API answers included."""
    page = browser.new_page()
    wire = page.context.new_cdp_session(page)
    sent: list[float] = []
    wire.on("Network.loadingFinished", lambda told: sent.append(told["encodedDataLength"]))
    wire.send("Network.enable")
    page.goto(server.url, wait_until="networkidle")
    expect(page.locator("#models tbody tr").first).to_be_visible()
    assert len(sent) >= 12  # the page, its style and scripts, and what it asks the API
    assert 20_000 < sum(sent) <= 400_000
    page.close()
