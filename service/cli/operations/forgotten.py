"""Command `heed forgotten`: the ledger of forgotten users."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.console import DATA, Data, JsonFile, in_namespace, open_store, out, write_json
from service.domain.errors import Invalid

forgotten = typer.Typer(
    help="Prove that users were forgotten, and forget them again after restoring a backup.",
    no_args_is_help=True,
)


@forgotten.command("list")
@in_namespace
def list_forgotten(data: Data = DATA, json_file: JsonFile = None) -> None:
    """List the ledger: when users were forgotten, with how many events, and their digests."""
    from rich.table import Table

    from service.domain.timestamps import to_rfc3339

    with open_store(data) as store:
        entries = asyncio.run(_entries(store))
    table = Table("forgotten", "events", "digest (SHA-256 of salt and user id)")
    for entry in entries:
        table.add_row(to_rfc3339(entry.forgotten), f"{entry.events:,}", entry.digest.hex())
    out.print(table if entries else "Nobody was forgotten.")
    write_json(json_file, [_as_json(entry) for entry in entries])


@forgotten.command("verify")
@in_namespace
def verify(user: Annotated[str, typer.Argument(help="Id of the user.")], data: Data = DATA) -> None:
    """Say when a user was forgotten. Exit code 1 if never, or if the user is stored now."""
    from service.domain.timestamps import to_rfc3339

    with open_store(data) as store:
        entries = asyncio.run(store.find_forgotten(user))
        is_stored = asyncio.run(store.version(user)) > 0
    for entry in entries:
        out.print(f"Forgotten at {to_rfc3339(entry.forgotten)}, with {entry.events:,} events.")
    if not entries:
        out.print("The ledger has no entry of this user.")
    out.print(
        "The store has data of this user." if is_stored else "Nothing of this user is stored."
    )
    if is_stored or not entries:
        raise typer.Exit(1)


@forgotten.command("apply")
@in_namespace
def apply(
    ledger: Annotated[
        Path,
        typer.Argument(help="A file of `heed forgotten list --json`, or another data directory."),
    ],
    data: Data = DATA,
) -> None:
    """Forget the users whom another ledger names, after an older backup was restored.

    Entries that the store's own ledger has are left out: what is stored of their users is newer.
    """
    entries = read_ledger(ledger)
    with open_store(data) as store:
        done = asyncio.run(store.forget_again(entries))
        asyncio.run(store.clean_up())
    out.print(
        f"{done.users:,} users with {done.events:,} events forgotten again; "
        f"{done.entries:,} of {len(entries):,} entries were new."
    )


async def _entries(store: Any) -> list[Any]:
    entries: list[Any] = []
    cursor = None
    while True:
        page, cursor = await store.page_forgotten(cursor=cursor, limit=1_000)
        entries += page
        if cursor is None:
            return entries


async def _read_file(path: Path) -> list[Any]:
    from service.stores.sqlite.store import SQLiteStore

    store = SQLiteStore(path)
    try:
        return await _entries(store)
    finally:
        await store.close()


def _as_json(entry: Any) -> dict[str, Any]:
    return {
        "digest": entry.digest.hex(),
        "salt": entry.salt.hex(),
        "forgotten": entry.forgotten,
        "events": entry.events,
    }


def read_ledger(ledger: Path) -> list[Any]:
    """Read the entries of a ledger. Raises `Invalid` if the path leads to none."""
    from service.runtime.data_layout import STORE_FILE
    from service.stores.values import ForgottenUser

    if ledger.is_dir():
        if not (ledger / STORE_FILE).is_file():
            raise Invalid("", f"LEDGER: {ledger} has no {STORE_FILE}")
        return asyncio.run(_read_file(ledger / STORE_FILE))
    try:
        return [
            ForgottenUser(
                bytes.fromhex(row["digest"]),
                bytes.fromhex(row["salt"]),
                int(row["forgotten"]),
                int(row["events"]),
            )
            for row in json.loads(ledger.read_text("utf-8"))
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise Invalid(
            "", f"LEDGER: {ledger} is not a file of `heed forgotten list --json`: {error!r}"
        ) from None
