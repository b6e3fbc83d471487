"""Calibration of search to items: for `heed import`, `heed tune-search`, `heed evaluate-search`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from service.cli.console import out
from service.domain.errors import Invalid
from service.runtime.data_layout import CACHE_FOLDER, EMBEDDINGS_FILE, QUERY_TABLE_FILE, SEARCH_FILE

Queries = Annotated[
    Literal["auto", "table", "encoder"],
    typer.Option(
        help="By what queries are encoded under a sentence-transformers model: encoder, the model, "
        "in milliseconds; table, the sum of one vector per token, in microseconds, fitted to the "
        "model's vectors of the items' own titles and sentences; auto, the table where it keeps at "
        "least half of what the model's queries add to words alone."
    ),
]


class CalibratedQueries(NamedTuple):
    """The encoder of queries that was chosen for items, and the parameters of each."""

    table: Any  # QueryTable; None where the text encoder encodes queries
    by_table: Any  # Calibration; None without a table
    by_encoder: Any

    @property
    def used(self) -> Any:
        """The calibration of the encoder that was chosen."""
        return self.by_encoder if self.table is None else self.by_table


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


def calibrate_stored(
    store: Any, data: Path, encoder: str, queries: Literal["auto", "table", "encoder"] = "auto"
) -> None:
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
    found = calibrate_queries(store.scan_items(), vectors, queries)
    weight = found.used.parameters.meaning
    out.print(
        f"search: {len(found.used.gains):,} titles and sentences, held out, find their items with "
        f"nDCG {found.used.mean(weight):.3f} by words and meaning (weight {weight:g}), "
        f"{found.used.mean(0.0):.3f} by words alone",
        soft_wrap=True,
    )
    count, name = asyncio.run(store.counts())["items"], vectors.encoder.name
    path, table_file = data / SEARCH_FILE, data / QUERY_TABLE_FILE
    # A table is used once there are parameters with its name: they are written last.
    if found.table is not None:
        save_query_table(table_file, found.table, name)
    fitted = FittedParameters(found.by_encoder.parameters, "catalogue", count)
    save_search_parameters(path, name, fitted, replaces=name)
    if found.table is not None:
        fitted = FittedParameters(found.by_table.parameters, "catalogue", count)
        save_search_parameters(path, found.table.name, fitted)
    else:
        table_file.unlink(missing_ok=True)


def calibrate_queries(
    items: Any, vectors: Any, queries: Literal["auto", "table", "encoder"] = "auto"
) -> CalibratedQueries:
    """Calibrate search to items, with progress bars, and print what shall encode queries and why.

    Raises:
        Invalid: they have too few texts, or no table can be fitted where one is asked for.
    """
    from service.cli import progress_bars
    from service.evaluation import query_encoding, search_calibration

    items = list(items)
    if queries == "table" or (queries == "auto" and not vectors.encoder.quick):
        try:
            with progress_bars.stage_bars(out) as progress:
                found = query_encoding.fit_query_encoding(items, vectors, progress=progress)
        except Invalid as error:
            if queries == "table":
                raise
            out.print(f"queries: {error.detail}", markup=False, soft_wrap=True)
        else:
            is_used = queries == "table" or found.is_table_good
            _print_choice(found, is_used)
            table = found.fitted.table if is_used else None
            return CalibratedQueries(table, found.by_table, found.by_encoder)
    with progress_bars.stage_bars(out) as progress:
        by_encoder = search_calibration.calibrate(items, vectors, progress=progress)
    return CalibratedQueries(None, None, by_encoder)


def _print_choice(found: Any, is_used: bool) -> None:
    table, by_table, by_encoder = found.fitted, found.by_table, found.by_encoder
    out.print(
        f"queries: a table of {len(table.table.rows):,} tokens, fitted to {table.texts:,} titles, "
        "sentences and pieces of them (mean cosine with the model's vectors of others "
        f"{table.agreement:.3f}); searches with it find held-out texts' items with nDCG "
        f"{by_table.chosen.mean():.3f}, with the model {by_encoder.chosen.mean():.3f}, by words "
        f"alone {by_table.mean(0.0):.3f}",
        soft_wrap=True,
    )
    if is_used:
        said = "queries are encoded by the table"
    else:
        said = (
            "queries are encoded by the model: the table adds less to words alone than half of "
            "what the model does, or no more than noise"
        )
    out.print(said, soft_wrap=True)


def open_search_embeddings(data: Path, encoder: str, *, stored: bool = True) -> Any:
    """Open the embeddings of stored items or of others, which do not replace the service's."""
    from service.snapshots.text_embeddings import EmbeddingCache, is_of_other_encoder, open_encoder

    reader = open_encoder(encoder)
    kept = data / EMBEDDINGS_FILE
    if not stored or is_of_other_encoder(kept, reader.name):
        kept = data / CACHE_FOLDER / EMBEDDINGS_FILE
    return EmbeddingCache(reader, kept if data.exists() else None)
