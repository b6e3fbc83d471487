"""Known-item search over PyVideo, compared with the recorded ranks.

Run with `PYVIDEO=DIR pytest tests/known_items`, DIR holding videos.jsonl.gz; without it, nothing of
this file is collected.
"""

import json
import os
from pathlib import Path

from tests.known_items.known import LIST, known, record
from tests.support.command_line import Heed
from tests.support.server import Server

FOLDER = Path(os.environ["PYVIDEO"])


def test_evaluate_search_reproduces_the_record(heed: Heed, tmp_path: Path) -> None:
    """`heed evaluate-search` reproduces every recorded rank, and the means to 1e-6."""
    report = tmp_path / "report.json"
    said = heed("evaluate-search", FOLDER, "--judgments", LIST, "--json", report)
    assert said.code == 0, said.err
    assert "found in the first 3 by both: 30 of 30" in said.out
    found, recorded = json.loads(report.read_text()), record()
    for name in ("collection", "items", "digest", "encoder", "parameters", "ranks"):
        assert found[name] == recorded[name], f"{name}: record anew with make known PYVIDEO=DIR"
    for way, figures in recorded["ways"].items():
        for name, value in figures.items():
            assert abs(found["ways"][way][name] - value) < 1e-6


def test_server_reproduces_the_record(heed: Heed, tmp_path: Path) -> None:
    """POST /v1/search over the imported talks reproduces the recorded ranks."""
    said = heed("import", "pyvideo", FOLDER)
    assert said.code == 0, said.err
    with Server(tmp_path / "data") as server, server.client() as http:
        found = []
        for query, gains in known():
            answer = http.post("/v1/search", json={"query": query, "limit": 10}).json()
            ids = [item["item_id"] for item in answer["items"]]
            rank = next((at for at, id_ in enumerate(ids, 1) if id_ in gains), None)
            found.append({"query": query, "rank": rank})
    assert found == record()["ranks"]
