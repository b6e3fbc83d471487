"""The PostgreSQL store: the store contract on a real server."""

import uuid
from collections.abc import AsyncIterator

import pytest

from service.stores.postgres.store import PostgresStore
from service.stores.quota import StoreQuota
from tests.support.store_contract import Connect, Limited, StoreContract

PATIENCE = 20.0  # seconds of an answer: a busy machine is no failure


def _own(url: str) -> str:
    """Return the URL for connections of its own, as another process would have them."""
    return f"{url}?application_name={uuid.uuid4().hex}"


class TestPostgresStore(StoreContract):
    """The store contract in a namespace of a PostgreSQL database."""

    @pytest.fixture
    def namespace(self) -> str:
        return uuid.uuid4().hex

    @pytest.fixture
    def connect(self, url: str, namespace: str) -> Connect:
        return lambda: PostgresStore(_own(url), namespace=namespace, patience=PATIENCE)

    @pytest.fixture
    async def limited(self, url: str, namespace: str) -> AsyncIterator[Limited]:
        made: list[PostgresStore] = []

        def connect(quota: StoreQuota) -> PostgresStore:
            made.append(
                PostgresStore(_own(url), namespace=namespace, quota=quota, patience=PATIENCE)
            )
            return made[-1]

        yield connect
        for store in made:
            await store.close()
