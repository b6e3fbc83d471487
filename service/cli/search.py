"""Commands `heed evaluate-search` and `heed tune-search`, and the calibration that imports make."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.table import Table

from service.cli.console import DATA, ENCODER, Data, Encoder, JsonFile, open_store, out, write_json
from service.domain.errors import Invalid
from service.runtime.data_layout import CACHE_FOLDER, EMBEDDINGS_FILE, QUERY_TABLE_FILE, SEARCH_FILE

Queries = Annotated[
    Literal["auto", "table", "encoder"],
    typer.Option(
        help="By what queries are encoded under a sentence-transformers model: encoder, the model, "
        "in milliseconds; table, the sum of one vector per token, in microseconds, fitted to the "
        "model's vectors of the items' own titles and sentences; auto, the table where it keeps at "
        "least half of what the model's queries add to words."
    ),
]


def calibrate_grown(store: Any, data: Path) -> None:
    """Calibrate search to the stored items if there are many more than at the last calibration.

    Only for the static encoder, which embeds them in seconds; for others, say what does.
    """
    from models.text.encoders import StaticEncoder
    from service.domain.settings import STATIC_ENCODER, Settings
    from service.snapshots.live_search import is_calibration_due

    encoder, path = Settings.read().encoder, data / SEARCH_FILE
    count = asyncio.run(store.counts())["items"]
    if encoder != STATIC_ENCODER:
        if count and not path.exists():
            out.print(
                f"search: heed tune-search --encoder {encoder} fits it to the stored items in "
                "minutes, with a table that encodes queries in microseconds",
                markup=False,
                soft_wrap=True,
            )
    elif is_calibration_due(path, StaticEncoder.name, count):
        with suppress(Invalid):  # too few texts to calibrate on
            calibrate_stored(store, data, encoder)


def calibrate_stored(store: Any, data: Path, encoder: str, queries: str = "auto") -> None:
    """Calibrate search to the stored items, choose what encodes queries, and save both.

    Raises:
        Invalid: they have too few texts, or no table can be fitted where one is asked for.
    """
    from service.snapshots.live_search import (
        FittedParameters,
        save_query_table,
        save_search_parameters,
    )

    vectors = open_search_embeddings(data, encoder)
    table, by_table, by_encoder = calibrate_queries(store.scan_items(), vectors, queries)
    used = by_encoder if table is None else by_table
    weight = used.parameters.meaning
    out.print(
        f"search: {len(used.gains):,} titles and sentences, held out, find their items with nDCG "
        f"{used.mean(weight):.3f} by words and meaning (weight {weight:g}), {used.mean(0.0):.3f} "
        "by words alone",
        soft_wrap=True,
    )
    count, name = asyncio.run(store.counts())["items"], vectors.encoder.name
    path, table_file = data / SEARCH_FILE, data / QUERY_TABLE_FILE
    # A table is used once there are parameters with its name: they are written last.
    if table is not None:
        save_query_table(table_file, table, name)
    fitted = FittedParameters(by_encoder.parameters, "catalogue", count)
    save_search_parameters(path, name, fitted, replaces=name)
    if table is not None:
        fitted = FittedParameters(by_table.parameters, "catalogue", count)
        save_search_parameters(path, table.name, fitted)
    else:
        table_file.unlink(missing_ok=True)


def calibrate_queries(items: Any, vectors: Any, queries: str) -> tuple[Any, Any, Any]:
    """Calibrate search to items, with progress bars, and print what shall encode queries and why.

    Returns the table (None where the text encoder encodes queries), the calibration with it, and
    that with the text encoder.

    Raises:
        Invalid: they have too few texts, or no table can be fitted where one is asked for.
    """
    from service.cli import progress_bars
    from service.maintenance import search_calibration

    items = list(items)
    if queries == "table" or (queries == "auto" and not vectors.encoder.quick):
        try:
            with progress_bars.stage_bars(out) as progress:
                fit = search_calibration.fit_query_encoding(items, vectors, progress=progress)
        except Invalid as error:
            if queries == "table":
                raise
            out.print(f"queries: {error.detail}", markup=False, soft_wrap=True)
        else:
            fitted, by_table, by_encoder = fit.fitted, fit.by_table, fit.by_encoder
            is_used = queries == "table" or fit.is_table_good
            out.print(
                f"queries: a table of {len(fitted.table.rows):,} tokens, fitted to "
                f"{fitted.texts:,} titles, sentences and pieces of them (mean cosine with the "
                f"model's vectors of others {fitted.agreement:.3f}); searches with it find "
                f"held-out texts' items with nDCG {by_table.chosen.mean():.3f}, with the model "
                f"{by_encoder.chosen.mean():.3f}, by words alone {by_table.mean(0.0):.3f}",
                soft_wrap=True,
            )
            out.print(
                "queries are encoded by the table"
                if is_used
                else "queries are encoded by the model: the table adds less to words than half of "
                "what the model does, or no more than noise",
                soft_wrap=True,
            )
            return fitted.table if is_used else None, by_table, by_encoder
    with progress_bars.stage_bars(out) as progress:
        by_encoder = search_calibration.calibrate(items, vectors, progress=progress)
    return None, None, by_encoder


def open_search_embeddings(data: Path, encoder: str, *, stored: bool = True) -> Any:
    """Open the embeddings of stored items or of others, which do not replace the service's."""
    from service.snapshots.text_embeddings import EmbeddingCache, is_of_other_encoder, open_encoder

    reader = open_encoder(encoder)
    kept = data / EMBEDDINGS_FILE
    if not stored or is_of_other_encoder(kept, reader.name):
        kept = data / CACHE_FOLDER / EMBEDDINGS_FILE
    return EmbeddingCache(reader, kept if data.exists() else None)


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
    queries: Queries = "auto",
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
    its own. Under a sentence-transformers model, a folder's queries are encoded as
    [bold]heed tune-search[/] would choose for its items, the stored items' as
    [bold]heed serve[/] does; [bold]--queries[/] says otherwise.
    """
    from models.evaluation.full_ranking import bootstrap, standard_error
    from models.text.bm25 import TITLE_WEIGHT
    from service.lab import search_quality
    from service.lab.comparison_report import format_interval

    searched = _searched(folder, judgments, data, encoder, split)
    judged, items = searched.judged, len(searched.snapshot.catalogue)
    read_by = searched.vectors.encoder.name
    if folder is None:
        setup = _served(data, searched.vectors, queries)
    else:
        setup = _calibrated(searched.items, searched.vectors, queries)
    used, encoding_ms = setup.parameters, _encoding_time(setup.encode, judged)
    with out.status(f"searching for {len(judged):,} queries"):
        found = {
            way: search_quality.evaluate_search(searched.snapshot, setup.encode, judged, way, used)
            for way in search_quality.SEARCH_MODES
        }
    title = f"{searched.name}: {items:,} items, {len(judged):,} queries"
    table = Table("retrieved by", *_METRICS, "success@3", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for way, quality in found.items():
        table.add_row(
            way,
            f"{quality.ndcg.mean():.4f} ± {standard_error(quality.ndcg):.4f}",
            f"{quality.recall.mean():.4f}",
            f"{quality.success.mean():.4f}",
        )
    out.print(table)
    out.print(
        f"Texts are embedded by {read_by}. Queries are encoded by {setup.encoder}, in "
        f"{encoding_ms:.3f} ms (median); meaning has the weight {used.meaning:g}.",
        soft_wrap=True,
    )
    both = found["both"]
    out.print(f"found in the first 3 by both: {int(both.success.sum()):,} of {len(judged):,}")
    over = {
        way: bootstrap(both.ndcg - quality.ndcg) for way, quality in found.items() if way != "both"
    }
    for way, difference in over.items():
        out.print(f"both over {way}, paired bootstrap: nDCG@10 {format_interval(difference)}")
    write_json(
        json_file,
        {
            "collection": searched.name,
            "items": items,
            "digest": search_quality.catalogue_digest(searched.items),
            "queries": len(judged),
            "encoder": read_by,
            "queries_encoded_by": setup.encoder,
            "query_encoding_ms": encoding_ms,
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
    queries: Queries = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of the split.")] = 0,
) -> None:
    """Fit the parameters of search on half of the judged queries, and evaluate on the other half.

    Parameters fitted on judgments of the stored items are saved if they improve the other half.
    Never fit on queries whose results you report.

    Without judgments, the weight of embeddings beside words is calibrated to the stored items:
    their titles and sentences, held out, are the queries that shall find them.
    [bold]heed import[/] does the same for the static encoder, unless judgments were fitted to.

    Under a sentence-transformers model this also fits a table of one vector per token to the
    model's vectors of up to 30,000 titles, sentences and pieces of them, in minutes. If it finds
    the held-out texts' items well enough ([bold]--queries[/]), it encodes queries in place of the
    model, in microseconds instead of milliseconds; items are still embedded by the model.

    [bold]heed serve[/] with the same text encoder uses what is saved at once, without a restart.
    """
    from service.cli import progress_bars
    from service.lab import search_quality
    from service.lab.comparison_report import format_interval
    from service.snapshots.live_search import FittedParameters, save_search_parameters

    if folder is None and judgments is None:
        with open_store(data) as store:
            calibrate_stored(store, data, encoder, queries)
        return
    searched = _searched(folder, judgments, data, encoder, split)
    # A table of the stored items is fitted to their texts, not to those of a folder.
    setup = _served(data, searched.vectors, "encoder" if folder is not None else queries)
    with progress_bars.stage_bars(out) as progress:
        tuned = search_quality.tune_parameters(
            searched.snapshot,
            setup.encode,
            searched.judged,
            start=setup.parameters,
            seed=seed,
            progress=progress,
        )
    title = f"{searched.name}: {len(tuned.after.ndcg):,} held-out queries"
    table = Table("parameters", *_METRICS, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
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
        save_search_parameters(path, setup.encoder, FittedParameters(tuned.parameters))
        out.print(f"Saved in {path} for {setup.encoder}; heed serve uses them with it.")


def _served(data: Path, vectors: Any, queries: str) -> Any:
    """Return the setup that `heed serve` searches the stored items with, or the model's own.

    Raises:
        Invalid: a table is asked for and none is in use.
    """
    from service.snapshots.live_search import SearchSetup, load_search_parameters

    setup, encoder = SearchSetup.load(vectors, data), vectors.encoder
    if queries == "table" and setup.encoder == encoder.name:
        raise Invalid("", f"no query table of {encoder.name} is in use: heed tune-search fits one")
    if queries == "encoder" and setup.encoder != encoder.name:
        parameters = load_search_parameters(data / SEARCH_FILE, encoder.name)
        setup = SearchSetup(parameters, vectors.query, encoder.name, encoder.quick)
    return setup


def _calibrated(items: Any, vectors: Any, queries: str) -> Any:
    """Return the setup calibrated to items, with the defaults where they have too few texts."""
    from models.ranking.matches import DEFAULTS
    from service.snapshots.live_search import SearchSetup

    encoder = vectors.encoder
    try:
        table, by_table, by_encoder = calibrate_queries(items, vectors, queries)
    except Invalid:
        if queries == "table":
            raise
        return SearchSetup(DEFAULTS, vectors.query, encoder.name, encoder.quick)
    if table is not None:
        return SearchSetup.by_table(table, by_table.parameters)
    return SearchSetup(by_encoder.parameters, vectors.query, encoder.name, encoder.quick)


def _encoding_time(encode: Any, judged: Any) -> float:
    """Return the median time to encode one query, in milliseconds, over the first 100 queries."""
    from time import perf_counter

    import numpy as np

    taken = []
    for query, _ in judged[:100]:
        begun = perf_counter()
        encode(query)
        taken.append(perf_counter() - begun)
    return float(np.median(taken)) * 1e3


class _Searched(NamedTuple):
    """Snapshot of a collection, its items, their embeddings and its judged queries."""

    name: str
    items: Any
    snapshot: Any
    vectors: Any  # cache of embeddings
    judged: Any


def _searched(
    folder: Path | None, judgments: Path | None, data: Path, encoder: str, split: str
) -> _Searched:
    from service.cli import progress_bars
    from service.lab.public_data import open_collection, read_judgments
    from service.maintenance.search_calibration import build_snapshot

    if folder is None and judgments is None:
        raise Invalid("", "name a folder with a collection, or --judgments of the stored items")
    vectors = open_search_embeddings(data, encoder, stored=folder is None)
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
        snapshot = build_snapshot(items, vectors, progress)
    return _Searched(name, items, snapshot, vectors, judged)
