"""Commands `heed evaluate-search` and `heed tune-search`, and the calibration after an import."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from service.cli.console import DATA, ENCODER, Data, Encoder, JsonFile, open_store, out, write_json
from service.domain.errors import Invalid
from service.runtime.data_layout import CACHE_FOLDER, EMBEDDINGS_FILE, SEARCH_FILE

Folder = Annotated[
    Path | None,
    typer.Argument(
        help="Folder of a collection: BEIR's corpus.jsonl, queries.jsonl and qrels/, Cranfield's "
        "three files, or PyVideo's videos.jsonl.gz with --judgments. Without it, the stored items "
        "are searched."
    ),
]
Judgments = Annotated[
    Path | None,
    typer.Option(
        help="Your own judgments of the stored items or of those in the folder: rows of query, "
        "item_id and gain (above 0 = relevant; default 1), as JSONL, CSV or Parquet."
    ),
]
_METRICS = ("nDCG@10", "recall@100")
Split = Annotated[str, typer.Option(help="Of BEIR's judgments: the file in qrels/.")]


def evaluate_search(
    folder: Folder = None,
    judgments: Judgments = None,
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    split: Split = "test",
    json_file: JsonFile = None,
) -> None:
    """Measure search on judged queries: by BM25 alone, by embeddings alone, and by both.

    Prints nDCG@10 with standard errors over the queries, recall@100, the share of queries with a
    relevant item among the first 3 (success@3), and paired-bootstrap differences between both and
    each alone. The JSON also has the rank of each query's first relevant item, and all that the
    ranks depend on: the encoder, the parameters, and a digest of the items.

    The items of a folder are searched with the parameters that an import would calibrate, the
    stored items with those that [bold]heed serve[/] uses.

    With another [bold]--encoder[/] the same texts are embedded by that encoder, into a file of
    its own.
    """
    from models.evaluation.metrics import standard_error
    from models.text.bm25 import TITLE_WEIGHT
    from service.evaluation import search_quality
    from service.evaluation.comparison_report import format_interval
    from service.snapshots.search_parameters import load_search_parameters

    searched = _searched(folder, judgments, data, encoder, split)
    judged, items = searched.judged, len(searched.snapshot.catalogue)
    read_by = searched.vectors.encoder.name
    if folder is None:
        used = load_search_parameters(data / SEARCH_FILE, read_by)
    else:
        used = _calibrated(searched.items, searched.vectors)
    with out.status(f"searching for {len(judged):,} queries"):
        found = {
            way: search_quality.evaluate_search(
                searched.snapshot, searched.vectors.query, judged, way, used
            )
            for way in search_quality.SEARCH_MODES
        }
    title = f"{searched.name}: {items:,} items, {len(judged):,} queries"
    table = _table(title, "retrieved by", *_METRICS, "success@3")
    for way, quality in found.items():
        table.add_row(
            way,
            f"{quality.ndcg.mean():.4f} ± {standard_error(quality.ndcg):.4f}",
            f"{quality.recall.mean():.4f}",
            f"{quality.success.mean():.4f}",
        )
    out.print(table)
    out.print(f"Texts are embedded by {read_by}.", soft_wrap=True)
    both = found["both"]
    out.print(f"found in the first 3 by both: {int(both.success.sum()):,} of {len(judged):,}")
    over = search_quality.differences(found)
    for way, difference in over.items():
        out.print(f"both over {way}, paired bootstrap: nDCG@10 {format_interval(difference)}")
    write_json(
        json_file,
        {
            "collection": searched.name,
            "items": items,
            "digest": searched.digest,
            "queries": len(judged),
            "encoder": read_by,
            "parameters": used.as_dict(),
            "title_counts": TITLE_WEIGHT,
            "ways": {
                way: {
                    "ndcg": float(quality.ndcg.mean()),
                    "recall": float(quality.recall.mean()),
                    "success": float(quality.success.mean()),
                }
                for way, quality in found.items()
            },
            "both_over": {way: difference._asdict() for way, difference in over.items()},
            # From 1; null if no relevant item was found.
            "ranks": [
                {"query": query, "rank": rank + 1 if rank < search_quality.RECALL_AT else None}
                for (query, _), rank in zip(judged, both.ranks.tolist(), strict=True)
            ],
        },
    )


def tune_search(
    folder: Folder = None,
    judgments: Judgments = None,
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    split: Split = "train",
    seed: Annotated[int, typer.Option(min=0, help="Of the split.")] = 0,
) -> None:
    """Fit the parameters of search on half of the judged queries, and evaluate on the other half.

    Parameters fitted on judgments of the stored items are saved if they improve the other half;
    [bold]heed serve[/] reads them when it next starts with the same text encoder. Never fit on
    queries whose results you report.

    Without judgments, the weight of embeddings beside words is calibrated to the stored items:
    their titles and sentences, held out, are the queries that shall find them.
    [bold]heed import[/] does the same for the static encoder, unless judgments were fitted to.
    """
    from service.cli import progress_bars
    from service.evaluation import search_quality
    from service.evaluation.comparison_report import format_interval
    from service.snapshots.search_parameters import (
        FittedParameters,
        load_search_parameters,
        save_search_parameters,
    )

    if folder is None and judgments is None:
        with open_store(data) as store:
            _calibrate(store, data, encoder)
        return
    searched = _searched(folder, judgments, data, encoder, split)
    vectors = searched.vectors
    read_by = vectors.encoder.name
    start = load_search_parameters(data / SEARCH_FILE, read_by)
    with progress_bars.stage_bars(out) as progress:
        tuned = search_quality.tune_parameters(
            searched.snapshot,
            vectors.query,
            searched.judged,
            start=start,
            seed=seed,
            progress=progress,
        )
    title = f"{searched.name}: {len(tuned.after.ndcg):,} held-out queries"
    table = _table(title, "parameters", *_METRICS)
    for label, quality in (("before", tuned.before), ("fitted", tuned.after)):
        table.add_row(label, f"{quality.ndcg.mean():.4f}", f"{quality.recall.mean():.4f}")
    out.print(table)
    out.print(f"fitted over before, paired bootstrap: nDCG@10 {format_interval(tuned.improvement)}")
    out.print_json(data=tuned.parameters.as_dict())
    if not tuned.is_better:
        out.print("Nothing was saved: they are no better on the held-out queries.")
    elif folder is not None:
        out.print("Nothing was saved: they were fitted on other items than the stored ones.")
    else:
        path = data / SEARCH_FILE
        save_search_parameters(path, read_by, FittedParameters(tuned.parameters))
        out.print(
            f"Saved in {path} for {read_by}; heed serve reads them at its next start with it."
        )


def calibrate_grown(store: Any, data: Path) -> None:
    """Calibrate search to the stored items if there are many more than at the last calibration.

    Only for the static encoder, which embeds them in seconds.
    """
    from models.text.static_encoder import StaticEncoder
    from service.domain.settings import STATIC_ENCODER, Settings
    from service.snapshots.search_parameters import is_calibration_due

    encoder = Settings.read().encoder
    count = asyncio.run(store.counts())["items"]
    if encoder == STATIC_ENCODER and is_calibration_due(
        data / SEARCH_FILE, StaticEncoder.name, count
    ):
        with suppress(Invalid):  # too few texts to calibrate on
            _calibrate(store, data, encoder)


def _calibrate(store: Any, data: Path, encoder: str) -> None:
    """Calibrate search to the stored items, print the result and save it.

    Raises:
        Invalid: they have too few texts.
    """
    from service.snapshots.search_parameters import FittedParameters, save_search_parameters

    vectors = _open_embeddings(data, encoder)
    found = _calibration(store.scan_items(), vectors)
    weight = found.parameters.meaning
    out.print(
        f"search: {len(found.gains):,} titles and sentences, held out, find their items with "
        f"nDCG {found.mean(weight):.3f} by words and meaning (weight {weight:g}), "
        f"{found.mean(0.0):.3f} by words alone",
        soft_wrap=True,
    )
    fitted = FittedParameters(found.parameters, "catalogue", asyncio.run(store.counts())["items"])
    save_search_parameters(data / SEARCH_FILE, vectors.encoder.name, fitted)


def _calibrated(items: Any, vectors: Any) -> Any:
    """Return the parameters calibrated to items, or the defaults where they have too few texts."""
    from models.ranking.search_parameters import DEFAULTS

    try:
        return _calibration(items, vectors).parameters
    except Invalid:
        return DEFAULTS


def _calibration(items: Any, vectors: Any) -> Any:
    """Calibrate search to items, with progress bars.

    Raises:
        Invalid: they have too few texts.
    """
    from service.cli import progress_bars
    from service.evaluation import search_calibration

    with progress_bars.stage_bars(out) as progress:
        return search_calibration.calibrate(items, vectors, progress=progress)


class _Searched(NamedTuple):
    """Snapshot of a collection, its items, their embeddings and its judged queries."""

    name: str
    items: Any
    snapshot: Any
    vectors: Any  # cache of embeddings
    judged: Any
    digest: str  # of the items


def _searched(
    folder: Path | None, judgments: Path | None, data: Path, encoder: str, split: str
) -> _Searched:
    from service.cli import progress_bars
    from service.datasets.collections import open_collection, read_judgments
    from service.evaluation import search_quality

    if folder is None and judgments is None:
        raise Invalid("", "name a folder with a collection, or --judgments of the stored items")
    vectors = _open_embeddings(data, encoder, stored=folder is None)
    with out.status("reading the items"):
        if folder is not None:
            source = open_collection(folder, split)
            name = source.name
            judged = read_judgments(judgments) if judgments else source.judged_queries()
            items = list(source.items())
        elif judgments is not None:
            judged, name = read_judgments(judgments), judgments.name
            with open_store(data) as store:
                items = asyncio.run(store.catalogue_changes(0)).upserted
    if not judged:
        raise Invalid("", f"{name}: no query has a relevant item")
    with progress_bars.stage_bars(out) as progress:
        snapshot = search_quality.build_snapshot(items, vectors, progress)
    return _Searched(name, items, snapshot, vectors, judged, search_quality.catalogue_digest(items))


def _open_embeddings(data: Path, encoder: str, *, stored: bool = True) -> Any:
    """Open the embeddings of stored items or of others, which do not replace the service's."""
    from service.snapshots.text_embeddings import EmbeddingCache, is_of_other_encoder
    from service.snapshots.text_encoders import open_encoder

    reader = open_encoder(encoder)
    kept = data / EMBEDDINGS_FILE
    if not stored or is_of_other_encoder(kept, reader.name):
        kept = data / CACHE_FOLDER / EMBEDDINGS_FILE
    return EmbeddingCache(reader, kept if data.exists() else None)


def _table(title: str, first: str, *headings: str) -> Any:
    from rich.table import Table

    table = Table(title=title)
    table.add_column(first)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
