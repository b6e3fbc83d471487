"""Bulk access to both stores: the contract, on a SQLite file and on a PostgreSQL server."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from service.stores.postgres.store import PostgresStore
from service.stores.sqlite.store import SQLiteStore
from tests.support.bulk_contract import BulkContract
from tests.support.store_contract import Connect


class TestSQLiteBulk(BulkContract):
    """Bulk access to a SQLite file."""

    @pytest.fixture
    def connect(self, tmp_path: Path) -> Connect:
        return lambda: SQLiteStore(tmp_path / "data" / "heed.db", is_target=True)


class TestPostgresBulk(BulkContract):
    """Bulk access to a namespace of a PostgreSQL database."""

    @pytest.fixture
    def namespace(self) -> str:
        return uuid.uuid4().hex

    @pytest.fixture
    def connect(self, url: str, namespace: str) -> Connect:
        return lambda: PostgresStore(url, namespace=namespace, is_target=True)
