"""The picture of an answer: what is drawn, compared with what the service answers."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.driving import (
    ask_why,
    assert_fits,
    audit,
    choose,
    recommended,
    results,
    search,
    settled,
)
from tests.support.server import Server

MOST_NODES = 3_000


def attended(page: Page, server: Server, **how: Any) -> dict[str, Any]:
    """Return the answer to the question behind the first recommendation to u3."""
    item = recommended(page).first.get_attribute("data-item")
    body = {"memory": {"user_id": "u3"}, "query": {"item_id": item}, "limit": 1000} | how
    with server.client() as http:
        answer: dict[str, Any] = http.post("/v1/attend", json=body).json()
    return answer


def means(answer: dict[str, Any]) -> list[float]:
    """The mean over the heads of the weight of each row."""
    return [sum(row) / len(row) for row in zip(*answer["weights"], strict=True)]


def asked(route: Route) -> dict[str, Any]:
    body = route.request.post_data_json
    assert isinstance(body, dict)
    return body


def retrieve(route: Route) -> None:
    """Answer what attends the `k` best rows of each head, however the service retrieves."""
    k = asked(route)["retrieval"].get("k")
    if k is None:
        route.continue_()
        return
    answer = route.fetch(post_data=asked(route) | {"retrieval": {"mode": "exact"}}).json()
    for head, weights in enumerate(answer["weights"]):
        least = sorted(weights)[-k:][0]
        kept = [weight if weight >= least else 0.0 for weight in weights]
        answer["mass"][head] = sum(kept)
        answer["weights"][head] = [weight / sum(kept) for weight in kept]
    places = [at for at, mean in enumerate(means(answer)) if mean > 0]
    for name in ("rows", "ids", "events"):
        answer[name] = [answer[name][at] for at in places]
    answer["weights"] = [[weights[at] for at in places] for weights in answer["weights"]]
    route.fulfill(json=answer | {"retrieval": "coarse"})


def test_the_sum_drawn_is_the_score(page: Page, server: Server) -> None:
    """Each part of the score is shown as answered, where the one before it ends."""
    choose(page, "u3")
    item = recommended(page).first.get_attribute("data-item")
    ask_why(page)
    with server.client() as http:
        body = {"user_id": "u3", "item_ids": [item]}
        (found,) = http.post("/v1/score", json=body).json()["items"]
    end = 0.0
    for part, value in found["parts"].items():
        line = page.locator(f"#sum [data-part={part}]")
        told = float(line.locator(".number").inner_text())
        assert told == pytest.approx(value, abs=5e-3)  # some seconds earlier
        end += told
    total = float(page.locator("#sum .total .number").inner_text())
    assert total == pytest.approx(end, abs=2e-3)
    assert total == pytest.approx(found["score"], abs=5e-3)
    left, width = "one => Number(one.getAttribute('x'))", "one => Number(one.getAttribute('width'))"
    bars = page.locator("#sum li:not(.total) rect")
    edges = [(bar.evaluate(left), bar.evaluate(width)) for bar in bars.all()]
    for before, after in pairwise(edges):
        assert {round(before[0], 2), round(sum(before), 2)} & {
            round(after[0], 2),
            round(sum(after), 2),
        }


def test_every_event_is_drawn_and_the_strongest_are_named(page: Page, server: Server) -> None:
    """Cells are events times heads, as dark as their weights; the strongest events have names."""
    choose(page, "u3")
    answer = attended(page, server)
    ask_why(page)
    heads, rows = len(answer["weights"]), len(answer["rows"])
    cells = page.locator("#events .cell")
    expect(cells).to_have_count(heads * rows)
    expect(page.locator("#events .retrieved, #events rect.unseen")).to_have_count(0)
    order = sorted(range(rows), key=lambda at: answer["events"][at]["timestamp"])
    drawn = [float(cell.get_attribute("fill-opacity") or 0) for cell in cells.all()]
    most = max(map(max, answer["weights"]))
    wanted = [max(0.05, (weights[at] / most) ** 0.5) for weights in answer["weights"]
              for at in order]  # fmt: skip
    assert drawn == pytest.approx(wanted, abs=0.01)
    strongest = sorted(zip(means(answer), answer["events"], strict=True), key=lambda one: -one[0])
    titles = sorted(event["title"] for _, event in strongest[:6])
    names = [re.sub(r" (< )?[\d.]+ %$", "", name.text_content() or "")
             for name in page.locator("#events .name").all()]  # fmt: skip
    assert sorted(names) == titles
    for _, event in strongest[:2]:
        expect(page.locator("#picture-caption")).to_contain_text(event["title"])
    for head in range(heads):
        told = page.locator("#events .mass").nth(head)
        expect(told).to_have_text(
            f"at most {100 * max(answer['weights'][head]):.1f} % on one event"
        )


def test_each_event_can_be_read(page: Page, server: Server) -> None:
    """Arrow keys, and a pointer, name the event, its time and the weight that each head gives."""
    choose(page, "u3")
    answer = attended(page, server)
    ask_why(page)
    oldest, newest = (
        pick(answer["events"], key=lambda one: one["timestamp"]) for pick in (min, max)
    )
    slider = page.get_by_role("slider", name="Event")
    slider.press("Home")
    expect(page.locator("#told-event")).to_contain_text(oldest["title"])
    expect(page.locator("#told-event")).to_contain_text(oldest["timestamp"][:10])
    at = answer["events"].index(oldest)
    for head, weights in enumerate(answer["weights"]):
        told = page.locator("#told-heads > span").nth(head)
        expect(told).to_have_text(re.compile(f"head {head + 1} "))
        shown = float((told.inner_text().split()[-2]).replace("<", ""))
        assert shown == pytest.approx(100 * weights[at], abs=0.2)
    value = slider.get_attribute("aria-valuetext") or ""
    assert oldest["title"] in value
    box = page.locator("#events .cell").last.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.locator("#told-event")).to_contain_text(newest["title"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_retrieved_events_are_marked(
    browser: Browser, server: Server, scheme: Literal["light", "dark"], width: int
) -> None:
    """Retrieved events are marked, others are empty; it fits, and passes the audit."""
    context = browser.new_context(
        bypass_csp=True,
        color_scheme=scheme,
        reduced_motion="reduce",
        viewport={"width": width, "height": 900},
    )
    page = context.new_page()
    page.route("**/v1/attend", retrieve)
    page.goto(server.url)
    choose(page, "u3")
    exact = attended(page, server)
    ask_why(page)
    page.get_by_label("8 that FAISS retrieves").check()
    expect(page.locator("#picture")).to_have_attribute("data-retrieval", "coarse")
    settled(page)
    heads, rows = len(exact["weights"]), len(exact["rows"])
    assert rows > 8
    expect(page.locator("#events .retrieved")).to_have_count(8 * heads)
    expect(page.locator("#events .cell")).to_have_count(8 * heads)
    expect(page.locator("#events rect.unseen")).to_have_count((rows - 8) * heads)
    masses = [sum(sorted(weights)[-8:]) for weights in exact["weights"]]
    for head, mass in enumerate(masses):
        told = f"8 retrieved hold {100 * mass:.1f} % of the attention"
        expect(page.locator("#events .mass").nth(head)).to_have_text(told)
    caption = page.locator("#picture-caption")
    expect(caption).to_contain_text(f"{100 * sum(masses) / heads:.1f} % of the attention")
    page.get_by_text("The same as a table").click()
    assert audit(page) == []
    assert_fits(page, width)
    edges = page.locator("#picture, #picture *").evaluate_all(
        "all => all.filter(one => !one.closest('.scroll, defs'))"
        ".map(one => one.getBoundingClientRect()).map(box => [box.left, box.right])"
    )
    assert [edge for edge in edges if edge[0] < 0 or edge[1] > width] == []
    context.close()


def test_the_picture_says_that_retrieval_was_not_coarse(page: Page) -> None:
    """An exact answer to a coarse question is drawn as what it is."""

    def answer(route: Route) -> None:
        body = asked(route) | {"retrieval": {"mode": "exact"}}
        route.fulfill(json=route.fetch(post_data=body).json())

    page.route("**/v1/attend", answer)
    choose(page, "u3")
    ask_why(page)
    page.get_by_label("8 that FAISS retrieves").check()
    expect(page.locator("#picture-caption")).to_contain_text("this answer attended every event")


def test_ten_thousand_events_share_cells(page: Page) -> None:
    """A long history is drawn with few elements, by sums, and read by its strongest event."""
    count = 12_000
    events = [
        {"user_id": "u3", "event_id": f"e{at}", "item_id": "space-01", "type": "view",
         "weight": 1.0, "timestamp": f"{2000 + at // 600}-01-{1 + at % 28:02}T00:00:00Z"}
        for at in range(count)
    ]  # fmt: skip

    def past(route: Route) -> None:
        start = int((re.search(r"cursor=(\d+)", route.request.url) or [0, 0])[1])
        page_of = events[::-1][start : start + 1000]
        cursor = str(start + 1000) if start + 1000 < count else None
        route.fulfill(json={"events": page_of, "cursor": cursor})

    def attend(route: Route) -> None:
        rows = list(range(count))[-1000:]
        named = [{key: events[at][key] for key in ("event_id", "item_id", "type", "timestamp")}
                 | {"title": f"event {at}"} for at in rows]  # fmt: skip
        weights = [[0.9 / 1000] * 1000] * 2
        route.fulfill(json={"rows": rows, "ids": [f"e{at}" for at in rows], "events": named,
                            "weights": weights, "mass": [1.0, 1.0], "retrieval": "exact",
                            "context": [], "model_version": "v", "degraded": False})  # fmt: skip

    choose(page, "u3")
    page.route("**/history?limit=1000*", past)
    page.route("**/v1/attend", attend)
    ask_why(page)
    expect(page.locator("#seen-title")).to_contain_text("12,000 events")
    assert page.locator("#events *").count() < MOST_NODES
    caption = page.locator("#picture-caption")
    expect(caption).to_contain_text("The 1,000 of most weight are drawn, which hold 90.0 %")
    expect(page.locator("#told-event")).to_contain_text(re.compile(r"^\d\d events up to"))


def test_typed_words_can_ask(page: Page) -> None:
    """Behind a search result the words can be the query, which has no score."""
    choose(page, "u3")
    search(page, "rocket")
    results(page).first.get_by_role("button", name=re.compile("^Why ")).click()
    settled(page)
    with page.expect_request(lambda sent: '"text":"rocket"' in (sent.post_data or "")):
        page.get_by_label("the words that were typed").check()
    expect(page.locator("#asked-title")).to_have_text("“rocket”")
    expect(page.locator("#sum li")).to_have_count(0)
    page.get_by_label("this item").check()
    expect(page.locator("#sum .total")).to_be_visible()
    page.get_by_role("button", name="Close").click()
    page.get_by_role("searchbox").fill("")
    settled(page)
    ask_why(page)
    expect(page.locator("#asked-by")).to_be_hidden()
