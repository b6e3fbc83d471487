"""Pages of other origins, in a real browser, can neither change nor read the service."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.support.driving import stored
from tests.support.server import Server
from tests.support.tiny import World

# Sends one request, and tells what the page may see of its answer.
SEND = """async ([url, options]) => {
  try {
    const answer = await fetch(url, options);
    return `${answer.status} ${await answer.text()}`;
  } catch (error) { return String(error); }
}"""
EVENT = '{"events": [{"user_id": "u4", "item_id": "space-00", "type": "forged"}]}'


class _Page(http.server.BaseHTTPRequestHandler):
    """An empty page at every path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """The port of another site."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield site.server_port
        site.shutdown()
        thread.join()


@pytest.mark.parametrize("host", ["evil.example", "localhost", "127.0.0.1"])
def test_page_of_another_origin_can_neither_read_nor_write(
    browser: Browser, server: Server, elsewhere: int, world: World, host: str
) -> None:
    writes: list[tuple[str, dict[str, Any]]] = [
        ("/v1/models/train", {"body": ""}),
        ("/v1/models/train", {}),
        (f"/v1/models/{world.second}/activate", {"body": ""}),
        (f"/v1/models/{world.second}/activate", {}),
        ("/v1/events", {"body": EVENT}),
    ]
    before = stored(server)
    page = browser.new_page()
    page.goto(f"http://{host}:{elsewhere}/")
    statuses: list[int] = []
    page.on("response", lambda answer: statuses.append(answer.status))
    for path, options in writes:
        sent = {"method": "POST", "mode": "no-cors", **options}
        assert page.evaluate(SEND, [server.url + path, sent]) == "0 "  # an opaque answer
    page.evaluate(
        """url => { const form = document.createElement("form"); form.method = "post";
                    form.action = url; document.body.append(form); form.submit(); }""",
        f"{server.url}/v1/models/train",
    )
    page.wait_for_url(f"{server.url}/v1/models/train")
    assert statuses == [403] * (len(writes) + 1)
    page.goto(f"http://{host}:{elsewhere}/")
    for path in ("/v1/users", "/v1/users/u4/history", "/metrics"):
        assert page.evaluate(SEND, [server.url + path, {}]) == "TypeError: Failed to fetch"
    page.close()
    assert stored(server) == before


def test_dns_rebinding_is_refused(browser: Browser, server: Server) -> None:
    """A page under a foreign name for this machine (DNS rebinding) gets 421."""
    before = stored(server)
    own = f"http://evil.example:{server.url.rpartition(':')[2]}"
    page = browser.new_page()
    page.goto(f"{own}/")  # only for its origin: the page of another site came before
    json = {"headers": {"content-type": "application/json"}}
    for path, options in [
        ("/v1/users", {}),
        ("/health/live", {}),
        ("/v1/users/u4", {"method": "DELETE"}),
        ("/v1/events", {"method": "POST", "body": EVENT, **json}),
        ("/v1/models/train", {"method": "POST", "body": "{}", **json}),
    ]:
        seen = page.evaluate(SEND, [own + path, options])
        assert seen.startswith("421 ")
        assert "HEED_ALLOWED_HOSTS" in seen
    page.close()
    assert stored(server) == before
