"""Import rules between rooms, the folders of `models` and `service`, read from the source."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A room may import from itself and from the rooms before it, never from a later one.
ROOMS = (
    "models.compute",
    "models.attention",
    "models.text",
    "models.data",
    "models.index",
    "models.encoder",
    "models.recommender",
    "models.catalogue",
    "models.history",
    "models.ranking",
    "models.evaluation",
    "models.training",
    "service.domain",
    "service.questions",
    "service.runtime",
    "service.stores",
    "service.datasets",
    "service.snapshots",
    "service.histories",
    "service.training",
    "service.jobs",
    "service.engine",
    "service.maintenance",
    "service.http",
    "service.lab",
    "service.cli",
)
# Words with which no docstring of a module opens.
RELATIVE = (
    "What Whatever Whether Who Whoever Whom Whose Which That Those This These Of It Its They Their "
    "How Where When Why"
)

# The only rooms that may import a package.
ONLY = {
    "faiss": "models.index",
    "tantivy": "models.text",
    "fastapi": "service.http",
    "starlette": "service.http",
    "uvicorn": "service.http",
}
# Rooms of the service that know nothing of `models`.
WITHOUT_MODELS = ("service.domain", "service.runtime", "service.stores", "service.datasets")

# `models` computes: no network, environment, files or clock.
OUTSIDE = "apsw asyncio datetime http httpx os pathlib requests socket sqlite3 time"
EXCEPT = {
    ("models.text.encoders", "pathlib"),  # weights in a folder that the caller names
    ("models.catalogue.cow", "os"),  # memory that is backed by a file
    ("models.compute.checkpoint", "time"),  # a stopwatch, for progress
}


def modules(*folders: str) -> dict[str, Path]:
    """Every module by its dotted name; a package goes by its own name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


@cache
def imports(module: str) -> frozenset[str]:
    """What a module imports, at any depth; `from a import b` counts as a.b where b is a module."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in inner}
    return frozenset(found)


def room(module: str) -> str:
    """The first two names: a room is a folder of one of the two top packages."""
    return ".".join(module.split(".")[:2])


MODULES = modules("models", "service")


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_rooms(module: str) -> None:
    """A module imports from its own room, earlier rooms, and packages that its room may use."""
    own = room(module)
    for imported in imports(module):
        other, top = room(imported), imported.split(".")[0]
        if own in ROOMS and other in ROOMS:
            earlier = ROOMS.index(other) <= ROOMS.index(own)
            assert earlier, f"{module} imports {imported} from a later room"
        assert own in ONLY.get(top, own).split(), f"{module} must not import {imported}"
        if own in WITHOUT_MODELS:
            assert top != "models", f"{module} must not import {imported}"
        if own.startswith("models"):
            used = top in OUTSIDE.split() and (module, top) not in EXCEPT
            assert not used, f"{module} must not use {imported}"


def test_every_module_stands_in_a_room() -> None:
    """Only rooms stand at the root of both packages, and each has its line in ROOMS."""
    packages = {"models", "service"}
    assert {room(module) for module in MODULES} - packages == set(ROOMS)
    assert [m for m in MODULES if m in ROOMS and MODULES[m].name != "__init__.py"] == []


def test_imports_have_no_cycles() -> None:
    graph = {module: imports(module) & MODULES.keys() for module in MODULES}
    TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_modules_open_with_what_they_are() -> None:
    """The docstring of a module opens with a noun or a verb, not with a pronoun to be guessed."""
    opened = {
        module: (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or " ").split()[:1]
        for module, path in MODULES.items()
    }
    guessed = RELATIVE.split()
    assert {module: word for module, word in opened.items() if not word or word[0] in guessed} == {}
