"""Command `heed recommend-all`: recommendations for all users in one file."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.console import DATA, ENCODER, Data, Encoder, out, set_threads

if TYPE_CHECKING:
    from service.engine.lists import ListShard


def recommend_all(
    file: Annotated[
        Path,
        typer.Option(
            "--out",
            help="NAME.parquet, .csv, .tsv or .jsonl; all but Parquet also with .gz or .xz.",
        ),
    ],
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Items for each user.")] = 20,
    include_seen: Annotated[
        bool, typer.Option("--include-seen", help="Also recommend items of the user's history.")
    ] = False,
    at: Annotated[
        str | None,
        typer.Option(
            help="Request time, such as 2026-01-31T08:00:00Z, after which events do not count; "
            "default now."
        ),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            metavar="NUMBER/COUNT",
            help="Only the users of one of COUNT disjoint shards, such as 2/4, for example to "
            "compute all shards at once on several machines.",
        ),
    ] = "1/1",
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Begin again, even if a stopped run could be continued."),
    ] = False,
) -> None:
    """Write the answers of [bold]/v1/recommend[/] for every user, for example for a mailing.

    The columns are user_id, rank (from 1), item_id and score, ordered by
    user_id and rank. In CSV and TSV, an apostrophe goes before ids that begin
    with = + - @, a tab or a carriage return, which spreadsheets would compute;
    [bold]heed import[/] takes it away again. Parquet needs the extra
    [bold]parquet[/], and has the version of the model and the time in its
    metadata, heed.model_version and heed.at.

    Users are all users in the store, with events or a profile; users with
    neither events nor interests get the popular items. All requests have one
    time and one model: the current one; before any, content and popularity.

    The service may be running. The file appears when it is complete: a
    stopped command leaves the previous file, or none.

    A command that is stopped, even by kill -9, is continued by the same
    command, at the time of the first. Until the file is complete, the lists
    stand in the folder [bold]FILE.progress[/] beside it, in parts of a
    thousand users. Another model, store or option
    discards them, and the command says so.

    Shards have no user in common. Name a file for each, and one time:
    [bold]--at 2026-01-31T08:00:00Z --out lists-2.parquet --shard 2/4[/].
    """
    # Users are ranked in parallel, one thread each; set before torch and FAISS are imported.
    set_threads(1)
    from service.cli.progress_bars import bars
    from service.domain.settings import Settings
    from service.engine.lists import write_lists
    from service.questions.asked import RecommendIn

    chosen = _shard(shard)
    question = RecommendIn(limit=limit, exclude_seen=not include_seen)
    if at is not None:
        question = question.model_copy(update={"at": _time(at)})
    with bars(out, "users") as draw:
        draw("loading", 0, None)
        listed = asyncio.run(
            write_lists(
                Settings.read({"data": data, "encoder": encoder}),
                file,
                question,
                progress=partial(draw, "recommending"),
                writing=partial(draw, f"writing {file.name}"),
                announce=partial(out.print, markup=False, soft_wrap=True),
                shard=chosen,
                restart=restart,
            )
        )
    rate = listed.computed / max(listed.seconds, 1e-9)
    out.print(
        f"{listed.rows:,} rows for {listed.users:,} users written to {file} in "
        f"{listed.seconds:.1f} s, {rate:,.0f} users/s, model {listed.model_version}",
        markup=False,
        soft_wrap=True,
    )
    if listed.sampled:
        out.print(
            f"Not every item was scored: recall@{limit} of doing so is {listed.recall:.3f} "
            f"({listed.sampled} users, drawn at random)",
            soft_wrap=True,
        )


def _shard(text: str) -> ListShard:
    from service.domain.errors import Invalid
    from service.engine.lists import ListShard

    try:
        return ListShard.parse(text)
    except Invalid as error:
        raise typer.BadParameter(f"--shard {error}") from None


def _time(text: str) -> int:
    from service.domain.timestamps import from_rfc3339

    try:
        return from_rfc3339(text)
    except ValueError as error:
        raise typer.BadParameter(f"--at {error} (got {text!r})") from None
