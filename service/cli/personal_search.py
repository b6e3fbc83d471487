"""`heed evaluate-personal-search`: what the memory of whoever asks is worth to a search."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.console import (
    DATA,
    ENCODER,
    Data,
    Encoder,
    embeddings,
    one_store,
    out,
    training_threads,
)
from service.cli.training import Chosen, Epochs, last_held_out, preset_for
from service.runtime.data_layout import EMBEDDINGS_FILE, SEARCH_FILE


def evaluate_personal_search(
    data: Data = DATA,
    preset: Chosen = None,
    epochs: Epochs = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the training.")] = 0,
    encoder: Encoder = ENCODER,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")] = None,
) -> None:
    """Say how much better a search for a user finds what that user takes next.

    Held out as by [bold]heed evaluate[/]: the last event of each user is the test case, the one
    before it the validation case, and a model is trained without both. What is searched for is
    what the item's categories are called; how far [bold]personal[/] should count is chosen on the
    validation cases. What the user has had already is passed over in the answers, with the user
    and without.
    """
    training_threads()
    from service.cli import progress_bars
    from service.evaluation import personal_search
    from service.evaluation.comparison_report import interval
    from service.snapshots.search_parameters import load_search_parameters
    from service.training import training_corpus

    with one_store(data) as store, progress_bars.bars(out) as told:
        vectors = embeddings(encoder, data / EMBEDDINGS_FILE)
        corpus = training_corpus.read(store, vectors, told)
        task = last_held_out(corpus)
        chosen = preset_for(corpus, preset, epochs)
        measured = personal_search.measure(
            task,
            corpus,
            asyncio.run(store.catalogue_changes(0)).upserted,
            vectors,
            chosen,
            seed=seed,
            parameters=load_search_parameters(data / SEARCH_FILE, vectors.name),
            told=told,
        )
    out.print(_grid(measured))
    test, default = measured.test, personal_search.DEFAULT
    out.print(f"test, {len(test.nobody):,} cases: MRR without the user {_mrr(test.nobody)}")
    report = []
    for label, worth in (("chosen on validation", measured.chosen), ("by default", default)):
        gained, over = measured.gained(worth), measured.over_popularity(worth)
        out.print(
            f"personal {worth:g} ({label}): MRR {_mrr(test.memory[worth])}, more by "
            f"{interval(gained)} (paired bootstrap); over popularity {interval(over)}",
            highlight=False,
            soft_wrap=True,
        )
        report.append(
            {
                "personal": worth,
                "why": label,
                "mrr": personal_search.mrr(test.memory[worth]),
                "gained": gained._asdict(),
                "over_popularity": over._asdict(),
            }
        )
    popular = measured.chosen_popularity
    out.print(f"popularity, {popular:g} likewise chosen: MRR {_mrr(test.popularity[popular])}")
    if measured.without_words:
        out.print(f"{measured.without_words:,} cases left out: their items have no categories")
    if json_file is not None:
        found = {
            "cases": len(test.nobody),
            "preset": str(chosen),
            "without": personal_search.mrr(test.nobody),
            "with": report,
            "popularity": {
                "personal": popular, "mrr": personal_search.mrr(test.popularity[popular])
            },
            "validation": {
                "without": personal_search.mrr(measured.validation.nobody),
                "memory": _figures(measured.validation.memory),
                "popularity": _figures(measured.validation.popularity),
            },
        }  # fmt: skip
        json_file.write_text(json.dumps(found, indent=1) + "\n")


def _grid(measured: Any) -> Any:
    """What was to be chosen from."""
    from rich.table import Table

    validation = measured.validation
    table = Table(title=f"validation, {len(validation.nobody):,} cases: MRR")
    for heading in ("personal", "the user's memory", "popularity in its place"):
        table.add_column(heading, justify="right")
    table.add_row("without", _mrr(validation.nobody), "")
    for worth, ranks in validation.memory.items():
        table.add_row(f"{worth:g}", _mrr(ranks), _mrr(validation.popularity[worth]))
    return table


def _figures(ranks: Any) -> dict[str, float]:
    from service.evaluation.personal_search import mrr

    return {f"{worth:g}": mrr(each) for worth, each in ranks.items()}


def _mrr(ranks: Any) -> str:
    from service.evaluation.personal_search import mrr

    return f"{mrr(ranks):.4f}"
