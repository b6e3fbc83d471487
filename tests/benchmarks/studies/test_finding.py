"""The study of finding over a small catalogue."""

from __future__ import annotations

from models.text.static_encoder import StaticEncoder
from service.domain.records import Item
from service.evaluation.search_quality import build_snapshot
from service.snapshots.text_embeddings import EmbeddingCache
from tests.benchmarks.studies.finding import NONSENSE, measure, shown

TITLES = [
    "REGENCY CAKESTAND",
    "CAKE TIN",
    "UMBRELLA STAND",
    "LACE TABLE CLOTH",
    "GREEN GARDEN KETTLE",
    "LARGE PICTURE FRAME",
]


def test_every_kind_is_counted() -> None:
    """Ids, both kinds of compounds, nonsense and titles are counted; a hidden item is not."""
    embeddings = EmbeddingCache(StaticEncoder())
    items = [Item(f"{2_000 + n}A", title=title) for n, title in enumerate(TITLES)]
    items.append(Item("9A", title="SECRET", hidden=True))
    found = measure(build_snapshot(items, embeddings), items, embeddings.query)
    assert [(each.total, each.wrong) for each in found.counts] == [
        (6, []),
        (1, []),
        (9, []),
        (NONSENSE, []),
        (6, []),
    ]
    assert 0 < found.floor < 1
    assert "100 of 100" in str(found.as_dict()) or shown(found).row_count == 5
