"""Catalogue: browsing, editing and hiding."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.support.driving import open_tab
from tests.support.server import Server


def listed(page: Page) -> Locator:
    return page.locator("#catalogue-list a")


def ids(page: Page) -> list[str]:
    found: list[str] = listed(page).evaluate_all("all => all.map(one => one.dataset.item)")
    return found


def test_the_catalogue_is_browsed_in_order_page_by_page(page: Page, server: Server) -> None:
    """Items come in the chosen order, thirty at a time, as the API lists them."""
    open_tab(page, "Catalogue")
    expect(listed(page)).to_have_count(30)
    expect(page.locator("#catalogue-note")).to_have_text("30 of 60 items.")
    with server.client() as http:

        def order(field: str, direction: str) -> list[str]:
            sort = [{"field": field, "order": direction}]
            answer = http.post("/v1/search", json={"sort": sort, "limit": 60}).json()
            return [item["item_id"] for item in answer["items"]]

        assert ids(page) == order("published_at", "desc")[:30]
        page.get_by_label("Order").select_option(label="Title, A to Z")
        expect(listed(page).first).to_have_attribute("data-item", order("title", "asc")[0])
        page.get_by_role("button", name="Show more").click()
        expect(listed(page)).to_have_count(60)
        assert ids(page) == order("title", "asc")
        expect(page.get_by_role("button", name="Show more")).to_be_hidden()


@pytest.mark.changes_data
@pytest.mark.parametrize(
    ("step", "low", "high"), [(1, "from 1922", "to 1930"), (250_000, "from 1922", "to 2M")]
)
def test_a_range_shows_years_in_full_and_large_numbers_in_short(
    page: Page, server: Server, step: int, low: str, high: str
) -> None:
    """The bounds of a field are hints in its inputs: 1922 is no 1.92K."""
    items = [{"item_id": f"film-{at}", "attributes": {"year": 1922 + step * at}} for at in range(9)]
    with server.client() as http:
        http.post("/v1/items", json={"items": items}).raise_for_status()
    page.reload()
    open_tab(page, "Catalogue")
    group = page.get_by_role("group", name="year")
    expect(group.get_by_label("year from")).to_have_attribute("placeholder", low)
    expect(group.get_by_label("year to")).to_have_attribute("placeholder", high)


def test_the_catalogue_is_filtered_and_searched(page: Page) -> None:
    """Chips and words narrow the list, together."""
    open_tab(page, "Catalogue")
    chips = page.locator("#catalogue-chips").get_by_role("group", name="categories")
    chips.get_by_role("button", name=re.compile("^cooking")).click()
    expect(page.locator("#catalogue-note")).to_have_text("15 of 15 items.")
    page.get_by_label("Find items").fill("garlic")
    expect(page.locator("#catalogue-note")).not_to_have_text("15 of 15 items.")
    assert all(item.startswith("cooking-") for item in ids(page))
    page.get_by_label("Find items").fill('"no such phrase"')
    expect(page.locator("#catalogue-note")).to_contain_text("No item matches.")


@pytest.mark.changes_data
def test_an_item_is_edited_by_what_changed_alone(page: Page, server: Server) -> None:
    """An edit sends the changed fields; a refusal marks the place; the list shows the new title."""
    page.goto(f"{server.url}/#/catalogue/space-03")
    page.get_by_text("Every field as JSON").click()
    editor = page.get_by_label(re.compile("^Item as JSON"))
    text = editor.input_value()
    editor.fill(text.replace('"number": 3', '"number": 33').replace('"language": "de"', '"x": 1'))
    with page.expect_request(lambda asked: asked.method == "PATCH") as sent:
        page.get_by_role("button", name="Save").last.click()
    patch = {"attributes": {"language": None, "number": 33, "x": 1}}
    assert sent.value.post_data_json == patch
    expect(page.get_by_role("alert")).to_have_text("Saved: attributes.")
    with server.client() as http:
        assert http.get("/v1/items/space-03").json()["attributes"] == {"number": 33, "x": 1}
    title = re.sub(r'"title": "[^"]*"', '"title": "a new <b>name</b>"', editor.input_value())
    page.get_by_text("Every field as JSON").click()
    editor.fill(title)
    page.get_by_role("button", name="Save").last.click()
    expect(page.locator("#catalogue-one h2")).to_have_text("a new name")
    expect(page.locator("a[data-item='space-03']")).to_contain_text("a new name")


def test_a_refused_edit_points_at_the_place(
    page: Page, server: Server, refusals: list[int]
) -> None:
    """The value that the service refuses is selected, and named with what is allowed."""
    refusals.append(422)
    page.goto(f"{server.url}/#/catalogue/space-03")
    page.get_by_text("Every field as JSON").click()
    editor = page.get_by_label(re.compile("^Item as JSON"))
    editor.fill(
        '{"title": "t", "tags": ["ok", "\\\\" ], "categories": ["a", 5], "nonsense": {"a": 1}}'
    )
    page.get_by_role("button", name="Save").last.click()
    errors = page.locator("#catalogue-one .json .errors")
    expect(errors).to_contain_text("/categories/1")
    expect(errors).to_contain_text("must be a string")
    chosen = "area => area.value.slice(area.selectionStart, area.selectionEnd)"
    errors.get_by_role("button", name="Go to /categories/1").click()
    assert editor.evaluate(chosen) == "5"
    errors.get_by_role("button", name="Go to /nonsense").click()
    assert editor.evaluate(chosen) == '{"a": 1}'
    with server.client() as http:
        assert http.get("/v1/items/space-03").json()["categories"] == ["space", "odd"]


@pytest.mark.changes_data
def test_an_item_is_edited_field_by_field(page: Page, server: Server, refusals: list[int]) -> None:
    """Each field has an input; only what changed is sent, and a refusal marks its field."""
    refusals.append(422)
    page.goto(f"{server.url}/#/catalogue/space-03")
    with server.client() as http:
        before = http.get("/v1/items/space-03").json()
        page.get_by_label("Title", exact=True).fill("a new name")
        page.get_by_label("Categories, one a line").fill("space\n\n the moon ")
        page.locator("#catalogue-one").get_by_label("number", exact=True).fill("")
        page.get_by_label("Published").fill("some day")
        page.get_by_role("button", name="Save").first.click()
        expect(page.locator(".fields .errors")).to_contain_text("/published_at")
        expect(page.get_by_label("Published")).to_be_focused()
        assert http.get("/v1/items/space-03").json() == before
        page.get_by_label("Published").fill(before["published_at"])
        with page.expect_request(lambda asked: asked.method == "PATCH") as sent:
            page.get_by_role("button", name="Save").first.click()
        assert sent.value.post_data_json == {
            "title": "a new name",
            "categories": ["space", "the moon"],
            "attributes": {"number": None},
        }
        expect(page.locator("#catalogue-one h2")).to_have_text("a new name")
        after = http.get("/v1/items/space-03").json()
    del before["attributes"]["number"]
    assert after == before | {"title": "a new name", "categories": ["space", "the moon"]}


def test_the_page_of_an_item_shows_what_people_do_with_it(page: Page, server: Server) -> None:
    """Its newest events, similar items, companions and audience are those of the API."""
    page.goto(f"{server.url}/#/catalogue/space-03")
    with server.client() as http:
        events = sum(
            event["item_id"] == "space-03"
            for user in http.get("/v1/users").json()["users"]
            for event in http.get(f"/v1/users/{user['user_id']}/history").json()["events"]
        )
        newest = http.get("/v1/items/space-03/events?limit=6").json()["events"]
        similar = http.get("/v1/items/space-03/similar?limit=6").json()["items"]
        together = http.get("/v1/items/space-03/together?limit=6&relation=basket").json()["items"]
        audience = http.get("/v1/items/space-03/audience?limit=6").json()["users"]
    panels = page.locator("#catalogue-one .panel")
    expect(panels.nth(0)).to_contain_text(f"{events} event")
    for at, ids in (
        (0, [event["user_id"] for event in newest]),
        (1, [item["item_id"] for item in similar]),
        (2, [item["item_id"] for item in together]),
        (3, [user["user_id"] for user in audience]),
    ):
        links = panels.nth(at).locator("a")
        expect(links).to_have_count(len(ids))
        shown = links.evaluate_all("all => all.map(one => one.hash.split('/').at(-1))")
        assert shown == ids


@pytest.mark.changes_data
def test_markup_of_a_description_is_shown_as_its_text(page: Page, server: Server) -> None:
    """Tags, styles and scripts are left out, references are read, and other signs stay."""
    html = (
        '<style>p{color:red}</style><p style="color:red">Made of <strong>steel</strong> &amp;'
        "&nbsp;wood,<br>2 < 3 kg.</p><script>document.title='x'</script>"
        "<img src=x onerror=\"document.title='y'\">&lt;end&gt;"
    )
    with server.client() as http:
        item = {"item_id": "chair", "title": "A <b>ch</b>air", "description": html}
        http.post("/v1/items", json={"items": [item]}).raise_for_status()
    page.goto(f"{server.url}/#/catalogue/chair")
    expect(page.locator(".description")).to_have_text("Made of steel & wood, 2 < 3 kg. <end>")
    expect(page.get_by_role("heading", name="A chair", exact=True)).to_be_visible()
    expect(page.get_by_label("Description")).to_have_value(html)
    assert page.title() == "Heed"


def test_every_category_can_be_reached(page: Page, server: Server) -> None:
    """The few first values of a field can be followed by all of them, each a filter."""
    with server.client() as http:
        asked = {"limit": 1, "facets": [{"field": "categories", "limit": 1000}]}
        (facet,) = http.post("/v1/search", json=asked).json()["facets"]
    few = json.dumps(facet | {"values": facet["values"][:2], "other": 9})

    def cut(route: Route) -> None:
        told = route.fetch().json()
        if '"field":"categories","limit":6' in (route.request.post_data or "").replace(" ", ""):
            told["facets"] = [json.loads(few)]
        route.fulfill(json=told)

    page.route("**/v1/search", cut)
    page.reload()
    open_tab(page, "Catalogue")
    chips = page.locator("#catalogue-chips").get_by_role("group", name="categories")
    expect(chips.locator("[aria-pressed]")).to_have_count(2)
    chips.get_by_role("button", name="All categories").click()
    expect(chips.locator("[aria-pressed]")).to_have_count(len(facet["values"]))
    expect(chips).not_to_contain_text("Only the")
    last = facet["values"][-1]
    chips.locator("[aria-pressed]").last.click()
    expect(page.locator("#catalogue-note")).to_contain_text(f"of {last['count']} item")


def test_a_field_of_too_many_values_says_that_some_are_listed(page: Page) -> None:
    def more(route: Route) -> None:
        told = route.fetch().json()
        for facet in told.get("facets", []):
            facet["other"] = 7
        route.fulfill(json=told)

    page.route("**/v1/search", more)
    open_tab(page, "Catalogue")
    chips = page.locator("#catalogue-chips").get_by_role("group", name="categories")
    expect(chips).not_to_contain_text("Only the")
    chips.get_by_role("button", name="All categories").click()
    expect(chips).to_contain_text("Only the 1,000 most frequent are listed.")


@pytest.mark.changes_data
def test_an_item_is_hidden_and_shown_again(page: Page, server: Server) -> None:
    """A hidden item is in no answer and is listed among the hidden ones, from where it returns."""
    page.goto(f"{server.url}/#/catalogue/space-03")
    page.get_by_role("button", name="Hide from every answer").click()
    expect(page.locator("#catalogue-one .badge")).to_have_text("hidden")
    with server.client() as http:
        every = http.post("/v1/search", json={"limit": 100}).json()["items"]
        assert "space-03" not in {item["item_id"] for item in every}
        assert len(every) == 59
        page.get_by_label("only hidden items").check()
        expect(listed(page)).to_have_count(1)
        assert ids(page) == ["space-03"]
        page.get_by_role("button", name="Show again").click()
        expect(page.locator("#catalogue-one .badge")).to_have_count(0)
        assert http.get("/v1/items", params={"hidden": True}).json()["items"] == []
        every = http.post("/v1/search", json={"limit": 100}).json()["items"]
        assert len(every) == 60


def test_an_unknown_item_is_told(page: Page, server: Server, refusals: list[int]) -> None:
    """The address of an item that is not there says so."""
    refusals.append(404)
    page.goto(f"{server.url}/#/catalogue/no%2Fsuch")
    expect(page.locator("#catalogue-one")).to_contain_text("There is no such item.")
    expect(page.locator("#catalogue-one h2")).to_have_text("no/such")
