"""`heed recommend-all`: what every user would be recommended, as one file."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import DATA, ENCODER, Data, Encoder, out, threads


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
        bool, typer.Option("--include-seen", help="Also what is in the user's own history.")
    ] = False,
    at: Annotated[
        str | None,
        typer.Option(help="When they ask, such as 2026-01-31T08:00:00Z; now if left out."),
    ] = None,
) -> None:
    """Write what [bold]/v1/recommend[/] would answer every user, say for a mailing.

    The columns are user_id, rank (from 1), item_id and score, in the order of
    user_id and rank. Parquet needs the extra [bold]parquet[/], and keeps the version of
    the model and the time in its metadata, heed.model_version and heed.at.

    Users are all that the store knows, by events or by a profile; who has
    neither events nor interests gets the popular items. All are asked at one
    time, of one model: the current one, or content and popularity before any.

    The service may be running. The file appears when it is whole: what is
    interrupted leaves the one that was there, or none.
    """
    # Lists are made beside each other, one thread each; must be set before torch and FAISS load.
    threads(1)
    from service.cli.row_bars import rate_bar
    from service.domain.queries import RecommendQuery, Requester
    from service.domain.settings import Settings
    from service.engine.recommend_all import write_lists

    asked = time.time_ns() // 1_000 if at is None else _time(at)
    with rate_bar(out, "recommending", "users") as progress:
        listed = asyncio.run(
            write_lists(
                Settings.read({"data": data, "encoder": encoder}),
                file,
                RecommendQuery(Requester(), limit, exclude_seen=not include_seen),
                at=asked,
                progress=progress,
            )
        )
    rate = listed.users / max(listed.seconds, 1e-9)
    out.print(
        f"{listed.rows:,} rows for {listed.users:,} users written to {file} in "
        f"{listed.seconds:.1f} s, {rate:,.0f} users/s, model {listed.model_version}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if listed.sampled:
        out.print(
            f"Not every item was scored: recall@{limit} of doing so is {listed.recall:.3f} "
            f"({listed.sampled} users, drawn at random)",
            highlight=False,
            soft_wrap=True,
        )


def _time(text: str) -> int:
    from service.domain.timestamps import from_rfc3339

    try:
        return from_rfc3339(text)
    except ValueError as error:
        raise typer.BadParameter(f"--at {error}") from None
