"""The SQLite store: the contract, and what only a file can do."""

from pathlib import Path

import pytest

from service.stores.sqlite import SQLiteStore
from tests.service.store_contract import Connect, StoreContract


class TestSQLiteStore(StoreContract):
    """The contract, on a file."""

    @pytest.fixture
    def connect(self, tmp_path: Path) -> Connect:
        return lambda: SQLiteStore(tmp_path / "data" / "heed.db")
