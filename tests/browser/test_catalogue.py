"""Catalogue: browsing, editing and hiding."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.driving import open_tab
from tests.support.server import Server


def listed(page: Page) -> Locator:
    """Items of the list."""
    return page.locator("#catalogue-list a")


def ids(page: Page) -> list[str]:
    """Ids of the items of the list."""
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
def test_a_description_in_html_is_shown_by_its_text(page: Page, server: Server) -> None:
    """The page of an item shows the text of its markup; the fields to edit are as stored."""
    written = "<p>A <b>sturdy</b>&nbsp;mug.</p><style>p { color: red }</style><div>Gift</div>"
    with server.client() as http:
        item = {"item_id": "mug", "title": "Mug", "description": written}
        http.post("/v1/items", json={"items": [item]}).raise_for_status()
    page.goto(f"{server.url}/#/catalogue/mug")
    expect(page.locator("p.description")).to_have_text("A sturdy mug. Gift")
    assert (
        written.replace('"', '\\"') in page.get_by_label(re.compile("^Item as JSON")).input_value()
    )


@pytest.mark.changes_data
def test_an_item_is_edited_by_what_changed_alone(page: Page, server: Server) -> None:
    """An edit sends the changed fields; a refusal marks the place; the list shows the new title."""
    page.goto(f"{server.url}/#/catalogue/space-03")
    editor = page.get_by_label(re.compile("^Item as JSON"))
    text = editor.input_value()
    editor.fill(text.replace('"number": 3', '"number": 33').replace('"language": "de"', '"x": 1'))
    with page.expect_request(lambda asked: asked.method == "PATCH") as sent:
        page.get_by_role("button", name="Save").click()
    patch = {"attributes": {"language": None, "number": 33, "x": 1}}
    assert sent.value.post_data_json == patch
    expect(page.get_by_role("alert")).to_have_text("Saved: attributes.")
    with server.client() as http:
        assert http.get("/v1/items/space-03").json()["attributes"] == {"number": 33, "x": 1}
    title = re.sub(r'"title": "[^"]*"', '"title": "a new <b>name</b>"', editor.input_value())
    editor.fill(title)
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#catalogue-one h2")).to_have_text("a new <b>name</b>")
    expect(page.locator("a[data-item='space-03']")).to_contain_text("a new <b>name</b>")


def test_a_refused_edit_points_at_the_place(
    page: Page, server: Server, refusals: list[int]
) -> None:
    """The value that the service refuses is selected, and named with what is allowed."""
    refusals.append(422)
    page.goto(f"{server.url}/#/catalogue/space-03")
    editor = page.get_by_label(re.compile("^Item as JSON"))
    editor.fill(
        '{"title": "t", "tags": ["ok", "\\\\" ], "categories": ["a", 5], "nonsense": {"a": 1}}'
    )
    page.get_by_role("button", name="Save").click()
    errors = page.locator("#catalogue-one .errors")
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
