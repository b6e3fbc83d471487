"""Time from the last key to the first results on the page, for `make bench-page`.

A real browser types into the page of a real server, which serves the data directory as it is.
Measured in the page, from the last `input` event to the frame that shows the answer to the whole
text, so that the pause that the page waits for is included. Queries are beginnings of titles.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import httpx
import numpy as np
import typer
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.browser.conftest import NAMES
from tests.support.server import Server

_BUDGET = 100.0  # milliseconds

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


def queries(url: str, count: int, seed: int) -> list[str]:
    """The first words of that many titles of the catalogue, two to four of them."""
    draw = random.Random(seed)
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


def main(
    data: Annotated[Path, typer.Argument(help="Data directory to serve, with a catalogue.")],
    count: Annotated[int, typer.Option(help="How many queries are typed.", min=1)] = 100,
    delay: Annotated[float, typer.Option(help="Milliseconds between keys.", min=0)] = 120,
    seed: Annotated[int, typer.Option(help="Of the choice of queries.")] = 0,
) -> None:
    """Type into the page; tells the median, p95 and the page's weight. Fails where p95 > 100 ms."""
    console = Console()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        # Its log goes beside the data directory, which is none of ours.
        link = Path(folder) / "data"
        link.symlink_to(data.resolve(), target_is_directory=True)
        with Server(link) as server:
            texts = queries(server.url, count + 5, seed)
            browser = playwright.chromium.launch(
                executable_path=next(filter(None, map(shutil.which, NAMES)), None),
                args=["--no-sandbox"],
            )
            page = browser.new_page(bypass_csp=True)  # to wait for what is measured
            page.add_init_script(_WATCH)
            wire = page.context.new_cdp_session(page)
            sent: list[float] = []
            wire.on(
                "Network.loadingFinished", lambda event: sent.append(event["encodedDataLength"])
            )
            wire.send("Network.enable")
            page.goto(server.url, wait_until="networkidle")
            weight = sum(sent)
            for text in texts[:5]:  # not counted
                once(page, text, delay)
            times = [
                once(page, text, delay)
                for text in track(texts[5:], "typing", console=console, transient=True)
            ]
            browser.close()
    median, high = np.quantile(times, (0.5, 0.95))
    table = Table("what", "value", title="From the last key to the first results")
    table.add_row("queries", f"{len(times)}, a key every {delay:g} ms")
    table.add_row("median", f"{median:.0f} ms")
    table.add_row("p95", f"{high:.0f} ms")
    table.add_row("page weight", f"{weight / 1000:.1f} kB")
    table.add_row("load average", f"{before:.1f} before the run, {os.cpu_count()} cores")
    console.print(table)
    typer.echo(json.dumps({"median_ms": float(median), "p95_ms": float(high), "bytes": weight}))
    raise typer.Exit(int(high > _BUDGET))


if __name__ == "__main__":
    typer.run(main)
