"""The store contract for PostgreSQL stores, over whichever database the fixture `url` names."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from service.stores.postgres.store import QUICK_TIMEOUT, PostgresStore
from service.stores.quota import StoreQuota
from tests.support.store_contract import Connect, Limited, StoreContract


class PostgresContract(StoreContract):
    """The store contract, each test in a namespace of its own."""

    patience = QUICK_TIMEOUT  # seconds

    @pytest.fixture
    def namespace(self) -> str:
        return uuid.uuid4().hex

    @pytest.fixture
    def connect(self, url: str, namespace: str) -> Connect:
        return lambda: self.open(url, namespace)

    @pytest.fixture
    async def limited(self, url: str, namespace: str) -> AsyncIterator[Limited]:
        made: list[PostgresStore] = []

        def connect(quota: StoreQuota) -> PostgresStore:
            made.append(self.open(url, namespace, quota))
            return made[-1]

        yield connect
        for store in made:
            await store.close()

    def open(self, url: str, namespace: str, quota: StoreQuota | None = None) -> PostgresStore:
        """Open a store over connections of its own, as another process would have them."""
        own = f"{url}?application_name={uuid.uuid4().hex}"
        return PostgresStore(own, namespace=namespace, quota=quota, patience=self.patience)
