"""Shared parts of the commands: consoles, options, the store, the embeddings, threads."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

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


def with_options(command: Callable[..., T]) -> Callable[..., T]:
    """Give a command an option for each field of the dataclasses that it takes."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {
        each.name: each.annotation for each in parameters if is_dataclass(each.annotation)
    }

    @wraps(command)
    def run(**given: Any) -> T:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        return command(**given)

    options: list[inspect.Parameter] = []
    for each in parameters:
        if each.name in groups:
            hints = get_type_hints(each.annotation, include_extras=True)
            options += [
                _option(field.name, hints[field.name], field.default)
                for field in fields(each.annotation)
            ]
        else:
            options.append(_option(each.name, each.annotation, each.default))
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return run


def in_namespace(command: Callable[..., T]) -> Callable[..., T]:
    """Give a command that has the option --data the option --namespace too; see `with_options`.

    The command is called with the data directory of that namespace. It raises `NotFound` for a
    missing namespace, and `Invalid` for text that is no name.
    """
    command = with_options(command)

    @wraps(command)
    def run(*, data: Path, namespace: str, **options: Any) -> T:
        with open_directory(data) as directory:
            folder = directory.find(namespace)
        return command(data=folder, **options)

    parameters = list(inspect.signature(command).parameters.values())
    place = [parameter.name for parameter in parameters].index("data") + 1
    parameters.insert(place, _option("namespace", Namespace, DEFAULT_NAMESPACE))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


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
    from service.snapshots.text_embeddings import EmbeddingCache, open_encoder

    return EmbeddingCache(open_encoder(encoder), data / EMBEDDINGS_FILE)


def write_json(path: Path | None, report: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")


def describe_error(error: Exception) -> str:
    from service.runtime.data_layout import denied

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


@contextmanager
def open_shared_store(data: Path) -> Iterator[Any]:
    """Open the store that machines share; None where the store is a file, which stays closed.

    Models and trainings of one machine are files too: a damaged store does not keep commands from
    them.
    """
    from service.domain.settings import Settings
    from service.stores.opening import is_shared

    if is_shared(Settings.read().store):
        with open_store(data) as store:
            yield store
    else:
        yield None
