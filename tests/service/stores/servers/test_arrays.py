"""Arrays as they are encoded for statements, read back by a real server."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest

from service.stores.encoding import event_key, spelled_id
from service.stores.postgres.dialect import (
    PackedArray,
    bigints,
    doubles,
    integers,
    uuids,
)
from tests.support.postgres_server import PostgresDatabases

KEYS = [*map(UUID, ("0" * 32, "0" * 31 + "1", "f" * 32, "0b1c000000004000800000000000ff00"))]


@pytest.mark.parametrize(
    ("kind", "packed", "values"),
    [
        ("bigint[]", bigints([-(2**63), -1, 0, 2**63 - 1]), [-(2**63), -1, 0, 2**63 - 1]),
        ("bigint[]", bigints([]), []),
        ("integer[]", integers([-(2**31), 7, 2**31 - 1]), [-(2**31), 7, 2**31 - 1]),
        ("double precision[]", doubles([0.1, 1.2e-38, 3.4e38]), [0.1, 1.2e-38, 3.4e38]),
        ("uuid[]", uuids(key.bytes for key in KEYS), KEYS),
    ],
)
def test_a_server_reads_the_values_that_were_packed(
    postgres: PostgresDatabases, kind: str, packed: PackedArray, values: list[Any]
) -> None:
    """The server's own text form of the array is that of the array that it parses from text."""
    with psycopg.connect(postgres.url()) as connection:
        row = connection.execute(f"SELECT %s::{kind}, %s::{kind}::text".encode(), (packed, packed))
        texts = ",".join(map(str, values))
        parsed = connection.execute(f"SELECT '{{{texts}}}'::{kind}::text".encode()).fetchone()
        found = row.fetchone()
    assert found is not None
    assert parsed is not None
    assert found == (values, parsed[0])


@pytest.mark.parametrize("key", KEYS)
def test_only_the_canonical_form_of_a_uuid_is_its_key(key: UUID) -> None:
    """Every other spelling is another id, and is stored beside its hash."""
    assert event_key(str(key)) == key.bytes
    assert spelled_id(str(key), key.bytes) is None
    for other in (str(key).upper(), key.hex, f"{{{key}}}", f"{key.hex}0000", "é" * 36):
        if other != str(key):
            hashed = event_key(other)
            assert len(hashed) == 16
            assert hashed != key.bytes
            assert spelled_id(other, hashed) == other
