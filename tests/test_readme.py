"""Links, settings and requests of all READMEs, compared with files and real answers."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.training.presets import choose_preset
from service.domain.settings import PREFIX, Settings
from tests.support import tiny

ROOT = Path(__file__).parents[1]
PORT = 8000  # as the READMEs write it
MOST_WORDS = 1_500  # of the first README and of docs/attention.md, code and tables included
# In the order in which their requests are run.
READMES = {
    path: (ROOT / path).read_text()
    for path in (
        "README.md",
        "docs/attention.md",
        "models/README.md",
        "service/README.md",
        "tests/benchmarks/README.md",
    )
}

# A console block: commands after "$ ", continued by a backslash, and what each answers.
BLOCK = re.compile(r"(?:<!-- (\w+) -->\n)?```console\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)

# What depends on the model that was trained: compared in kind, not in value.
TRAINED = {"item_id", "title", "event_id", "timestamp", "model_version", "type"}


def requests() -> list[tuple[str, str, str]]:
    """Return how to compare, the command and the shown answer of each README request."""
    return [
        (how or "shape", command, shown)
        for text in READMES.values()
        for how, block in BLOCK.findall(text)
        for command, shown in COMMAND.findall(block)
    ]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A service over MovieLens 100k, as `make demo` leaves it but for a small model."""
    data = tmp_path_factory.mktemp("readme")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    environment |= {"HEED_DATA": str(data)}
    heed = [sys.executable, "-m", "service.cli"]
    command = [*heed, "import", "ml-100k"]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    preset = choose_preset(100_000, 1_682, "quick", epochs=1)
    short = {"attention_epochs": 0, "final_epochs": 0, "validation_users": 100, "weight_cases": 300}
    config = replace(preset.train_config, **short)
    tiny.train(data, replace(preset, dim=16, blocks=1, train_config=config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = int(free.getsockname()[1])
    server = subprocess.Popen([*heed, "serve", "--port", str(number)], env=environment)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{number}/health/ready", timeout=2)
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        yield number
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


@pytest.mark.parametrize("document", ["README.md", "docs/attention.md"])
def test_first_documents_are_short(document: str) -> None:
    """Each document that a newcomer reads has at most MOST_WORDS words."""
    assert len(READMES[document].split()) <= MOST_WORDS


@pytest.mark.parametrize("readme", READMES)
def test_links_and_paths_lead_somewhere(readme: str) -> None:
    """Relative links, and paths of this repository in backquotes, name existing files."""
    text, folder = READMES[readme], (ROOT / readme).parent
    links = [
        link.split("#")[0]
        for link in re.findall(r"\]\(([^)\s]+)\)", text)
        if not link.startswith(("http", "#"))
    ]
    paths = re.findall(r"`((?:models|service|tests|docs)/[\w./]*)`", text)
    missing = [link for link in links if not (folder / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_the_readmes_show_requests() -> None:
    """There are requests of every kind that the service answers."""
    commands = " ".join(command for _, command, _ in requests())
    for path in ("recommend", "score", "search", "events", "attend"):
        assert f"/v1/{path}" in commands


def test_every_request_answers_what_is_shown(port: int) -> None:
    """Each README request returns the answer shown, or its shape where a trained model decides."""
    assert requests()
    for how, command, shown in requests():
        run = subprocess.run(
            ["bash", "-c", command.replace(f":{PORT}/", f":{port}/")],
            check=True,
            capture_output=True,
            text=True,
        )
        assert run.stdout, command
        expected, answer = json.loads(shown), json.loads(run.stdout)
        if how == "exact":
            assert alike(expected, answer), f"{command}\n{run.stdout}"
        else:
            assert kind(expected) == kind(answer), f"{command}\n{run.stdout}"
            assert_adds_up(answer)


def alike(expected: Any, answer: Any) -> bool:
    """Compare an answer with the shown one, numbers to 1e-3."""
    if isinstance(expected, dict):
        return (
            isinstance(answer, dict)
            and expected.keys() == answer.keys()
            # A version is named after the time of its training.
            and all(
                alike(expected[key], answer[key])
                for key in expected
                if key != "model_version" or expected[key] is None
            )
        )
    if isinstance(expected, list):
        return (
            isinstance(answer, list)
            and len(expected) == len(answer)
            and all(alike(e, a) for e, a in zip(expected, answer, strict=True))
        )
    if isinstance(expected, float) and isinstance(answer, float | int):
        return abs(expected - answer) < 1e-3
    return bool(expected == answer)


def kind(value: Any, key: str = "") -> Any:
    """The value with numbers, and what a training decides, replaced by their types."""
    if isinstance(value, dict):
        # Only a model whose held-out events it helps has a similarity part.
        return {name: kind(inner, name) for name, inner in value.items() if name != "similarity"}
    if isinstance(value, list):
        return [kind(inner, key) for inner in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return "number"
    return "text" if key in TRAINED else value


def assert_adds_up(answer: dict[str, Any]) -> None:
    """The parts of every item sum to its score, and every item has a title."""
    for item in answer.get("items", []):
        assert item["title"]
        if "parts" in item:
            assert abs(sum(item["parts"].values()) - item["score"]) < 1e-4
        for reason in item.get("explanation", []):
            assert reason["title"]


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_every_setting_is_documented(name: str) -> None:
    """The table of settings in service/README.md has each with the code's default and words."""
    start = f"| `{PREFIX}{name.upper()}` |"
    (row,) = (line for line in READMES["service/README.md"].splitlines() if line.startswith(start))
    default, description = (cell.strip(" `") for cell in row.removeprefix(start).split("|")[:2])
    field = Settings.model_fields[name]
    read: dict[str, Any] = {name: default}
    assert getattr(Settings(**read), name) == field.default
    assert description == field.description
