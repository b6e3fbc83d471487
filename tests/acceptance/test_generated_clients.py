"""Clients that are generated from the document: of all operations, compiled, and called."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.server import PATIENCE, Server

CALLS = Path(__file__).parent / "clients"
TOOLS = Path(f"{sys.prefix}-clients")  # `make clients`
MODULES = TOOLS / "node_modules"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service without items."""
    with Server(tmp_path_factory.mktemp("clients") / "data") as server:
        httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE)  # the generators wait for 5 s
        yield server.url


def operations(url: str) -> dict[str, str]:
    """The tag of each operation that the document has, by its name."""
    paths = httpx.get(f"{url}/openapi.json").raise_for_status().json()["paths"]
    described = [each for path in paths.values() for each in path.values()]
    return {each["operationId"]: each["tags"][0] for each in described}


def run(folder: Path, program: str | Path, *arguments: str | Path) -> str:
    """What a program said, which must succeed."""
    path = os.pathsep.join([str(TOOLS / "bin"), os.environ["PATH"]])
    ended = subprocess.run(
        [program, *arguments],
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), "PYTHONPATH": str(folder / "python")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_python(url: str, tmp_path: Path) -> None:
    """openapi-python-client leaves out no operation, and mypy and the service accept the calls."""
    generator, generated = TOOLS / "bin" / "openapi-python-client", tmp_path / "python"
    said = run(
        tmp_path, generator, "generate", "--url", f"{url}/openapi.json", "--output-path", generated
    )
    assert "arning" not in said
    package = generated / "heed_client"
    made = {path.stem: path.parent.name for path in package.glob("api/*/[!_]*.py")}
    assert made == operations(url)
    run(generated, sys.executable, "-m", "mypy", "--strict", CALLS / "calls.py", package)
    run(tmp_path, sys.executable, CALLS / "calls.py", url)


def test_typescript(url: str, tmp_path: Path) -> None:
    """openapi-typescript types every operation, and tsc and the service accept the calls."""
    (tmp_path / "node_modules").symlink_to(MODULES)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "calls.ts").write_bytes((CALLS / "calls.ts").read_bytes())
    run(tmp_path, MODULES / ".bin" / "openapi-typescript", f"{url}/openapi.json", "-o", "heed.ts")
    lines = (tmp_path / "heed.ts").read_text().splitlines()
    declared = lines[lines.index("export interface operations {") :]
    assert {f"    {name}: {{" for name in operations(url)} <= set(declared)
    run(
        *(tmp_path, MODULES / ".bin" / "tsc", "--strict", "--module", "nodenext"),
        *("--target", "es2022", "calls.ts"),
    )
    call = 'import { call } from "./calls.js"; await call(process.argv[1]);'
    run(tmp_path, "node", "--input-type=module", "-e", call, url)
