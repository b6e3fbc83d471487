"""Cluster of the tests in this folder, which are collected only where HEED_TEST_CITUS names one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import psycopg
import pytest

from service.stores.postgres.database.distribution import distribute
from service.stores.postgres.database.migrations import migrate
from tests.support.citus_databases import CitusDatabases

COORDINATOR = os.environ.get("HEED_TEST_CITUS", "")
SHARDS = 8

collect_ignore_glob = [] if COORDINATOR else ["test_*.py"]


@pytest.fixture(scope="session")
def citus() -> Iterator[CitusDatabases]:
    """The cluster, in which tests create databases."""
    databases = CitusDatabases(COORDINATOR, prefix=f"heed_test_{uuid.uuid4().hex[:8]}_")
    yield databases
    databases.drop_databases()


@pytest.fixture(scope="module")
def url(citus: CitusDatabases) -> str:
    """The URL of a distributed database for all tests of a file."""
    made = citus.create_database()
    with psycopg.connect(made, autocommit=True) as connection:
        migrate(connection)
        distribute(connection, SHARDS)
    return made
