"""A real browser on a real server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.driving import settled, stored
from tests.support.server import Server
from tests.support.tiny import World

# The shell is Chromium without the windows of a desktop, which take most of the time of a page.
NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)

# A page that shares its processor with other tests may need longer than the usual five seconds.
expect.set_options(timeout=15_000)


@pytest.fixture(scope="module")
def browser(world: World) -> Iterator[Browser]:
    """Chromium: the system's, or else the one that `playwright install chromium` fetched.

    Every name under `.example` is this machine. It lives for one module, since no other loop can
    run in this thread meanwhile.
    """
    found = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        # Its sandbox needs rights that containers do not give; it loads nothing but our own page.
        options = ["--no-sandbox", "--host-resolver-rules=MAP *.example 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=found, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def shared(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for all tests that change nothing of what it stores."""
    with Server(world.copy(tmp_path_factory.mktemp("shared") / "data")) as server:
        yield server


@pytest.fixture
def server(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> Iterator[Server]:
    """A server of this test's own where it is marked `changes_data`, else that of all others."""
    if request.node.get_closest_marker("changes_data"):
        with Server(world.copy(tmp_path / "data")) as server:
            yield server
        return
    server = request.getfixturevalue("shared")
    before = stored(server)
    yield server
    assert stored(server) == before, "mark this test changes_data"


@pytest.fixture
def size() -> tuple[int, int]:
    return 1300, 900


@pytest.fixture
def refusals() -> list[int]:
    """Statuses of refused requests that a test expects, and so the console may name."""
    return []


@pytest.fixture
def page(
    browser: Browser, server: Server, size: tuple[int, int], refusals: list[int]
) -> Iterator[Page]:
    """Yield the complete page; fail on console errors, warnings and requests elsewhere."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.set_default_timeout(15_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on("request", lambda asked: None if asked.url.startswith(server.url) else
            wrong.append(f"asked elsewhere: {asked.url}"))  # fmt: skip
    page.goto(server.url)
    settled(page)
    yield page
    page.close()
    expected = [f"a status of {status}" for status in refusals]
    assert [said for said in wrong if not any(status in said for status in expected)] == []
