"""SECURITY.md: each threat names tests that exist, and what no other test holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
SECURITY = (ROOT / "SECURITY.md").read_text("utf-8")
# Modules that open connections. `service/lab`, `service/datasets` and the commands do.
CLIENTS = {"aiohttp", "ftplib", "http.client", "httpx", "requests", "urllib.request", "urllib3"}
ANSWERING = ("domain", "engine", "histories", "http", "jobs", "snapshots", "stores")


def threats() -> list[list[str]]:
    """Return the cells of each row of the table of threats."""
    table = SECURITY.split("\n## Threats\n")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]


def functions(path: Path) -> set[str]:
    """Return the names of a file's functions, those of its classes included."""
    tree = ast.parse(path.read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("row", threats(), ids=lambda row: row[0])
def test_each_threat_names_tests_that_exist(row: list[str]) -> None:
    """A row has a threat, an answer and at least one test, which its file has."""
    threat, answer, held = row
    assert threat
    assert answer
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", held)
    assert len(named) == held.count("`") / 2 > 0, held
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file() or name not in functions(ROOT / path)
    ]
    assert missing == []


def test_what_answers_requests_opens_no_connections() -> None:
    """No module that answers requests imports a client of HTTP, whatever a request says."""
    files = [f for room in ANSWERING for f in sorted((ROOT / "service" / room).rglob("*.py"))]
    files += sorted((ROOT / "models").rglob("*.py"))
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{each.name}" for each in node.names] + [str(node.module)]
            if any(
                name == client or name.startswith(f"{client}.")
                for name in names
                for client in CLIENTS
            ):
                found.add(file.relative_to(ROOT).as_posix())
    assert len(files) > 100
    assert found == set()


SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_containers_have_few_privileges(name: str) -> None:
    """Each container has a read-only root, no capabilities, bounds, and ports of loopback only."""
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["pids_limit"] > 0
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    mounted = " ".join(service.get("volumes", ()))
    assert "docker.sock" not in mounted
    if "build" in service:
        image = (ROOT / service["build"] / "Dockerfile").read_text()
        user = "10001" if service["image"] == "heed" else "postgres"
        assert re.findall(r"^USER (.*)$", image, re.MULTILINE)[-1] == user
