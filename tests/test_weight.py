"""Weight of the code: the lines of each room, which may not grow past its budget.

A budget changes in a commit of its own that says why. `make weight` prints the table.
"""

from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
LINES_OF_TESTS, LINES_OF_BENCHMARKS = 71_500, 4_950
FILES = 272  # of the rooms
BUDGETS = {
    "models.attention": 600,
    "models.catalogue": 3_100,
    "models.compute": 300,
    "models.data": 800,
    "models.encoder": 750,
    "models.evaluation": 950,
    "models.history": 1_100,
    "models.index": 1_000,
    "models.ranking": 4_050,
    "models.recommender": 1_350,
    "models.text": 1_650,
    "models.training": 1_900,
    "service.cli": 3_850,
    "service.datasets": 3_800,
    "service.domain": 1_300,
