"""Thirty known-item queries over PyVideo, and the recorded rank of each talk.

The queries were written down before anything was searched for. `make known PYVIDEO=DIR` finds them
anew and records the ranks.
"""

import json
from pathlib import Path
from typing import Any

from service.datasets.base import JudgedQuery
from service.lab.public_data import read_judgments

LIST = Path(__file__).with_name("pyvideo.csv")
RECORD = Path(__file__).with_name("pyvideo.json")


def known() -> list[JudgedQuery]:
    """The queries, each with its talk."""
    return read_judgments(LIST)


def record() -> dict[str, Any]:
    """Return the recorded output of `heed evaluate-search --json`."""
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found
