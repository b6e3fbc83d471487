"""The table of metrics in service/README.md, compared with what a real server prints."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from service.domain.settings import Settings
from service.maintenance.doctor.running_service import read_metrics
from tests.support.server import Server

README = Path(__file__).parents[2] / "service" / "README.md"
ROW = re.compile(r"^\| `(heed_\w+)` \| (\w+) \| (.*?) \| (.+) \|$", re.MULTILINE)
OF_ALL = {"worker", "namespace", "le"}

Described = dict[str, tuple[str, set[str], str]]


def test_the_table_lists_what_is_printed(trained: Server) -> None:
    """Each metric has its row, with its type, its labels and its help; none has two or too many."""
    with trained.client() as http:
        http.post("/v1/score", json={"item_ids": ["a"]})
        http.get("/v1/items/no-such-item")
        text = http.get("/metrics").text
    printed: Described = {}
    for family in text_string_to_metric_families(text):
        labels = {name for sample in family.samples for name in sample.labels} - OF_ALL
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if name.startswith("heed_"):
            printed[name] = family.type, labels, family.documentation
    rows = ROW.findall(README.read_text("utf-8"))
    documented: Described = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows
    }
    assert len(rows) == len(documented)
    assert documented == printed


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
