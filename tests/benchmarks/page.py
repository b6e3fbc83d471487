"""Time from the last key to the first results on the page.

A real browser types into the page of a real server, which serves the data directory as it is.
Measured in the page, from the last `input` event to the frame that shows the answer to the whole
text, so that the pause that the page waits for is included. Queries are beginnings of titles.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Annotated

import httpx
import numpy as np
import typer
from playwright.sync_api import Page, sync_playwright

from tests.benchmarks.harness.servers import heed
from tests.benchmarks.harness.tables import print_machine, rounds_of, table
from tests.browser.conftest import NAMES

_BUDGET = 100.0  # milliseconds
_WARM = 5  # queries that do not count

# Which text was answered last, and when the frame that shows it was made. An earlier text's answer
# may come after the last key; it does not count.
_WATCH = """
const asked = window.fetch;
let answered;
window.fetch = async (path, how) => {
  const answer = await asked(path, how);
  if (`${path}`.endsWith("v1/search")) answered = JSON.parse(how.body).query;
  return answer;
};
addEventListener("DOMContentLoaded", () => {
  const box = document.getElementById("query");
  box.addEventListener("input", () => {
    window.typed = performance.now();
    window.seen = undefined;
  }, true);
  new MutationObserver(() => {
    if (answered !== box.value) return;
    requestAnimationFrame(() => setTimeout(() => (window.seen ??= performance.now()), 0));
  }).observe(document.getElementById("results"), { childList: true });
});
"""


def queries(url: str, count: int) -> list[str]:
    """The first words of that many titles of the catalogue, two to four of them."""
    draw = random.Random(0)
    titles: list[str] = []
    cursor = None
    while len(titles) < 20_000:
        asked = {"limit": 1000} | ({} if cursor is None else {"cursor": cursor})
        found = httpx.get(f"{url}/v1/items", params=asked, timeout=60).raise_for_status().json()
        titles += [item["title"] for item in found["items"] if len(item["title"].split()) > 1]
        cursor = found["cursor"]
        if cursor is None:
            break
    chosen = draw.sample(titles, min(count, len(titles)))
    return [" ".join(title.split()[: draw.randint(2, 4)])[:60] for title in chosen]


def once(page: Page, query: str, delay: float) -> float:
    """Type a query as a person would; milliseconds from its last key to its first results."""
    page.get_by_role("searchbox").fill("")
    page.wait_for_function("document.querySelectorAll('#results > li').length === 0")
    page.get_by_role("searchbox").press_sequentially(query, delay=delay)
    page.wait_for_function("window.seen !== undefined")
    return float(page.evaluate("window.seen - window.typed"))


def page(
    data: Annotated[Path, typer.Argument(help="Data directory to serve, with a catalogue.")],
    count: Annotated[int, typer.Option(help="Queries that are typed.", min=1)] = 100,
    delay: Annotated[float, typer.Option(help="Milliseconds between keys.", min=0)] = 120,
) -> None:
    """Type into the page of a data directory; fails where p95 is above 100 ms."""
    print_machine("nothing pinned")
    with heed(data.resolve()) as server, sync_playwright() as playwright:
        url = f"http://127.0.0.1:{server.port}"
        texts = queries(url, count + _WARM)
        browser = playwright.chromium.launch(
            executable_path=next(filter(None, map(shutil.which, NAMES)), None),
            args=["--no-sandbox"],
        )
        tab = browser.new_page(bypass_csp=True)  # to wait for what is measured
        tab.add_init_script(_WATCH)
        wire = tab.context.new_cdp_session(tab)
        sent: list[float] = []
        wire.on("Network.loadingFinished", lambda event: sent.append(event["encodedDataLength"]))
        wire.send("Network.enable")
        tab.goto(url, wait_until="networkidle")
        weight = sum(sent)
        times = [once(tab, texts[at], delay) for at in rounds_of(len(texts), "typing")][_WARM:]
        browser.close()
    median, high = np.quantile(times, (0.5, 0.95))
    table(
        f"From the last key to the first results, {len(times)} queries, a key every {delay:g} ms",
        ("median ms", "p95 ms", "page kB"),
        [(f"{median:.0f}", f"{high:.0f}", f"{weight / 1000:.1f}")],
        left=0,
    )
    raise typer.Exit(int(high > _BUDGET))


if __name__ == "__main__":
    typer.run(page)
