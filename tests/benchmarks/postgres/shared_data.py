"""The data of a benchmark in a database, served by any number of replicas."""

from __future__ import annotations

import asyncio

from service.maintenance.copying import copy_store
from service.runtime.data_layout import STORE_FILE
from service.snapshots.shared_registry import open_registry
from service.stores.postgres.store import PostgresStore
from service.stores.sqlite.store import SQLiteStore
from tests.benchmarks.postgres.measured_server import MeasuredServer
from tests.benchmarks.workload.data import BenchmarkData


def share_data(ground: BenchmarkData, server: MeasuredServer) -> str:
    """Copy the store and the model of a data directory into a new database; return its URL."""
    url = server.create_database()

    async def copy() -> None:
        source, target = SQLiteStore(ground.data / STORE_FILE), PostgresStore(url, patience=60)
        try:
            await copy_store(source, target, "a benchmark")
            if ground.model is not None:
                registry = open_registry(ground.data, target)
                await asyncio.to_thread(registry.activate, ground.model)
        finally:
            await source.close()
            await target.close()

    asyncio.run(copy())
    return url
