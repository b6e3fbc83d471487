"""Weight of the code: the lines of each room, which may not grow past its budget.

A budget changes in a commit of its own that says why. `make weight` prints the table.
"""

from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
LINES_OF_TESTS, LINES_OF_BENCHMARKS = 68_000, 5_000
FILES = 260  # of the rooms
BUDGETS = {
    "models.attention": 600,
    "models.catalogue": 2_950,
    "models.compute": 250,
    "models.data": 800,
    "models.encoder": 750,
    "models.evaluation": 950,
    "models.history": 1_050,
    "models.index": 950,
    "models.ranking": 3_700,
    "models.recommender": 1_300,
    "models.text": 1_600,
    "models.training": 1_850,
    "service.cli": 3_700,
    "service.datasets": 3_750,
    "service.domain": 1_250,
    "service.engine": 5_200,
    "service.histories": 800,
    "service.http": 5_550,
    "service.jobs": 950,
    "service.lab": 3_150,
    "service.maintenance": 2_950,
    "service.questions": 2_550,
    "service.runtime": 2_350,
    "service.snapshots": 2_750,
    "service.stores": 11_500,
    "service.training": 1_200,
}


def lines(*folders: Path) -> int:
    files = (file for folder in folders for file in folder.rglob("*.py"))
    return sum(len(file.read_text().splitlines()) for file in files)


def rooms() -> list[str]:
    """Return the rooms: the folders of `models` and `service`."""
    folders = (folder for top in ("models", "service") for folder in sorted((ROOT / top).iterdir()))
    return [
        f"{each.parent.name}.{each.name}" for each in folders if (each / "__init__.py").exists()
    ]


def test_every_room_has_a_budget() -> None:
    """The table prints what each room weighs, and what it may."""
    table = Table("room", "lines", "budget")
    for room in rooms():
        table.add_row(room, f"{lines(ROOT / room.replace('.', '/')):,}", f"{BUDGETS[room]:,}")
    files = [*(ROOT / "models").rglob("*.py"), *(ROOT / "service").rglob("*.py")]
    table.add_row(
        f"all, in {len(files)} files", f"{lines(ROOT / 'models', ROOT / 'service'):,}", ""
    )
    Console().print(table)
    assert len(files) <= FILES
    assert [*BUDGETS] == rooms()


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_to_its_budget(room: str) -> None:
    """A room that has grown must lose something, or ask for more in a commit that says why."""
    assert lines(ROOT / room.replace(".", "/")) <= BUDGETS[room]


def test_tests_keep_to_their_budgets() -> None:
    benchmarks = lines(ROOT / "tests/benchmarks")
    assert lines(ROOT / "tests") - benchmarks <= LINES_OF_TESTS
    assert benchmarks <= LINES_OF_BENCHMARKS
