"""Links, words, requests and commands of all documents, compared with files and real answers."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.training.presets import choose_preset
from tests.support import tiny
from tests.support.command_line import Heed
from tests.support.guided import check_heed
from tests.support.heed_process import HeedProcess
from tests.support.server import Server

pytestmark = pytest.mark.verify

ROOT = Path(__file__).parents[1]
PORT = 8000  # as the documents write it
# Words as `wc -w` counts them, code and tables included.
MOST_OF_README = 900
MOST_OF_A_PAGE = 2_500
MOST_IN_ALL = 26_000
COLUMNS = 120  # of a line of the changelog, which has one for each change
FIRST = ("README.md", "docs/start.md", "docs/questions.md")
# In the order in which their requests are run.
DOCUMENTS = {
    path: (ROOT / path).read_text("utf-8")
    for path in dict.fromkeys(
        (
            *FIRST,
            *sorted(page.relative_to(ROOT).as_posix() for page in ROOT.glob("docs/**/*.md")),
            "SECURITY.md",
        )
    )
}
LINKED = DOCUMENTS | {
    path: (ROOT / path).read_text("utf-8") for path in ("tests/benchmarks/README.md",)
}

# A console block: commands after "$ ", continued by a backslash, and what each answers.
BLOCK = re.compile(r"(?:<!-- (\w+) -->\n)?```console\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)

SAMPLE = {
    "item_id": "mug",
    "title": "Blue mug",
    "description": "Holds tea",
    "categories": "Kitchen",
    "user_id": "ada",
    "timestamp": "2026-01-31T08:00:00Z",
    "type": "purchase",
}

# Fields that depend on the trained model: compared in kind, not in value.
TRAINED = {"item_id", "title", "event_id", "timestamp", "model_version", "type"}


def requests() -> list[tuple[str, str, str]]:
    """Return how to compare, the command and the shown answer of each request."""
    return [
        (how or "shape", command, shown)
        for text in DOCUMENTS.values()
        for how, block in BLOCK.findall(text)
        for command, shown in COMMAND.findall(block)
    ]


def heed_commands(text: str) -> list[tuple[str, ...]]:
    """Return the arguments of each `heed ...` in the text, the tables and the blocks of a page."""
    blocks = [code for language, code in FENCED.findall(text) if language in {"sh", "text"}]
    lines = "".join(blocks).replace("\\\n", " ").split("\n")
    written = [
        re.findall(r"(?:^|&& |run --rm api |exec \S+ |--no-python )heed (.*)", line)
        for line in lines
    ]
    inline = re.findall(r"`heed ([^`]+)`", FENCED.sub("", text).replace("\n", " "))
    commands = [*inline, *(command for found in written for command in found)]
    return sorted(
        {tuple(shlex.split(re.split(r" [|>&]", each)[0], comments=True)) for each in commands}
    )


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A service over MovieLens 100k, as `make demo` leaves it but for a small model."""
    data = tmp_path_factory.mktemp("readme") / "data"
    imported = HeedProcess(
        "import", "ml-100k", "--data", data, log=data.with_name("import.log"), fresh=True
    )
    assert imported.wait() == 0, imported.log()
    preset = choose_preset(100_000, 1_682, "quick", epochs=1)
    short = {"attention_epochs": 0, "final_epochs": 0, "validation_users": 100, "weight_cases": 300}
    config = replace(preset.train_config, **short)
    tiny.train(data, replace(preset, dim=16, blocks=1, train_config=config))
    with Server(data, fresh=True) as server:
        yield int(server.url.rpartition(":")[2])


def test_the_documents_are_short() -> None:
    """README, each page, and all of them together keep to their limits of words."""
    words = {path: len(text.split()) for path, text in DOCUMENTS.items()}
    assert words["README.md"] <= MOST_OF_README
    assert {path: count for path, count in words.items() if count > MOST_OF_A_PAGE} == {}
    assert sum(words.values()) <= MOST_IN_ALL


def test_the_changelog_has_a_line_for_each_change() -> None:
    """A change is one line that can be read without scrolling."""
    lines = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
    assert [line for line in lines if len(line) > COLUMNS or line.startswith("  ")] == []


@pytest.mark.parametrize("document", LINKED)
def test_links_and_paths_lead_somewhere(document: str) -> None:
    """Links name files and headings that exist, and so do paths in backquotes."""
    text, folder = LINKED[document], (ROOT / document).parent
    links = re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text)
    missing = [link for link, _ in links if not (folder / link).exists()]
    missing += [
        f"{link}#{anchor}"
        for link, anchor in links
        if anchor and anchor not in anchors(folder / link if link else ROOT / document)
    ]
    paths = re.findall(r"`((?:models|service|tests|docs|deploy)/[\w./]*)`", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_every_page_is_reached_from_the_readme() -> None:
    links = set(re.findall(r"\]\(([\w./-]+\.md)\)", DOCUMENTS["README.md"]))
    assert set(DOCUMENTS) - links == {"README.md"}


@pytest.mark.parametrize("document", sorted({*DOCUMENTS} - {"docs/reference/commands.md"}))
def test_the_commands_exist(document: str) -> None:
    """The command line accepts each command and option that a page names."""
    for words in heed_commands(DOCUMENTS[document]):
        check_heed(words)


def test_the_documents_show_requests() -> None:
    """There are requests of every kind that the service answers."""
    commands = " ".join(command for _, command, _ in requests())
    for path in ("recommend", "score", "search", "events", "attend"):
        assert f"/v1/{path}" in commands


def test_two_files_are_imported_as_the_readme_says(
    heed: Heed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's commands store files with the columns that it names."""
    block = DOCUMENTS["README.md"].split("\n## Your data\n")[1].split("```sh\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    for line in block.splitlines()[:2]:
        command, _, columns = line.partition("#")
        names = [name.strip() for name in columns.split(",") if "…" not in name]
        words = shlex.split(command)
        rows = [names, [SAMPLE[name] for name in names]]
        (tmp_path / words[-1]).write_text("".join(",".join(row) + "\n" for row in rows))
        said = heed(*words[1:])
        assert said.code == 0, said.err


def test_every_request_answers_what_is_shown(port: int) -> None:
    """Each request returns the answer shown, or its shape if a trained model decides."""
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
