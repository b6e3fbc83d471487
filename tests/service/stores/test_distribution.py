"""Distribution over Citus, as far as an ordinary server shows it: places of tables and of rows."""

from __future__ import annotations

import random
import uuid

import psycopg
import pytest

from service.stores.postgres.database.distributed.distribution import DISTRIBUTED, LOCAL
from service.stores.postgres.database.distributed.placement import (
    build_placement,
    hash_bigint,
    hash_uuid,
)
from service.stores.postgres.database.migrations import migrate
from tests.support.command_line import Heed
from tests.support.postgres_server import PostgresDatabases


@pytest.fixture(scope="module")
def url(postgres: PostgresDatabases) -> str:
    """The URL of a database with the schema."""
    made = postgres.create_database()
    with psycopg.connect(made, autocommit=True) as connection:
        migrate(connection)
    return made


def test_every_table_has_a_place(url: str) -> None:
    """Each table of the schema is either distributed or stays on the coordinator."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace"
            " WHERE nspname = 'heed' AND relkind IN ('r', 'p') AND NOT relispartition"
        ).fetchall()
    assert LOCAL.isdisjoint(DISTRIBUTED)
    assert {name for (name,) in rows} == LOCAL.union(DISTRIBUTED)


def test_hashes_are_those_of_the_server(url: str) -> None:
    """Users' keys and event ids have the hashes by which a server places rows."""
    rng = random.Random(5)
    numbers = [0, 1, -1, 2**63 - 1, -(2**63), *(rng.getrandbits(63) for _ in range(500))]
    ids = [uuid.UUID(int=rng.getrandbits(128)) for _ in range(500)]
    with psycopg.connect(url) as connection:
        of_numbers = connection.execute(
            "SELECT hashint8(n) FROM unnest(%s::bigint[]) WITH ORDINALITY AS t (n, i) ORDER BY i",
            (numbers,),
        ).fetchall()
        of_ids = connection.execute(
            "SELECT uuid_hash(u) FROM unnest(%s::uuid[]) WITH ORDINALITY AS t (u, i) ORDER BY i",
            (ids,),
        ).fetchall()
    assert [hash_bigint(number) for number in numbers] == [hashed for (hashed,) in of_numbers]
    assert [hash_uuid(each.bytes) for each in ids] == [hashed for (hashed,) in of_ids]


def test_a_batch_of_many_is_on_all_workers() -> None:
    """One user is on one worker, and more users than one looks up are on all."""
    lasts = [-(2**30), 0, 2**30, 2**31 - 1]
    shards = [(is_users, last, n % 2) for is_users in (True, False) for n, last in enumerate(lasts)]
    placement = build_placement(shards)
    names = [f"u{n}" for n in range(100)]
    assert {len(placement.workers([name])) for name in names} == {1}
    assert placement.workers(names) == placement.everywhere == {0, 1}


def test_a_database_without_the_extension_is_refused(url: str, heed: Heed) -> None:
    """`heed distribute` says what an ordinary database lacks, and changes nothing."""
    refused = heed("distribute", "--store", url)
    assert refused.code == 1
    assert "CREATE EXTENSION citus" in " ".join(refused.err.split())
