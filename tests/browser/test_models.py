"""Models: training with its curve, as it runs."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.driving import open_tab
from tests.support.server import Server
from tests.support.tiny import World

JOB: dict[str, Any] = {
    "job_id": "job-1",
    "state": "running",
    "options": {},
    "created": "2026-01-01T12:00:00Z",
    "started": "2026-01-01T12:00:00Z",
    "finished": None,
    "progress": {"stage": "training", "step": 30, "steps": 120, "epoch": 3, "epochs": 12,
                 "loss": 2.0, "eta_s": 200.0},
    "curve": [{"epoch": 1, "loss": 4.0}, {"epoch": 2, "loss": 3.0, "ndcg": 0.1},
              {"epoch": 3, "loss": 2.0, "ndcg": 0.25}],
    "metrics": None,
    "result": None,
    "error": None,
}  # fmt: skip
COLOURS = {  # of styles/base.css
    "--accent": {"light": "2546c8", "dark": "9db2ff"},
    "--down": {"light": "b3441e", "dark": "f0936c"},
}
OTHER = {"light": "dark", "dark": "light"}


def follow(page: Page, job: dict[str, Any]) -> None:
    """Open the tab while this training runs, as it is."""
    page.route("**/v1/jobs?*", lambda route: route.fulfill(json={"jobs": [job]}))
    page.route("**/v1/jobs/job-1", lambda route: route.fulfill(json=job))
    open_tab(page, "Models")
    expect(page.locator("#curve canvas")).to_be_visible()


def ink(page: Page, place: str) -> dict[str, int]:
    """Count the opaque pixels of a chart by colour."""
    counted: dict[str, int] = page.evaluate(
        """async place => {
        await new Promise(requestAnimationFrame); // what is to be drawn is drawn first
        const drawn = document.querySelector(place + " canvas");
        const copy = new OffscreenCanvas(drawn.width, drawn.height).getContext("2d");
        copy.drawImage(drawn, 0, 0);
        const { data } = copy.getImageData(0, 0, drawn.width, drawn.height);
        const counted = {};
        for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) {
            const name = [0, 1, 2].map(
                one => data[at + one].toString(16).padStart(2, "0")).join("");
            counted[name] = (counted[name] ?? 0) + 1;
        }
        return counted; }""",
        place,
    )
    return counted


@pytest.mark.changes_data
def test_a_training_is_started_and_followed_to_its_end(page: Page, server: Server) -> None:
    """A training started on the page ends as the API says, with the curve of its losses."""
    open_tab(page, "Models")
    page.get_by_label("Preset").select_option("quick")
    page.get_by_label("Epochs at most").fill("2")
    page.get_by_role("button", name="Start training").click()
    expect(page.get_by_role("heading", name="Training now")).to_be_visible()
    expect(page.get_by_role("button", name="Start training")).to_be_disabled()
    heading = page.get_by_role("heading", name="The last training")
    expect(heading).to_be_visible(timeout=120_000)
    with server.client() as http:
        (job,) = http.get("/v1/jobs").json()["jobs"]
        versions = http.get("/v1/models").json()["models"]
    assert job["options"] == {"preset": "quick", "epochs": 2}
    assert job["state"] in {"succeeded", "failed"}
    expect(page.locator("#job-state")).to_contain_text(job["state"])
    epochs = [point["epoch"] for point in job["curve"]]
    assert epochs == sorted(set(epochs))
    assert len(epochs) >= 2
    told = f"Loss from {job['curve'][0]['loss']:#.3g} to {job['curve'][-1]['loss']:#.3g}, "
    label = page.locator("#curve").get_by_role("img").get_attribute("aria-label") or ""
    assert label.startswith(told)
    assert label.endswith(f", epochs {epochs[0]} to {epochs[-1]}")
    expect(page.locator("#version-list > li")).to_have_count(len(versions))
    expect(page.get_by_role("button", name="Start training")).to_be_enabled()


def test_a_running_training_is_found_after_a_reload(page: Page, world: World) -> None:
    """A training that runs already is followed: progress, curve, and the version that it made."""
    states = iter([JOB, JOB])
    done = JOB | {
        "state": "succeeded",
        "finished": "2026-01-01T12:03:20Z",
        "metrics": {"ndcg": 0.25},
        "result": {"version": world.second, "sentence": "Better than v1, served until now."},
    }
    page.route("**/v1/jobs?*", lambda route: route.fulfill(json={"jobs": [JOB]}))
    page.route("**/v1/jobs/job-1", lambda route: route.fulfill(json=next(states, done)))
    open_tab(page, "Models")
    expect(page.locator("#job-note")).to_have_text(
        "training, epoch 3 of at most 12, about 3 min left in this stage"
    )
    expect(page.get_by_text("Trainings before")).to_be_hidden()
    assert page.get_by_role("progressbar").evaluate("bar => bar.value") == 0.25
    name = "Loss from 4.00 to 2.00, NDCG@10 from 0.100 to 0.250, epochs 1 to 3"
    expect(page.get_by_role("img", name=name)).to_be_visible()
    page.unroute("**/v1/jobs?*")
    page.route("**/v1/jobs?*", lambda route: route.fulfill(json={"jobs": [done]}))
    expect(page.locator("#job-note")).to_have_text(
        f"Version {world.second}, trained in 3 min. Better than v1, served until now."
    )
    expect(page.get_by_role("progressbar")).to_be_hidden()


def test_a_training_is_shown_on_every_tab_until_its_model_answers(
    page: Page, server: Server
) -> None:
    """Progress and time left stand beside the model; what is shown is asked again at the end."""
    jobs = [JOB]
    page.route("**/v1/jobs?*", lambda route: route.fulfill(json={"jobs": jobs}))
    page.route("**/v1/jobs/job-1", lambda route: route.fulfill(json=jobs[0]))
    page.clock.install()
    page.reload()
    note = page.locator("#training-note")
    expect(note).to_have_text(
        "Training now: training, epoch 3 of at most 12, about 3 min left in this stage."
    )
    page.set_viewport_size({"width": 390, "height": 900})
    for tab in ("Catalogue", "People", "Models", "Scenarios", "Explore"):
        open_tab(page, tab)
        expect(note).to_be_in_viewport()
    page.clock.pause_at(page.evaluate("Date.now()") + 1000)
    jobs[:] = [JOB | {"state": "succeeded", "result": {}}]
    with page.expect_request("**/v1/rows"):
        page.clock.run_for(4000)
    expect(note).to_be_hidden()


def test_the_sentence_of_a_version_is_that_of_its_training(page: Page, world: World) -> None:
    """The sentence of a training is shown as it is, but not as true of what is served."""
    told = (
        "Better than popularity: NDCG@10 0.1176 instead of 0.1050 on 943 held-out events (95 % "
        "interval 0.1 to 0.2); it is served. Its ten recommendations hold it for 22 of 100 users."
    )
    verdict = {"is_served": True}

    def judged(route: Route) -> None:
        models = route.fetch().json()["models"]
        for model in models:
            model["metadata"] |= {"sentence": told, "verdict": verdict}
        route.fulfill(json={"models": models})

    page.route("**/v1/models", judged)
    page.reload()
    note = "Better than popularity. Its ten recommendations hold it for 22 of 100 users."
    expect(page.locator("#model-note")).to_have_text(note)  # without figures
    verdict["is_served"] = False
    page.reload()
    note = "It was activated although it was no better when it was trained."
    expect(page.locator("#model-note")).to_have_text(note)
    open_tab(page, "Models")
    version = page.locator(f"[data-version='{world.first}']")
    expect(version.locator(".reason")).to_have_text(told)
    expect(version.locator(".bars")).to_be_hidden()
    version.get_by_text("Figures").click()
    expect(version.locator(".bars")).to_be_visible()


def test_the_legend_names_the_epoch_under_the_pointer(page: Page) -> None:
    """The legend has the figures of the epoch that is pointed at, else of the last one."""
    follow(page, JOB)
    legend = page.locator("#curve .u-legend")
    expect(legend).to_have_text("Epoch3Loss2.00NDCG@100.250")
    area = page.locator("#curve .u-over")
    box = area.bounding_box()
    assert box is not None
    # Epochs stand evenly from the left edge of the area to its right one.
    for share, told in (
        (0.02, "Epoch1Loss4.00NDCG@10–"),
        (0.55, "Epoch2Loss3.00NDCG@100.100"),
        (0.98, "Epoch3Loss2.00NDCG@100.250"),
        (0.30, "Epoch2Loss3.00NDCG@100.100"),
    ):
        area.hover(position={"x": share * box["width"], "y": box["height"] / 2})
        expect(legend).to_have_text(told)
    page.get_by_role("heading", name="Versions").hover()
    expect(legend).to_have_text("Epoch3Loss2.00NDCG@100.250")


def test_the_curve_grows_while_a_training_runs(page: Page) -> None:
    """A further epoch appears in the legend, in the chart's name and in the table."""
    states = [JOB]
    page.route("**/v1/jobs?*", lambda route: route.fulfill(json={"jobs": states[-1:]}))
    page.route("**/v1/jobs/job-1", lambda route: route.fulfill(json=states[-1]))
    open_tab(page, "Models")
    page.get_by_text("Figures of each epoch").click()
    rows = page.locator("#curve-figures tbody tr")
    expect(rows).to_have_text(["14.00–", "23.000.100", "32.000.250"])
    before = ink(page, "#curve")
    states.append(JOB | {"curve": [*JOB["curve"], {"epoch": 4, "loss": 1.5, "ndcg": 0.2}]})
    expect(rows).to_have_text(["14.00–", "23.000.100", "32.000.250", "41.500.200"])
    expect(page.locator("#curve .u-legend")).to_have_text("Epoch4Loss1.50NDCG@100.200")
    expect(
        page.get_by_role("img", name="NDCG@10 from 0.100 to 0.200, epochs 1 to 4")
    ).to_be_visible()
    assert ink(page, "#curve") != before


def test_charts_take_the_colours_of_the_scheme(page: Page) -> None:
    """Each scheme has its colours in a chart that is drawn already, and none of the other's."""
    follow(page, JOB)
    schemes: tuple[Literal["light", "dark", "light"], ...] = ("light", "dark", "light")
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        drawn = ink(page, "#curve")
        for _ in range(100):  # a chart is redrawn in the next frame
            if COLOURS["--accent"][scheme] in drawn:
                break
            page.wait_for_timeout(50)
            drawn = ink(page, "#curve")
        for name in ("--accent", "--down"):  # of the losses and of the validation
            here, there = COLOURS[name][scheme], COLOURS[name][OTHER[scheme]]
            assert drawn.get(here, 0) > 100, (scheme, name)
            assert there not in drawn


def test_a_chart_is_as_wide_as_its_place(page: Page) -> None:
    """A chart fills its place, also after the window has become narrower or wider."""
    follow(page, JOB)
    for width in (1300, 390, 700, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(
            """() => { const [inner, outer] = ["#curve canvas", "#curve"].map(
            name => document.querySelector(name).getBoundingClientRect().width);
            return outer > 200 && Math.abs(inner - outer) < 1; }"""
        )


def test_a_training_is_stopped(page: Page) -> None:
    """The button of a running training asks the service to stop it."""
    asked: list[str] = []

    def cancel(route: Route) -> None:
        asked.append(route.request.method)
        route.fulfill(status=202, json=JOB)

    page.route("**/v1/jobs/job-1/cancel", cancel)
    follow(page, JOB)
    page.get_by_role("button", name="Stop the training").click()
    expect(page.get_by_role("alert")).to_contain_text("stops within some seconds")
    assert asked == ["POST"]


def test_a_model_that_was_judged_by_two_questions_shows_both(page: Page, world: World) -> None:
    """The sentence decides; behind it, what is new to the users has figures of its own."""
    metrics = {"hr": 0.31, "ndcg": 0.21, "user_hr": 0.47}
    rival = {"hr": 0.25, "ndcg": 0.15, "user_hr": 0.4}
    new = {
        "metrics": {"hr": 0.11, "ndcg": 0.06, "user_hr": 0.29},
        "baselines": {"EASE": {"hr": 0.08, "ndcg": 0.05, "user_hr": 0.22}},
    }

    def judged(route: Route) -> None:
        models = route.fetch().json()["models"]
        first = next(model for model in models if model["version"] == world.first)
        first["metrics"] = metrics
        first["metadata"] |= {"next_basket": True, "baselines": {"bought before": rival}}
        first["metadata"] |= {"new_items": new, "sentence": "Worse than the served model v9."}
        route.fulfill(json={"models": models})

    page.route("**/v1/models", judged)
    open_tab(page, "Models")
    card = page.locator(f"[data-version='{world.first}']")
    questions = card.locator(".question")
    expect(card.locator(".reason")).to_have_text("Worse than the served model v9.")
    card.get_by_text("Figures").click()
    expect(questions).to_have_count(2)
    next_basket, new_items = questions.all()
    expect(next_basket.get_by_role("heading")).to_have_text("The next basket")
    expect(new_items.get_by_role("heading")).to_contain_text("as recommended by default")
    figures = (["0.310", "0.250", "0.210", "0.150"], ["0.110", "0.080", "0.060", "0.050"])
    for question, shown in zip((next_basket, new_items), figures, strict=True):
        expect(question.locator(".share .number")).to_have_text(shown)
    expect(page.locator(f"[data-version='{world.second}'] .question")).to_have_count(1)
    expect(page.locator(f"[data-version='{world.second}'] h4")).to_have_count(0)
