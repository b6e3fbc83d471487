"""Files of Heed whose code runs for one request, or one import.

Each is a chain that one person can hold in the head.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

import service
from service.domain.settings import Settings
from service.engine.engine import open_engine
from service.http.app import create_app
from tests.support import tiny
from tests.support.command_line import Heed
from tests.support.tiny import item_id

ROOT = Path(service.__file__).parents[1]
ROOMS = f"{ROOT}/service", f"{ROOT}/models"
TIMES = 5  # files that run for all of these requests are the request's, not of work beside it
WHO = {"user_id": "u1"}
FULL = {
    "limit": 20,
    "explain": 2,
    "fields": ["categories"],
    "filter": {"field": "categories", "eq": "even"},
    "rules": [{"name": "high", "when": {"field": "attributes.number", "gt": 9}, "boost": 1}],
}
# Most files of each, two more than there are for work beside it, and its path and body.
REQUESTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "score": (31, "/v1/score", {**WHO, "item_ids": [item_id(0, n) for n in range(12)]}),
    "recommend": (35, "/v1/recommend", {**WHO, "limit": 20}),
    "recommend with filter, rule, reason and field": (52, "/v1/recommend", {**WHO, **FULL}),
    "search": (35, "/v1/search", {"query": "space rocket"}),
    "one event": (25, "/v1/events", {"events": [{**WHO, "item_id": item_id(0, 1)}]}),
}

MOST_OF_IMPORT = 37


class Crossed:
    """Collects the files in which functions are called, in every thread."""

    def __init__(self) -> None:
        self.files = set[str]()
        self.is_on = False

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; the signature is that of `sys.setprofile`."""
        name = frame.f_code.co_filename
        if (
            self.is_on
            and event == "call"
            and name.startswith((f"{ROOT}/service", f"{ROOT}/models"))
        ):
            self.files.add(name)

    @contextmanager
    def counting(self) -> Iterator[set[str]]:
        """Collect the files of a block."""
        self.files, self.is_on = set(), True
        try:
            yield self.files
        finally:
            self.is_on = False


@contextmanager
def profiled() -> Iterator[Crossed]:
    """Profile this thread and those that are started in the block."""
    crossed, before = Crossed(), sys.getprofile()
    threading.setprofile(crossed.profile)
    sys.setprofile(crossed.profile)
    try:
        yield crossed
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def test_a_request_runs_code_in_few_files(
    world: tiny.World, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Each kind of request crosses no more files than its bound; the numbers are printed."""
    data = world.copy(tmp_path / "data")

    async def count(crossed: Crossed) -> dict[str, int]:
        settings = Settings(data=data, deadline=60)
        app = create_app(settings, engine=await open_engine(settings))
        transport, counts = httpx.ASGITransport(app), dict[str, int]()
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            for name, (_, path, body) in REQUESTS.items():
                runs = []
                for _ in range(TIMES + 1):
                    with crossed.counting() as files:
                        response = await client.post(path, json=body)
                    assert response.status_code == 200, response.text
                    runs.append(frozenset(files))
                counts[name] = len(frozenset.intersection(*runs[1:]))  # the first fills caches
        return counts

    with profiled() as crossed:
        counts = asyncio.run(count(crossed))
    for name, files in counts.items():
        record_property(f"files crossed by {name}", files)
    beyond = {name: n for name, n in counts.items() if n > REQUESTS[name][0]}
    assert beyond == {}, counts
    assert min(counts.values()) > 10  # they were counted at all


def test_a_csv_import_runs_code_in_few_files(
    heed: Heed, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    path = tmp_path / "events.csv"

    def import_events(user: str) -> int:
        times = "".join(f"{user},talk-{n},2026-01-0{n}T09:00:00Z\n" for n in range(1, 9))
        path.write_text(f"user_id,item_id,timestamp\n{times}")
        return heed("import", "events", path).code

    assert import_events("ada") == 0  # modules are imported
    with profiled() as crossed, crossed.counting() as files:
        assert import_events("bob") == 0
    record_property("files crossed by a CSV import", len(files))
    assert 10 < len(files) <= MOST_OF_IMPORT, sorted(files)
