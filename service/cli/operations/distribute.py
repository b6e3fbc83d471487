"""Command `heed distribute`: spread the tables of a PostgreSQL store over the workers of Citus."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.console import out

SHARDS = 32


def distribute(
    store: Annotated[
        str, typer.Option(envvar="HEED_STORE", help="URL of the database, on the coordinator.")
    ],
    shards: Annotated[
        int, typer.Option(min=1, help="Parts of each table; a few for each core of all workers.")
    ] = SHARDS,
) -> None:
    """Distribute the tables of a PostgreSQL store, with their rows, over the workers of Citus.

    The database must have the extension citus and its cluster workers, and no other process of Heed
    may use it meanwhile. It is one transaction: all or nothing is done.
    """
    from service.stores.postgres.database.distributed import distribution
    from service.stores.postgres.database.migrations import migrate
    from service.stores.postgres.database.shared import open_database

    database = open_database(store)
    try:
        with database.connections.plain() as connection:
            migrate(connection)
            is_new = distribution.distribute(connection, shards)
            workers = distribution.count_shards(connection)
    finally:
        database.abandon()
    out.print("The tables are distributed." if is_new else "The tables were distributed already.")
    for worker, count in workers:
        out.print(f"{worker} has {count} shards of each.", markup=False, soft_wrap=True)
