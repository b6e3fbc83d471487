"""Explore, driven as a person would: by what is written on it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.driving import (
    amounts,
    ask_why,
    attempt,
    choose,
    recommend_in_rows,
    recommended,
    results,
    score,
    search,
    settled,
    stored_events,
    trials,
)
from tests.support.server import Server


def test_only_positive_contributions_are_shown_as_reasons(page: Page) -> None:
    """Only events of positive contribution are named in the sentence, the larger one first."""

    def answer(route: Route) -> None:
        if '"u3"' not in (route.request.post_data or ""):  # of the user that the page opened on
            route.continue_()
            return
        told = route.fetch().json()
        first = told["items"][0]
        kept, lowering = (dict(first["explanation"][0]) for _ in range(2))
        lowering |= {"title": "a deterrent", "contribution": -1.0}
        kept |= {"title": "an attraction", "contribution": 1.0, "type": "watch"}
        first["explanation"] = [kept, kept | {"title": "a trifle", "contribution": 0.01}, lowering]
        told["items"][1]["explanation"] = [lowering]
        route.fulfill(json=told)

    page.route("**/v1/recommend", answer)
    choose(page, "u3")
    reasons = page.locator("#recommended .reason")
    expect(reasons.first).to_have_text("Because you watched “an attraction”.")
    expect(reasons.nth(1)).to_have_text("From the history as a whole.")


def test_figures_of_a_recommendation_sum_to_its_score(page: Page, server: Server) -> None:
    """Figures are behind a click; the parts that they list sum to the score of the API."""
    choose(page, "u3")
    first = recommended(page).first
    figures = first.locator("details.figures")
    expect(figures.locator("table").first).to_be_hidden()
    figures.get_by_text("Figures").click()
    numbers = figures.locator("table").first.locator("td.number").all_inner_texts()
    *parts, total = [float(text.replace("−", "-")) for text in numbers]
    assert sum(parts) == pytest.approx(total, abs=2e-3)
    with server.client() as http:
        answer = http.post("/v1/recommend", json={"user_id": "u3", "limit": 1}).json()
    assert first.get_attribute("data-item") == answer["items"][0]["item_id"]
    assert total == pytest.approx(answer["items"][0]["score"], abs=0.05)  # some seconds earlier


def test_results_come_while_typing(page: Page) -> None:
    """Results appear during typing, with marked words, matched fields and weights."""
    page.get_by_role("searchbox").press_sequentially("rocket", delay=5)
    expect(results(page).first).to_contain_text("rocket")
    expect(results(page)).to_have_count(8)  # those that match
    expect(results(page).first.locator("mark").first).to_have_text("rocket")
    expect(results(page).first).to_contain_text("Matches in ")
    results(page).first.get_by_text("Figures").click()
    expect(results(page).first.get_by_role("img", name=re.compile("weight: .*%"))).to_be_visible()
    expect(page.locator("#search-note")).to_have_text("8 matches.")
    page.get_by_role("searchbox").fill("")
    expect(results(page)).to_have_count(0)
    expect(recommended(page).first).to_be_visible()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"items": [], "total": 0}, "Nothing was found: no item is described"),
        ({"total": 40}, "The best 8 of 40 matches. No item is described."),
    ],
)
def test_the_warning_of_an_answer_is_shown(page: Page, answer: dict[str, Any], told: str) -> None:
    """A warning is the reason why nothing is found, or a sentence after the number of matches."""
    more = answer | {"warnings": [{"pointer": "/query", "detail": "no item is described"}]}
    page.route("**/v1/search", lambda route: route.fulfill(json=route.fetch().json() | more))
    search(page, "rocket")
    expect(page.locator("#search-note")).to_have_text(told)


def test_further_results_are_shown_when_asked_for(page: Page, server: Server) -> None:
    """Each page follows the one before, until all matches are shown; other words begin again."""
    words = "rocket soup planet bread orbit oven"
    page.get_by_role("searchbox").fill(words)
    expect(page.locator("#search-note")).to_have_text(re.compile(r"^The best 12 of \d+ matches"))
    settled(page)
    user = page.locator("#person").get_attribute("data-shown")
    with server.client() as http:
        asked = {"query": words, "user_id": user, "limit": 1000}
        wanted = [item["item_id"] for item in http.post("/v1/search", json=asked).json()["items"]]
    more = page.get_by_role("button", name="Show more")
    while more.is_visible():
        more.click()
        settled(page)
    ids = results(page).evaluate_all("all => all.map(one => one.dataset.item)")
    assert ids == wanted
    expect(page.locator("#search-note")).to_contain_text(f"The best {len(wanted)} of")
    page.get_by_role("searchbox").fill("soup rocket comet")
    expect(results(page)).to_have_count(12)


def test_what_is_shown_has_an_address(page: Page, server: Server, browser: Browser) -> None:
    """User, words, filters and a similar item are in the address: shared, and gone back to."""
    choose(page, "u3")
    assert page.url.endswith("#/explore/u3?as-rows=no")
    page.locator("#filters > summary").click()
    chip = page.locator("#chips").get_by_role("button", name=re.compile("^cooking"))
    chip.click()
    expect(chip).to_have_attribute("aria-pressed", "true")
    steps = page.evaluate("history.length")
    page.get_by_role("searchbox").press_sequentially("garlic & 5%", delay=5)
    expect(page.get_by_role("heading", name="Results for “garlic & 5%”")).to_be_visible()
    settled(page)
    assert page.evaluate("history.length") == steps + 1  # one step, however many keys
    shown = results(page).evaluate_all("all => all.map(one => one.dataset.item)")
    other = browser.new_page()
    other.goto(page.url)
    expect(other.get_by_role("searchbox")).to_have_value("garlic & 5%")
    expect(other.locator("#person")).to_have_attribute("data-shown", "u3")
    settled(other)
    pressed = other.locator("#chips").get_by_role("button", name=re.compile("^cooking"))
    expect(pressed).to_have_attribute("aria-pressed", "true")
    assert results(other).evaluate_all("all => all.map(one => one.dataset.item)") == shown
    other.close()
    results(page).first.get_by_role("button", name=re.compile("^Similar to ")).click()
    expect(page.locator("#similar > li").first).to_be_visible()
    page.reload()
    expect(page.locator("#stage-title")).to_contain_text("Similar to")
    expect(page.locator("#similar > li").first).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name="Results for “garlic & 5%”")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name="Recommended for u3")).to_be_visible()
    expect(chip).to_have_attribute("aria-pressed", "true")
    page.go_back()
    expect(chip).to_have_attribute("aria-pressed", "false")
    page.goto(f"{server.url}/#/explore/u4?filter=nonsense&as-rows=no")
    expect(page.get_by_role("heading", name="Recommended for u4")).to_be_visible()


def test_people_look_different_and_cards_keep_their_height(page: Page) -> None:
    """Two users have avatars of two colours; a card that is opened stretches no other one."""
    looks = []
    for user in ("u3", "u4"):
        choose(page, user)
        avatar = page.locator("#person .avatar")
        looks.append((avatar.inner_text(), avatar.evaluate("one => one.style.background")))
    assert len(set(looks)) == len({colour for _, colour in looks}) == 2
    height = "one => one.getBoundingClientRect().height"
    second = recommended(page).nth(1)
    before = second.evaluate(height)
    recommended(page).first.get_by_text("Figures").click()
    expect(recommended(page).first.locator("table").first).to_be_visible()
    assert second.evaluate(height) == before


def test_page_shows_the_correction_of_a_typo(page: Page) -> None:
    """The correction of a mistyped word is told above the results, or offered as a button."""
    note = page.locator("#search-note")
    page.get_by_role("searchbox").fill("catsle ")
    expect(note).to_contain_text("No item has “catsle”; searched for “castle” instead")
    page.get_by_role("searchbox").fill('"no such phrase"')
    expect(note).to_contain_text("Nothing was found: no item matches")
    page.get_by_role("searchbox").fill('"catsle"')
    expect(results(page)).to_have_count(0)
    note.get_by_role("button", name='"castle"').click()
    expect(page.get_by_role("searchbox")).to_have_value('"castle"')
    expect(results(page).first).to_contain_text("castle")


def test_only_the_latest_text_is_answered(page: Page) -> None:
    """The results of an earlier query never replace those of the latest."""
    held: list[Route] = []

    def hold(route: Route) -> None:
        """Answer a search for castles last."""
        if '"castle"' in (route.request.post_data or ""):
            held.append(route)
        else:
            route.continue_()

    page.route("**/v1/search", hold)
    box = page.get_by_role("searchbox")
    with page.expect_request(lambda asked: '"castle"' in (asked.post_data or "")):
        box.fill("castle")
    box.fill("rocket")
    expect(results(page).first.locator("mark").first).to_have_text("rocket")
    for route in held:
        route.abort() if page.is_closed() else route.continue_()
    expect(page.get_by_role("heading", name="Results for “rocket”")).to_be_visible()
    expect(results(page).first.locator("mark").first).to_have_text("rocket")


def test_facets_filter_what_is_recommended_and_found(page: Page) -> None:
    """A pressed chip restricts recommendations and results; filters can be cleared."""
    choose(page, "u3")
    every = recommended(page).count()
    page.locator("#filters > summary").click()
    chips = page.get_by_role("group", name="categories")
    chips.get_by_role("button", name=re.compile("^cooking")).click()
    expect(chips.get_by_role("button", name=re.compile("^cooking"))).to_have_attribute(
        "aria-pressed", "true"
    )
    expect(page.locator("#recommended .about > .beside").first).to_contain_text("cooking")
    shown = page.locator("#recommended > li").evaluate_all("all => all.map(o => o.dataset.item)")
    assert shown
    assert all(item.startswith("cooking-") for item in shown)
    page.get_by_role("group", name="number").get_by_label("number from").fill("14")
    page.get_by_role("group", name="number").get_by_label("number from").press("Enter")
    expect(recommended(page)).to_have_count(1)
    expect(recommended(page).first).to_have_attribute("data-item", "cooking-14")
    search(page, "rocket")
    expect(page.locator("#search-note")).to_contain_text(re.compile("1 match|Nothing was found"))
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name="Clear filters").click()
    expect(recommended(page)).to_have_count(every)


def test_a_trial_counts_and_is_not_an_event(page: Page, server: Server) -> None:
    """A tried item changes what is recommended, is marked as a trial and stores nothing."""
    choose(page, "u3")
    before = recommended(page).all_inner_texts()
    item = recommended(page).first.get_attribute("data-item")
    with server.client() as http:
        stored = http.get("/v1/users/u3/history").json()
        attempt(recommended(page).first)
        expect(trials(page)).to_have_count(1)
        expect(trials(page).first).to_contain_text("trial")
        expect(recommended(page)).not_to_have_text(before, use_inner_text=True)
        assert recommended(page).first.get_attribute("data-item") != item
        assert http.get("/v1/users/u3/history").json() == stored
        page.reload()
        choose(page, "u3")
        expect(trials(page)).to_have_count(1)
        page.get_by_role("button", name=re.compile("^Drop the trial ")).click()
        expect(trials(page)).to_have_count(0)
        expect(recommended(page).first).to_have_attribute("data-item", item or "")
        assert http.get("/v1/users/u3/history").json() == stored


@pytest.mark.changes_data
def test_a_trial_is_recorded_as_an_event_on_request(page: Page, server: Server) -> None:
    """Trials become events by a button, or at once where the box is ticked."""
    choose(page, "u3")
    with server.client() as http:

        def history() -> list[str]:
            told = http.get("/v1/users/u3/history").json()["events"]
            return [event["item_id"] for event in told]

        before = history()
        first = recommended(page).first.get_attribute("data-item")
        attempt(recommended(page).first)
        expect(trials(page)).to_have_count(1)
        page.get_by_role("button", name="Record as events").click()
        expect(trials(page)).to_have_count(0)
        expect(stored_events(page)).to_have_count(len(before) + 1)
        assert history() == [first, *before]
        page.get_by_label("Record what I try as events").check()
        second = recommended(page).first.get_attribute("data-item")
        attempt(recommended(page).first)
        expect(stored_events(page)).to_have_count(len(before) + 2)
        expect(trials(page)).to_have_count(0)
        assert history() == [second, first, *before]


@pytest.mark.changes_data
def test_a_guest_begins_with_nothing(page: Page, server: Server) -> None:
    """A new guest gets popular items, and personal ones after the first trial."""
    recommend_in_rows(page, False)
    page.get_by_role("button", name="New guest").click()
    expect(page.locator("#person-note")).to_contain_text("No event yet")
    expect(recommended(page).first.locator(".reason")).to_have_text("Popular with everyone.")
    search(page, "rocket")
    attempt(results(page).first)
    expect(trials(page)).to_have_count(1)
    page.get_by_role("searchbox").fill("")
    expect(recommended(page).first.locator(".reason")).to_contain_text("Because you viewed")
    with server.client() as http:
        users = [user["user_id"] for user in http.get("/v1/users").json()["users"]]
    assert not any(user.startswith("guest-") for user in users)


def test_similar_items_are_shown_and_left_again(page: Page, server: Server) -> None:
    """The items most like one are those of the API, each with how alike it is."""
    choose(page, "u3")
    item = recommended(page).first.get_attribute("data-item")
    recommended(page).first.get_by_role("button", name=re.compile("^Similar to ")).click()
    expect(page.locator("#stage-title")).to_contain_text("Similar to")
    expect(page.locator("#stage-title")).to_be_focused()
    with server.client() as http:
        answer = http.get(f"/v1/items/{item}/similar", params={"limit": 12}).json()
    listed = page.locator("#similar > li")
    expect(listed).to_have_count(len(answer["items"]))
    shown = listed.evaluate_all("all => all.map(one => one.dataset.item)")
    assert shown == [one["item_id"] for one in answer["items"]]
    expect(listed.first.locator(".reason")).to_contain_text(re.compile("Alike in text|Taken by"))
    expect(listed.first.get_by_text("cosine")).to_be_hidden()
    listed.first.get_by_text("Figures").click()
    expect(listed.first.get_by_text("cosine")).to_be_visible()
    page.get_by_role("button", name="Back to what is recommended").click()
    expect(recommended(page).first).to_be_visible()


def test_shown_contributions_sum_to_the_score(page: Page) -> None:
    choose(page, "u3")
    ask_why(page)
    expect(page.get_by_role("dialog", name=re.compile("^Why "))).to_be_visible()
    expect(page.locator("#why-title")).to_be_focused()
    expect(page.locator("#why-sentence")).to_contain_text("Because you viewed")
    assert sum(amounts(page)) == pytest.approx(score(page), abs=1e-3)
    total = page.locator("#contributions tr.total td[data-score]")
    assert total.inner_text() == f"{score(page):.3f}"
    bars = page.locator("#contributions rect")
    assert bars.count() == len(amounts(page))
    signs = bars.evaluate_all("all => all.map(one => one.getAttribute('class'))")
    assert signs == ["negative" if amount < 0 else "positive" for amount in amounts(page)]
    # A bar is as wide as its amount, by one scale: half the width for the largest.
    widths = bars.evaluate_all("all => all.map(one => Number(one.getAttribute('width')))")
    largest = max(map(abs, amounts(page)))
    assert widths == pytest.approx([50 * abs(one) / largest for one in amounts(page)], abs=1e-6)


def test_picture_and_table_follow_the_options(page: Page) -> None:
    """Weights are in percent; under hard attention each head has one row of 100 %."""
    choose(page, "u3")
    ask_why(page)
    page.get_by_text("The same as a table").click()
    soft = page.locator("#attention td.number").all_inner_texts()
    assert all(re.fullmatch(r"(< )?\d+\.\d %\s*", text) for text in soft)
    page.get_by_label("the one best").check()
    expect(page.locator("#attention")).to_contain_text("100.0 %")
    hard = [text.strip() for text in page.locator("#attention td.number").all_inner_texts()]
    assert set(hard) <= {"100.0 %", "0.0 %"}
    assert page.locator("#events .cell").count() == hard.count("100.0 %")
    expect(page.locator("#picture-caption")).to_contain_text("only at the one event")
    page.get_by_label("every event").check()
    expect(page.locator("#attention")).not_to_contain_text("100.0 %")
    page.get_by_label(re.compile("^Temperature")).fill("2")
    expect(page.locator("#temperature-shown")).to_have_text("100.00")


@pytest.mark.changes_data
def test_markup_in_titles_is_not_executed(page: Page, server: Server) -> None:
    """Markup in a title is shown by its text and is not executed."""
    evil = '<img src=x onerror="document.title=1"> <script>document.title=2</script> zeppelin'
    with server.client() as http:
        item = {"item_id": "evil", "title": evil, "description": evil}
        http.post("/v1/items", json={"items": [item]}).raise_for_status()
    search(page, "zeppelin")
    expect(results(page).first.locator("h3")).to_have_text("zeppelin")
    assert page.title() == "Heed"
    assert page.locator("main img").count() == 0


@pytest.mark.parametrize(("status", "told"), [(429, "busy"), (503, "busy"), (500, "went wrong")])
def test_errors_are_told_and_pass(page: Page, refusals: list[int], status: int, told: str) -> None:
    """An error of the service is told in words, and the page goes on afterwards."""
    refusals.append(status)
    choose(page, "u3")
    problem = {"detail": f"something went wrong with {status}."}

    def refuse(route: Route) -> None:
        route.fulfill(status=status, json=problem, headers={"retry-after": "2"})

    page.route("**/v1/search", refuse, times=1)
    page.get_by_role("searchbox").fill("rocket")
    expect(page.get_by_role("alert")).to_contain_text(told)
    page.get_by_role("searchbox").fill("rocket castle")
    expect(results(page).first).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()
