"""Rates of API keys over several machines, counted in a PostgreSQL store."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from math import floor

import psycopg
import pytest

from service.domain.errors import RateLimited
from service.domain.keys import Rate, issue_key
from service.http.rate_limits import RateLimits
from service.stores.postgres.store import PostgresStore
from service.stores.values import RateWindows

DAY = 86_400


def machine(url: str) -> PostgresStore:
    """The store of another machine."""
    return PostgresStore(f"{url}?application_name={uuid.uuid4().hex}", patience=60)


def windows(store: PostgresStore) -> RateWindows:
    """The windows of a store."""
    assert store.rate_windows is not None
    return store.rate_windows


async def test_machines_grant_a_rate_once(url: str) -> None:
    """Three machines that ask at once get exactly the amount, and then when to come back."""
    stores, key, rate = [machine(url) for _ in range(3)], uuid.uuid4().hex, Rate(1_000, DAY)
    asked = [windows(stores[n % 3]).grant(key, rate, 7) for n in range(300)]
    granted = [each.requests for each in await asyncio.gather(*asked)]
    assert sum(granted) == 1_000
    assert max(granted) == 7
    requests, wait = await windows(stores[0]).grant(key, rate, 1)
    assert requests == 0
    assert 0 < wait <= DAY
    assert (await windows(stores[1]).grant(uuid.uuid4().hex, rate, 3)).requests == 3
    for store in stores:
        await store.close()


@pytest.mark.parametrize(("ago", "counted"), [(0, 600), (1, 600), (2, 600)])
async def test_the_window_before_counts_in_part(url: str, ago: int, counted: int) -> None:
    store, key, rate = machine(url), uuid.uuid4().hex, Rate(1_000, DAY)
    assert (await windows(store).grant(key, rate, counted)).requests == counted
    with psycopg.connect(url, autocommit=True) as connection:

        def spent() -> float:
            row = connection.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
            assert row is not None
            return float(row[0]) % DAY

        connection.execute(
            "UPDATE heed.rate_windows SET number = number - %s WHERE key_id = %s", (ago, key)
        )
        before = spent()
        granted = (await windows(store).grant(key, rate, 2_000)).requests
        after = spent()
    weights = {0: (1.0, 1.0), 1: (1 - before / DAY, 1 - after / DAY), 2: (0.0, 0.0)}[ago]
    assert granted in {1_000 - floor(counted * weight) for weight in weights}
    await store.close()


async def test_a_key_has_its_rate_over_all_machines(url: str) -> None:
    """Requests to two machines are let through up to the rate, all but a share of it."""
    stores, limits = [machine(url), machine(url)], [RateLimits(), RateLimits()]
    key, _ = issue_key("shop", frozenset({"read"}), 0)
    rate, passed = Rate(500, DAY), 0
    for n in range(1_200):
        with suppress(RateLimited):
            await limits[n % 2].count(key, rate, windows(stores[n % 2]))
            passed += 1
    assert 490 <= passed <= 500
    for each, store in zip(limits, stores, strict=True):
        with pytest.raises(RateLimited, match="500/d") as refused:
            await each.count(key, rate, windows(store))
        assert refused.value.retry_after >= 1
    for store in stores:
        await store.close()
