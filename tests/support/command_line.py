"""The console script as tests call it, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support.stores import run_on


class Said(NamedTuple):
    code: int
    out: str
    err: str


Heed = Callable[..., Said]


def counts(data: Path) -> dict[str, int]:
    (counted,) = run_on(SQLiteStore(data / STORE_FILE), SQLiteStore.counts)
    return dict(counted)
