"""The pages of docs/reference, compared with the code, and what is read of the metrics."""

from __future__ import annotations

import pytest

from service.domain.settings import Settings
from service.maintenance.installation import read_metrics
from tests.support import reference_pages
from tests.support.server import Server


@pytest.fixture(scope="module")
def made(trained: Server) -> dict[str, str]:
    """The pages as the code has them now."""
    with trained.client() as http:
        return reference_pages.pages(http)


@pytest.mark.parametrize("name", ["settings", "commands", "routes", "metrics"])
def test_the_page_is_what_the_code_says(made: dict[str, str], name: str) -> None:
    """A page is as `make reference` writes it."""
    page = (reference_pages.FOLDER / f"{name}.md").read_text("utf-8")
    assert page == made[name], "run make reference"


def test_the_doctor_reads_how_often_histories_are_cached(trained: Server) -> None:
    """What `heed doctor` reads of a real server has the counts that its check of the cache uses."""
    with trained.client() as http:
        for _ in range(3):
            body = {"user_id": "u3", "item_ids": ["space-01"]}
            http.post("/v1/score", json=body).raise_for_status()
    read = read_metrics(Settings(port=int(trained.url.rpartition(":")[2])), {})
    assert read is not None
    hits, misses = (read[f'heed_cache_{n}_total{{cache="history"}}'] for n in ("hits", "misses"))
    assert hits >= 2
    assert misses >= 1
