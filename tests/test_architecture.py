"""Who may import whom, read from the source. A new module takes its place in LAYERS."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module imports from its own layer and from earlier ones. Names without a file yet
# keep their place.
LAYERS = {
    "models": [
        "scorers recency vocabulary text columns data metrics points dropout precision entropy",
        "partition partials moments",
        "team pages item_filter clock shape pairs rows lexical search_parameters sentence_encoder",
        "candidates trends objects structures cells",
        "expansion",
        "attention heads splits evaluate causal batches kinds",
        "habits",
        "memory transitions",
        "coarse lookup followers",
        "retrieval mass clusters baselines",
        "field_keys",
        "entries",
        "encoder",
        "target_attention",
        "item_pages",
        "recommender catalogue stepping",
        "losses ranker trained protocols trainer cold memorising",
        "snapshot checkpoint",
        "train",
        "presets past",
        "older",
        "user_memory attending",
        "long_attention",
        "scoring",
        "explain left_out ranking search similarity served",
    ],
    "service": [
        "errors names timestamps durable child layout listening memory apart workers siblings",
        "team",
        "records queries settings",
        "manifest staging telemetry limits job training_command",
        "stores registry datasets job_files embeddings encoders entries served_search",
        "histories importing documents",
        "asking serving",
        "encodings remembered long_histories true_error crossover explaining corpora highlighting",
        "memories recommending searching",
        "similar",
        "answering attending lists",
        "engine jobs training loading",
        "benchmarking search_quality",
        "cold_start personal_search",
        "showing suggestions comparing comparing_cold",
        "schemas problems openapi auth",
        "routes playground",
        "app",
        "serving_http bench",
        "cli",
    ],
}

# What only these rooms may import; everyone else must not.
HTTP = (
    "limits telemetry problems openapi auth schemas routes playground app serving_http suggestions "
    "bench cli"
)
ENGINE = (
    "engine answering attending searching recommending similar lists explaining asking serving "
    "embeddings encodings entries long_histories memories remembered true_error crossover"
)
ONLY = {
    "faiss": "coarse structures",
    "tantivy": "lexical",
    "fastapi": HTTP,
    "starlette": HTTP,
    "uvicorn": "listening serving_http bench",
    "models": f"{ENGINE} histories registry jobs team corpora training loading benchmarking "
    "cold_start comparing comparing_cold showing encoders served_search search_quality "
    "personal_search bench cli",
    "service.engine": "suggestions app serving_http bench",
}

# models computes: no network, environment, files or clock.
OUTSIDE = "apsw asyncio datetime http httpx os pathlib requests socket sqlite3 time"
EXCEPT = {
    ("models.text", "pathlib"),  # weights that ship inside an installed package
    ("models.pages", "os"),  # a file that is memory
    ("models.sentence_encoder", "pathlib"),  # weights that somebody put in a folder
    ("models.clock", "time"),  # a stopwatch, for the progress it reports
}


def modules(*folders: str) -> dict[str, Path]:
    """Every module by its dotted name; a package goes by its own name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def imports(path: Path) -> Iterator[str]:
    """What a file imports, at any depth; `from a import b` counts as a.b where b is a module."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def room(module: str) -> str:
    """The first two names: a room is a module or a package of one of the two top packages."""
    return ".".join(module.split(".")[:2])


MODULES = modules("models", "service")
IMPORTS = {module: set(imports(path)) for module, path in MODULES.items()}
PLACE = {
    f"{package}.{name}": (package, level)
    for package, layers in LAYERS.items()
    for level, names in enumerate(layers)
    for name in names.split()
}


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_layers(module: str) -> None:
    """A module has a place, and imports only what its place and the lists above allow."""
    own = room(module)
    placed = own in PLACE or own in LAYERS
    assert placed, f"{own} has no place in LAYERS"
    package, level = PLACE.get(own, (own, -1))
    for imported in IMPORTS[module]:
        other, top = room(imported), imported.split(".")[0]
        if other in PLACE and top == package:
            assert PLACE[other][1] <= level, f"{module} imports {imported} from a later layer"
        for guarded in {top, other} & ONLY.keys() - {package, own}:
            allowed = ONLY[guarded].split()
            assert own.split(".")[-1] in allowed, f"{module} must not import {imported}"
        if package == "models":
            assert top != "service", f"{module} must not import {imported}"
            used = top in OUTSIDE.split() and (own, top) not in EXCEPT
            assert not used, f"{module} must not use {imported}"


def test_imports_run_in_no_circle() -> None:
    """No module imports itself by way of others."""
    graph = {
        module: {other for other in imported if other in MODULES}
        for module, imported in IMPORTS.items()
    }
    TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_every_folder_of_modules_is_a_package() -> None:
    """The wheel takes packages only, so a folder without __init__.py would be left behind."""
    folders = {path.parent for path in MODULES.values()}
    assert [str(each) for each in folders if not (each / "__init__.py").exists()] == []


def test_every_test_says_what_must_hold() -> None:
    """Each test function has a docstring."""
    silent = [
        f"{module}.{node.name}"
        for module, path in modules("tests").items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert silent == []
