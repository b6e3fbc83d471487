"""`heed evaluate-search` and `heed tune-search`: search, held against judgments."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from service.cli.console import DATA, ENCODER, Data, Encoder, one_store, out
from service.domain.errors import Invalid
from service.runtime.data_layout import CACHE_FOLDER, EMBEDDINGS_FILE, SEARCH_FILE

Folder = Annotated[
    Path | None,
    typer.Argument(
        help="A collection in a folder: BEIR's corpus.jsonl, queries.jsonl and qrels/, "
        "Cranfield's three files, or PyVideo's videos.jsonl.gz with --judgments. Without one, the "
        "stored items are searched."
    ),
]
Judgments = Annotated[
    Path | None,
    typer.Option(
        help="Your own, of the stored items or of those in the folder: rows of query, item_id and "
        "gain (above 0 = relevant; 1 if left out), as JSONL, CSV or Parquet."
    ),
]
_DEEP = ("nDCG@10", "recall@100")
Split = Annotated[str, typer.Option(help="Of BEIR's judgments: the file in qrels/.")]


def evaluate_search(
    folder: Folder = None,
    judgments: Judgments = None,
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    split: Split = "test",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")] = None,
) -> None:
    """Say how good search is on judged queries: by words alone, by meaning alone, and by both.

    nDCG@10 and recall@100, with standard errors over the queries, how many queries found a relevant
    item among the first 3 (success@3), and how much better both heads are than each alone by a
    paired bootstrap. The JSON also has the rank of each query's first relevant item, and all that
    the ranks depend on: the encoder, the parameters, and a digest of the items.

    With another [bold]--encoder[/], what another model makes of the same texts: its vectors are
    kept beside those that the service holds.
    """
    from models.evaluation.metrics import standard_error
    from models.text.bm25 import TITLE_WEIGHT
    from service.evaluation import search_quality
    from service.evaluation.comparison_report import interval
    from service.snapshots.search_parameters import load_search_parameters

    searched = _searched(folder, judgments, data, encoder, split)
    judged, items = searched.judged, len(searched.snapshot.catalogue)
    used = load_search_parameters(data / SEARCH_FILE, searched.vectors.name)
    with out.status(f"searching for {len(judged):,} queries"):
        found = {
            way: search_quality.judge(searched.snapshot, searched.vectors.query, judged, way, used)
            for way in search_quality.WAYS
        }
    title = f"{searched.name}: {items:,} items, {len(judged):,} queries"
    table = _table(title, "read by", *_DEEP, "success@3")
    for way, quality in found.items():
        table.add_row(
            way,
            f"{quality.ndcg.mean():.4f} ± {standard_error(quality.ndcg):.4f}",
            f"{quality.recall.mean():.4f}",
            f"{quality.success.mean():.4f}",
        )
    out.print(table)
    out.print(
        f"What texts mean is read by {searched.vectors.name}.", highlight=False, soft_wrap=True
    )
    both = found["both"]
    out.print(f"found in the first 3 by both: {int(both.success.sum()):,} of {len(judged):,}")
    over = search_quality.differences(found)
    for way, difference in over.items():
        out.print(f"both over {way}, paired bootstrap: nDCG@10 {interval(difference)}")
    if json_file is not None:
        report = {
            "collection": searched.name,
            "items": items,
            "digest": searched.digest,
            "queries": len(judged),
            "encoder": searched.vectors.name,
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
            # From 1; null where none of the relevant items was found.
            "ranks": [
                {"query": query, "rank": rank + 1 if rank < search_quality.DEEP else None}
                for (query, _), rank in zip(judged, both.ranks.tolist(), strict=True)
            ],
        }
        json_file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def tune_search(
    folder: Folder = None,
    judgments: Judgments = None,
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    split: Split = "train",
    seed: Annotated[int, typer.Option(min=0, help="Of the halves.")] = 0,
) -> None:
    """Fit what a match is worth on judged queries: on half of them, judged by the other half.

    Fitted on judgments of the stored items, the parameters are kept, if they are of use to the
    other half, for [bold]heed serve[/] to take when it next starts with the same text encoder.
    Never fit on queries that you mean to report.
    """
    from service.cli import progress_bars
    from service.evaluation import search_quality
    from service.evaluation.comparison_report import interval
    from service.snapshots.search_parameters import load_search_parameters, save_search_parameters

    searched = _searched(folder, judgments, data, encoder, split)
    vectors = searched.vectors
    start = load_search_parameters(data / SEARCH_FILE, vectors.name)
    with progress_bars.bars(out) as told:
        tuned = search_quality.tune(
            searched.snapshot, vectors.query, searched.judged, start=start, seed=seed, told=told
        )
    title = f"{searched.name}: {len(tuned.after.ndcg):,} queries that nothing was fitted on"
    table = _table(title, "parameters", *_DEEP)
    for label, quality in (("before", tuned.before), ("fitted", tuned.after)):
        table.add_row(label, f"{quality.ndcg.mean():.4f}", f"{quality.recall.mean():.4f}")
    out.print(table)
    out.print(f"fitted over before, paired bootstrap: nDCG@10 {interval(tuned.gained)}")
    out.print_json(data=tuned.parameters.as_dict())
    if not tuned.better:
        out.print("Nothing is changed: on these queries they are no better than before.")
    elif folder is not None:
        out.print("Nothing is changed: they were fitted on other items than those stored.")
    else:
        path = data / SEARCH_FILE
        save_search_parameters(path, vectors.name, tuned.parameters)
        out.print(
            f"Kept in {path} for {vectors.name}; heed serve takes them when it next starts with it."
        )


class _Searched(NamedTuple):
    """What is searched, and for what."""

    name: str
    snapshot: Any
    vectors: Any  # of texts
    judged: Any
    digest: str  # of the items


def _searched(
    folder: Path | None, judgments: Path | None, data: Path, encoder: str, split: str
) -> _Searched:
    from service import datasets
    from service.cli import progress_bars
    from service.evaluation import search_quality
    from service.snapshots.text_embeddings import EmbeddingCache, is_of_other_encoder
    from service.snapshots.text_encoders import open_encoder

    if folder is None and judgments is None:
        raise Invalid("", "name a folder with a collection, or --judgments of the stored items")
    reader = open_encoder(encoder)
    kept = data / EMBEDDINGS_FILE
    if folder is not None or is_of_other_encoder(kept, reader.name):
        kept = data / CACHE_FOLDER / EMBEDDINGS_FILE  # those of the service stay its own
    vectors = EmbeddingCache(reader, kept if data.exists() else None)
    with out.status("reading the items"):
        if folder is not None:
            source = datasets.open_collection(folder, split)
            name = source.name
            judged = datasets.read_judgments(judgments) if judgments else source.judged_queries()
            items = list(source.items())
        elif judgments is not None:
            judged, name = datasets.read_judgments(judgments), judgments.name
            with one_store(data) as store:
                items = asyncio.run(store.catalogue_changes(0)).upserted
    if not judged:
        raise Invalid("", f"{name}: no query has a relevant item")
    with progress_bars.bars(out) as told:
        snapshot = search_quality.searchable(items, vectors, told)
    return _Searched(name, snapshot, vectors, judged, search_quality.digest(items))


def _table(title: str, first: str, *headings: str) -> Any:
    from rich.table import Table

    table = Table(title=title)
    table.add_column(first)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
