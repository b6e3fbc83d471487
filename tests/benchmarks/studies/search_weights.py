"""Judged searches by weight of meaning: calibrated, fitted on itself, and on other collections.

    python -m tests.benchmarks.studies.search_weights DIR... [--split train]

Each collection is searched in variants: in capitals, without titles, and with short texts alone.
PyVideo is searched for the known items of `tests/known_items`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from models.evaluation.full_ranking import graded_ndcg
from models.ranking.matches import DEFAULTS
from service.cli.console import ENCODER, Encoder, out
from service.datasets.base import JudgedQuery
from service.domain.errors import Invalid
from service.domain.records import Item
from service.lab.public_data import PyVideo, open_collection
from service.lab.search_quality import evaluate_search
from service.maintenance.search_calibration import (
    SENTENCE_END,
    WEIGHTS,
    build_snapshot,
    calibrate,
    rank_by_weight,
)
from service.snapshots.text_embeddings import EmbeddingCache, open_encoder
from tests.known_items.known import known

_DEPTH = 10  # of nDCG


def untitled(text: Callable[[str], str]) -> Callable[[Item], Item]:
    """Return the change of an item to a part of its description, or of its title without one."""
    return lambda item: replace(item, title="", description=text(item.description or item.title))


def in_capitals(item: Item) -> Item:
    """Return an item with its texts in capitals."""
    return replace(item, title=item.title.upper(), description=item.description.upper())


VARIANTS: Mapping[str, Callable[[Item], Item]] = {
    "as is": lambda item: item,
    "capitals": in_capitals,
    "no titles": untitled(str),
    "first sentence": untitled(lambda text: SENTENCE_END.split(text)[0]),
    "first 20 words": untitled(lambda text: " ".join(text.split()[:20])),
    "first 12 words": untitled(lambda text: " ".join(text.split()[:12])),
}


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """The mean nDCG@10 of a variant of a collection.

    Attributes:
        meaning: by embeddings alone.
        by_weight: [W] by both, for each of `WEIGHTS`, of which the first is words alone.
        calibrated: the weight chosen without judgments.
    """

    collection: str
    variant: str
    meaning: float
    by_weight: NDArray[np.float64]
    calibrated: float


def measure(
    name: str, items: Sequence[Item], judged: Sequence[JudgedQuery], embeddings: EmbeddingCache
) -> Iterator[Measured]:
    """Search each variant of a collection by each weight; queries of capitals are in capitals."""
    for variant, change in VARIANTS.items():
        changed = [change(item) for item in items]
        try:
            calibrated = calibrate(changed, embeddings).parameters.meaning
        except Invalid:  # too few texts
            calibrated = DEFAULTS.meaning
        snapshot = build_snapshot(changed, embeddings)
        typed = str.upper if variant == "capitals" else str
        cases = [each._replace(query=typed(each.query)) for each in judged]
        ndcg = [
            [
                graded_ndcg(ranking, gains, _DEPTH)
                for ranking in rank_by_weight(snapshot, embeddings.query, query, _DEPTH)
            ]
            for query, gains in cases
        ]
        meaning = evaluate_search(
            snapshot, embeddings.query, cases, "meaning alone", depth=_DEPTH
        ).ndcg.mean()
        yield Measured(name, variant, float(meaning), np.mean(ndcg, axis=0), calibrated)


def left_out(measured: Sequence[Measured], collection: str) -> float:
    """Return the weight that is best on the mean of the other collections, their variants' means.

    Raises:
        ValueError: there is no other collection.
    """
    others: dict[str, list[NDArray[np.float64]]] = {}
    for each in measured:
        if each.collection != collection:
            others.setdefault(each.collection, []).append(each.by_weight)
    if not others:
        raise ValueError(f"there is no collection beside {collection}")
    means = np.mean([np.mean(variants, axis=0) for variants in others.values()], axis=0)
    return WEIGHTS[int(means.argmax())]


def show(measured: Sequence[Measured]) -> Table:
    """Return the table of all variants; weights stand in brackets."""
    table = Table("collection", "variant", "words", "meaning")
    for heading in ("default", "calibrated", "fitted on itself", "fitted on the others"):
        table.add_column(heading, justify="right")
    collections = {each.collection for each in measured}
    for each in measured:
        own = WEIGHTS[int(each.by_weight.argmax())]
        chosen = [DEFAULTS.meaning, each.calibrated, own]
        if len(collections) > 1:
            chosen.append(left_out(measured, each.collection))
        cells = [f"{each.by_weight[WEIGHTS.index(w)]:.4f} ({w:g})" for w in chosen]
        alone = (f"{each.by_weight[0]:.4f}", f"{each.meaning:.4f}")
        table.add_row(each.collection, each.variant, *alone, *cells)
    return table


def main(
    folders: list[Path],
    split: Annotated[str, typer.Option()] = "train",
    encoder: Encoder = ENCODER,
) -> None:
    """Print nDCG@10 of judged collections by words, by meaning, and by both for some weights."""
    measured: list[Measured] = []
    embeddings = EmbeddingCache(open_encoder(encoder))
    for folder in folders:
        source = open_collection(folder, split)
        judged = known() if isinstance(source, PyVideo) else source.judged_queries()
        measured += measure(source.name, list(source.items()), judged, embeddings)
    out.print(show(measured))


if __name__ == "__main__":
    typer.run(main)
