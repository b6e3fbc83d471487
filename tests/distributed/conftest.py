"""Cluster of the tests in this folder, which are collected only where HEED_TEST_CITUS names one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from tests.support.citus_databases import CitusDatabases

COORDINATOR = os.environ.get("HEED_TEST_CITUS", "")

collect_ignore_glob = [] if COORDINATOR else ["test_*.py"]


@pytest.fixture(scope="session")
def citus() -> Iterator[CitusDatabases]:
    """The cluster, with databases that are distributed."""
    databases = CitusDatabases(COORDINATOR, prefix=f"heed_test_{uuid.uuid4().hex[:8]}_")
    yield databases
    databases.drop_databases()


@pytest.fixture(scope="module")
def url(citus: CitusDatabases) -> str:
    """The URL of a distributed database for all tests of a file."""
    return citus.create_database()
