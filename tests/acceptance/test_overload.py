"""A real server with far more to do than it can: it answers some requests, and refuses the rest."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx

from tests.support import tiny
from tests.support.server import PATIENCE, Server

_BURSTS, _SIZE = 3, 20
_BATCH = {"requests": [{"path": "/v1/recommend", "body": {"user_id": "u1"}}] * 100}


def test_a_burst_is_answered_or_refused(world: tiny.World, tmp_path: Path) -> None:
    """Each request is 200, 429 or 503, the latter two with Retry-After, and then all is well."""

    async def load(server: Server) -> tuple[list[httpx.Response], list[int], httpx.Response]:
        async with server.connect() as client:
            burst: list[asyncio.Task[httpx.Response]] = []
            alive = []
            for _ in range(_BURSTS):
                burst += [
                    asyncio.create_task(client.post("/v1/batch", json=_BATCH)) for _ in range(_SIZE)
                ]
                alive.append((await client.get("/health/live")).status_code)
            async with asyncio.timeout(PATIENCE):
                answers = await asyncio.gather(*burst)
            return answers, alive, await client.post("/v1/recommend", json={"user_id": "u1"})

    with Server(world.copy(tmp_path / "data"), deadline=2) as server:
        answers, alive, after = asyncio.run(load(server))
    counts = Counter(answer.status_code for answer in answers)
    assert counts.keys() <= {200, 429, 503}
    assert counts[200] > 0
    assert counts[429] > 0
    for answer in answers:
        if answer.status_code != 200:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["title"] in ("Overloaded", "Deadline Exceeded")
    assert alive == [200] * _BURSTS
    assert after.status_code == 200
    assert "Traceback" not in server.log()
