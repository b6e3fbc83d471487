"""What all commands share: where they print, and the store of a data directory."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

# Into a pipe or a file, tables keep the width they need.
out = Console(width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True)

Data = Annotated[
    Path,
    typer.Option(
        "--data", envvar="HEED_DATA", help="Directory of the store, the models and the caches."
    ),
]
DATA = Path("./data")

Encoder = Annotated[
    str,
    typer.Option(
        "--encoder",
        envvar="HEED_ENCODER",
        help="What reads texts: static; a package that carries a sentence-transformers model; or "
        "the folder of one, such as ./MODEL. [bold]heed serve[/] takes HEED_ENCODER.",
    ),
]
ENCODER = "static"


@contextmanager
def one_store(data: Path) -> Iterator[Any]:
    """The store of a data directory, closed at the end."""
    from service.runtime.data_layout import STORE_FILE
    from service.stores.sqlite import SQLiteStore

    data.mkdir(parents=True, exist_ok=True)
    store = SQLiteStore(data / STORE_FILE)
    try:
        yield store
    finally:
        asyncio.run(store.close())


def embeddings(encoder: str, path: Path | None) -> Any:
    """Of the text encoder that was chosen, kept in a file. Raises `Invalid` where there is none."""
    from service.snapshots.text_embeddings import EmbeddingCache
    from service.snapshots.text_encoders import open_encoder

    return EmbeddingCache(open_encoder(encoder), path)


def training_threads() -> None:
    """All cores, unless the environment says how many."""
    # Threads that spin while they wait starve each other as soon as anything else is running.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not os.environ.get("OMP_NUM_THREADS"):
        threads(os.cpu_count() or 1)


def threads(count: int) -> None:
    """How many threads numerical libraries start; counts only before they are imported."""
    os.environ["OMP_NUM_THREADS"] = str(count)
