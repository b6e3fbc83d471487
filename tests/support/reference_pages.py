"""The pages of docs/reference, made from the code: `make reference` writes them.

Settings and commands are read from the code, routes and metrics from a running service.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from service.cli import app
from service.domain.settings import PREFIX, Settings
from tests.support import tiny
from tests.support.heed_process import ROOT
from tests.support.server import Server

FOLDER = ROOT / "docs" / "reference"
_ON_ALL = {"worker", "namespace", "le"}  # labels of every metric that has them
_SCOPES = ("read", "write", "train", "metrics")
_INTRODUCTIONS = {
    "settings": "Settings are environment variables, read once at start-up.",
    "commands": "Each command explains itself and its options with `--help`.",
    "routes": "`/docs` of a running service shows each route with its fields, and `/openapi.json` "
    "is the same for programs. A request needs a key with one of the scopes, or with `admin`, once "
    "there are [keys](../operate/keys.md).",
    "metrics": "`/metrics` has the metrics of all workers, in the text format of Prometheus. With "
    "several workers each series has the label `worker`: sum or compare them, since a worker that "
    "is started again counts from 0. Measurements of stored data have the label `namespace`. A "
    "refused request counts under its route with its status, and has no duration.",
}


def pages(http: httpx.Client) -> dict[str, str]:
    """Return each page of the reference by its name; `http` is a client of a trained service."""
    http.post("/v1/score", json={"item_ids": ["a"]})
    http.get("/v1/items/no-such-item")  # so that each metric has a series
    tables = {
        "settings": _settings(),
        "commands": _commands(),
        "routes": _routes(http.get("/openapi.json").json()),
        "metrics": _metrics(http.get("/metrics").text),
    }
    return {
        name: f"# {name.capitalize()}\n\n{_INTRODUCTIONS[name]}\n\n" + "\n".join(lines) + "\n"
        for name, lines in tables.items()
    }


def _settings() -> Iterator[str]:
    yield from ("| variable | default | |", "|---|---|---|")
    for name, field in Settings.model_fields.items():
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        shown = f"`{default}`" if default not in (None, "") else ""
        yield f"| `{PREFIX}{name.upper()}` | {shown} | {field.description} |"


def _commands() -> Iterator[str]:
    yield from ("| command | does | options |", "|---|---|---|")
    for name, command in _leaves(get_command(app), "heed"):
        words, options = [name], []
        for parameter in command.params:
            if not parameter.opts[0].startswith("-"):
                words.append(parameter.metavar or parameter.name.upper())
            elif parameter.opts[0] != "--help":
                options.append(f"`{parameter.opts[0]}`")
        does = re.sub(r"\[/?\w*\]", "", command.help or "")  # without Rich's markup
        yield f"| `{' '.join(words)}` | {_first_sentence(does)} | {' '.join(options)} |"


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    if command.params or not inner:
        yield name, command
    for each in sorted(inner):
        yield from _leaves(inner[each], f"{name} {each}")


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def _routes(document: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| route | scopes | does |", "|---|---|---|")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            needs = [need.get("key", ()) for need in operation.get("security", ())]
            scopes = [f"`{scope}`" for scope in _SCOPES if any(scope in need for need in needs)]
            does = _first_sentence(operation.get("description", ""))
            yield f"| `{method.upper()} {path}` | {', '.join(scopes)} | {does} |"


def _metrics(text: str) -> Iterator[str]:
    yield from ("| metric | type | labels | |", "|---|---|---|---|")
    for family in sorted(text_string_to_metric_families(text), key=lambda each: each.name):
        if not family.name.startswith("heed_"):
            continue
        labels = {label for sample in family.samples for label in sample.labels} - _ON_ALL
        name = f"{family.name}_total" if family.type == "counter" else family.name
        shown = ", ".join(f"`{label}`" for label in sorted(labels))
        yield f"| `{name}` | {family.type} | {shown} | {family.documentation} |"


def main() -> None:
    """Write the pages, by a service over a small world."""
    with tempfile.TemporaryDirectory() as folder:
        world = tiny.make(Path(folder) / "world" / "data")
        data = world.copy(Path(folder) / "served" / "data", trained=True)
        with Server(data) as server, server.client() as http:
            for name, text in pages(http).items():
                (FOLDER / f"{name}.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
