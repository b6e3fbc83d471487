"""Models: training with its curve, as it runs."""

from __future__ import annotations

from typing import Any

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
    told = f"Loss: from {job['curve'][0]['loss']:#.3g} to {job['curve'][-1]['loss']:#.3g}"
    label = page.locator("#loss svg").get_attribute("aria-label") or ""
    assert label.startswith(told)
    expect(page.locator("#version-list > li")).to_have_count(len(versions))
    expect(page.get_by_role("button", name="Start training")).to_be_enabled()


def test_a_running_training_is_found_after_a_reload(page: Page, world: World) -> None:
    """A training that runs already is followed: progress, curve, and the version that it made."""
    states = iter([JOB, JOB])
    done = JOB | {
        "state": "succeeded",
        "finished": "2026-01-01T12:03:20Z",
        "metrics": {"ndcg": 0.25},
        "result": {"version": world.second},
    }
    page.route("**/v1/jobs?*", lambda route: route.fulfill(json={"jobs": [JOB]}))
    page.route("**/v1/jobs/job-1", lambda route: route.fulfill(json=next(states, done)))
    open_tab(page, "Models")
    expect(page.locator("#job-note")).to_have_text(
        "training, epoch 3 of at most 12, about 3 min left"
    )
    assert page.get_by_role("progressbar").evaluate("bar => bar.value") == 0.25
    chart = page.get_by_role("img", name="Loss: from 4.00 to 2.00, epoch 1 to 3")
    expect(chart).to_be_visible()
    points = chart.locator("polyline").get_attribute("points")
    assert points == "0,3 50,30 100,57"
    page.unroute("**/v1/jobs?*")
    page.route("**/v1/jobs?*", lambda route: route.fulfill(json={"jobs": [done]}))
    expect(page.locator("#job-note")).to_have_text(
        f"Version {world.second} in 3 min, NDCG@10 0.250."
    )
    expect(page.get_by_role("progressbar")).to_be_hidden()


def test_a_training_is_stopped(page: Page) -> None:
    """The button of a running training asks the service to stop it."""
    asked: list[str] = []

    def cancel(route: Route) -> None:
        asked.append(route.request.method)
        route.fulfill(status=202, json=JOB)

    page.route("**/v1/jobs?*", lambda route: route.fulfill(json={"jobs": [JOB]}))
    page.route("**/v1/jobs/job-1", lambda route: route.fulfill(json=JOB))
    page.route("**/v1/jobs/job-1/cancel", cancel)
    open_tab(page, "Models")
    page.get_by_role("button", name="Stop the training").click()
    expect(page.get_by_role("alert")).to_contain_text("stops within some seconds")
    assert asked == ["POST"]
