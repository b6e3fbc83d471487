"""Shared parts of the commands: consoles, options, the store, the embeddings, threads."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from service.domain.names import DEFAULT_NAMESPACE, NAMESPACE_VARIABLE

_NICE = 10  # niceness of commands that work beside a service
T = TypeVar("T")

# Without a terminal, tables get a fixed width.
out = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
err = Console(stderr=True, highlight=False)

Data = Annotated[
    Path,
    typer.Option(
        "--data", envvar="HEED_DATA", help="Directory of the store, the models and the caches."
    ),
]
DATA = Path("./data")

Namespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        envvar=NAMESPACE_VARIABLE,
        help="Namespace of the data directory; see [bold]heed namespaces[/].",
    ),
]

Encoder = Annotated[
    str,
    typer.Option(
        "--encoder",
        envvar="HEED_ENCODER",
        help="Text encoder: static; a package that contains a sentence-transformers model; or the "
        "folder of one, such as ./MODEL. [bold]heed serve[/] reads HEED_ENCODER.",
    ),
]
ENCODER = "static"

JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")]


def in_namespace(command: Callable[..., T]) -> Callable[..., T]:
    """Give a command that has the option --data the option --namespace too.

    The command is called with the data directory of that namespace. It raises `NotFound` where
    there is none, and `Invalid` for what is no name.
    """
    signature = inspect.signature(command, eval_str=True)

    @wraps(command)
    def run(*args: Any, data: Path, namespace: str, **options: Any) -> T:
        with open_directory(data) as directory:
            folder = directory.find(namespace)
        return command(*args, data=folder, **options)

    parameters = list(signature.parameters.values())
    place = [parameter.name for parameter in parameters].index("data") + 1
    own = inspect.Parameter(
        "namespace",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=DEFAULT_NAMESPACE,
        annotation=Namespace,
    )
    parameters.insert(place, own)
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


@contextmanager
def open_directory(data: Path) -> Iterator[Any]:
    """Open the namespaces of a data directory, or of HEED_STORE; close them at the end."""
    from service.domain.settings import Settings
    from service.stores import namespace_directory

    directory = namespace_directory.open_directory(data, Settings.read().store)
    try:
        yield directory
    finally:
        directory.close()


@contextmanager
def open_store(data: Path) -> Iterator[Any]:
    """Open the store of a data directory, or its namespace in HEED_STORE; close it at the end.

    A message says if there was none: the path may be misspelt.
    """
    from service.domain.settings import Settings
    from service.runtime.data_layout import STORE_FILE, check_restored
    from service.runtime.durable_files import make_directory
    from service.stores import opening

    check_restored(data)
    url = Settings.read().store
    if not opening.is_shared(url) and not (data / STORE_FILE).exists():
        err.print(f"{data} has no store yet: a new one is empty", markup=False, soft_wrap=True)
    make_directory(data)
    store = opening.open_store(data, url)
    try:
        yield store
    finally:
        asyncio.run(store.close())


def open_embeddings(encoder: str, data: Path) -> Any:
    """Open the embeddings of a data directory by an encoder. Raises `Invalid` without one."""
    from service.runtime.data_layout import EMBEDDINGS_FILE
    from service.snapshots.text_embeddings import EmbeddingCache
    from service.snapshots.text_encoders import open_encoder

    return EmbeddingCache(open_encoder(encoder), data / EMBEDDINGS_FILE)


def write_json(path: Path | None, report: Any) -> None:
    """Write a report, if there is a path to write it to."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")


def describe_error(error: Exception) -> str:
    """Return the sentence for an error of the domain or of files."""
    from service.runtime.file_paths import denied

    if isinstance(error, PermissionError) and error.filename is not None:
        return denied(Path(os.fsdecode(error.filename)))
    return str(error)


def use_all_cores() -> None:
    """Let numerical libraries use all cores, unless OMP_NUM_THREADS is set."""
    # Spinning threads starve each other as soon as another process runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not os.environ.get("OMP_NUM_THREADS"):
        set_threads(os.cpu_count() or 1)


def put_requests_first() -> None:
    """Lower the priority of this process, so that requests to a service beside it stay fast."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(own, _NICE))


def set_threads(count: int) -> None:
    """Set the threads of numerical libraries; effective only before they are imported."""
    os.environ["OMP_NUM_THREADS"] = str(count)
