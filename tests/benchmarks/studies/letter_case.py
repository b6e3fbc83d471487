"""Judged searches with their queries and texts in other letter case.

    python -m tests.benchmarks.studies.letter_case DIR [--split train]

A difference between two columns or two rows is what letter case alone is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.table import Table

from models.text.encoders import StaticEncoder
from service.cli.console import out
from service.datasets.base import Dataset
from service.lab.public_data import open_collection
from service.lab.search_quality import SEARCH_MODES, SearchMode, evaluate_search
from service.maintenance.search_calibration import build_snapshot
from service.snapshots.text_embeddings import EmbeddingCache

CASES: dict[str, Callable[[str], str]] = {
    "as is": str,
    "lower case": str.lower,
    "capitals": str.upper,
}


class Measured(NamedTuple):
    """The mean nDCG@10 of one way to search, for texts and queries in one letter case each."""

    way: SearchMode
    texts: str
    queries: str
    ndcg: float


def measure(source: Dataset) -> Iterator[Measured]:
    """Search a collection in every combination of letter cases."""
    items, judged = list(source.items()), source.judged_queries()
    for texts in ("as is", "capitals"):
        recased = CASES[texts]
        embeddings = EmbeddingCache(StaticEncoder())
        snapshot = build_snapshot(
            (
                replace(item, title=recased(item.title), description=recased(item.description))
                for item in items
            ),
            embeddings,
        )
        for way in SEARCH_MODES:
            for queries, typed in CASES.items():
                cases = [each._replace(query=typed(each.query)) for each in judged]
                quality = evaluate_search(snapshot, embeddings.query, cases, way)
                yield Measured(way, texts, queries, float(quality.ndcg.mean()))


def main(folder: Path, split: Annotated[str, typer.Option()] = "train") -> None:
    """Print the mean nDCG@10 of a judged collection for each letter case."""
    table = Table("read by", "texts", *(f"queries {case}" for case in CASES))
    rows: dict[tuple[str, str], list[str]] = {}
    for each in measure(open_collection(folder, split)):
        rows.setdefault((each.way, each.texts), []).append(f"{each.ndcg:.4f}")
    for names, cells in rows.items():
        table.add_row(*names, *cells)
    out.print(table)


if __name__ == "__main__":
    typer.run(main)
