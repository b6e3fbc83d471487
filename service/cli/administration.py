"""Commands `heed namespaces`, `heed keys` and `heed forgotten`."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from service.cli.console import (
    DATA,
    Data,
    JsonFile,
    err,
    in_namespace,
    open_directory,
    open_store,
    out,
    write_json,
)
from service.domain.errors import HeedError, Invalid, NotFound
from service.domain.names import DEFAULT_NAMESPACE, NAME_RULE, is_name
from service.runtime import data_layout
from service.runtime.data_layout import MODELS_FOLDER, NAMESPACES_FOLDER

if TYPE_CHECKING:
    from service.domain.keys import ApiKey

namespaces = typer.Typer(
    help="Create, list and remove namespaces: each has its own items, users, events, scenarios, "
    "models and jobs. The namespace default is the data directory itself, and is always there.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="1 to 64 of a-z, 0-9, '_' and '-'.")]


@namespaces.command("create")
def create_namespace(name: Name, data: Data = DATA) -> None:
    """Create an empty namespace; a running service serves it at once."""
    with open_directory(data) as directory:
        folder = directory.create(name)
    out.print(f"Namespace {name} created in {folder}.", markup=False, soft_wrap=True)


@namespaces.command("list")
def list_namespaces(data: Data = DATA) -> None:
    """List the namespaces with their records, their bytes on this disk and the model that serves.

    With HEED_STORE the records are in the database, and only copies and caches on this disk.
    """
    table = Table()
    table.add_column("namespace", no_wrap=True)  # for copying
    for name in ("items", "users", "events", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("model", overflow="fold")
    with open_directory(data) as directory:
        for name in [DEFAULT_NAMESPACE, *directory.names()]:
            table.add_row(name, *_described(directory, data, name))
    out.print(table)


@namespaces.command("remove")
def remove_namespace(
    name: Name,
    data: Data = DATA,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without a question.")] = False,
) -> None:
    """Remove a namespace and every byte of it. A running service refuses its requests at once.

    Nothing brings it back. A namespace in which a training runs is not removed.
    """
    from service.domain.settings import Settings
    from service.stores.opening import is_shared

    with open_directory(data) as directory:
        folder = directory.find(name)
        if not yes and name != DEFAULT_NAMESPACE:
            items, users, events, size, _ = _described(directory, data, name)
            place = " of the database, for all machines" if is_shared(Settings.read().store) else ""
            out.print(
                f"This deletes {items} items, {users} users and {events} events{place}, "
                f"{size} in {folder}.",
                markup=False,
                soft_wrap=True,
            )
            if typer.prompt(f"Type {name} to remove it", default="", show_default=False) != name:
                out.print("Nothing was removed.")
                raise typer.Exit(1)
        directory.remove(name)
    out.print(f"Namespace {name} removed.", markup=False, soft_wrap=True)


def _described(directory: Any, data: Path, name: str) -> tuple[str, str, str, str, str]:
    """Return the items, users, events, bytes and model of a namespace, as they are printed."""
    from service.snapshots.shared_registry import open_registry

    folder = directory.find(name) if name != DEFAULT_NAMESPACE else data
    size = data_layout.folder_size(folder)
    if name == DEFAULT_NAMESPACE:
        size -= data_layout.folder_size(folder / NAMESPACES_FOLDER)
    shown = f"{size / 1e6:.1f} MB"
    try:
        if directory.token(name) is None:
            return "–", "–", "–", shown, "no store"
        with open_store(folder) as store:
            counts = asyncio.run(store.counts())
            model = ""
            if store.shared is not None or (folder / MODELS_FOLDER).is_dir():
                model = open_registry(folder, store).current() or ""
    except HeedError as error:
        return "?", "?", "?", shown, str(error)
    items, users, events = (f"{counts[each]:,}" for each in ("items", "users", "events"))
    return items, users, events, shown, model


keys = typer.Typer(
    help="API keys: create, list and revoke. As soon as there is one, the service answers no "
    "request without a key. Changes are effective at once, also in a running service.",
    no_args_is_help=True,
)


@keys.command("create")
def create_key(
    data: Data = DATA,
    name: Annotated[
        str, typer.Option(help="Of the client, for lists and logs; keys may share a name.")
    ] = ...,  # type: ignore[assignment]  # typer's mark of a required option
    scope: Annotated[
        list[str],
        typer.Option(
            help="read: questions and GET; write: events, items, users, scenarios; train: "
            "trainings and models; admin: everything. May be repeated."
        ),
    ] = ...,  # type: ignore[assignment]
    namespace: Annotated[
        str, typer.Option(help="Namespace that the key opens; its removal revokes the key.")
    ] = "default",
    expires: Annotated[
        str | None,
        typer.Option(help="After 12h, 30d or 8w, or at an RFC 3339 time."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Most requests: 100/s, 600/min, 5000/h or 100000/d.")
    ] = None,
) -> None:
    """Create a key and print it on stdout, once: only a digest of it is stored.

    [dim]heed keys create --name shop --scope read --scope write --rate 200/s[/]
    """
    from service.domain.keys import SCOPES, issue_key, parse_expiry, parse_rate

    now = time.time_ns() // 1000
    if not is_name(namespace):
        raise Invalid("--namespace", f"must be {NAME_RULE}; it is {namespace!r}")
    try:
        scopes = frozenset(name for name in SCOPES if name in scope)
        if unknown := sorted(set(scope) - scopes):
            allowed = ", ".join(SCOPES)
            raise Invalid("/scope", f"must be one of {allowed}; it is {unknown[0]!r}")
        key, token = issue_key(
            name,
            scopes,
            now,
            namespace=namespace,
            expires=None if expires is None else parse_expiry(expires, now),
            rate=None if rate is None else parse_rate(rate),
        )
    except Invalid as error:
        raise Invalid(error.pointer.replace("/", "--"), error.detail) from None
    with open_directory(data) as directory:
        directory.find(namespace)
        # The id binds the key to this namespace: it does not open a later one of the same name.
        key = replace(key, namespace_id=directory.namespace_id(namespace) or "")
        with open_store(data) as store:
            asyncio.run(store.add_key(key))
    err.print(
        f"Key {key.key_id} of {name} for the namespace {namespace} may "
        f"{', '.join(sorted(scopes))}. It is shown this once; send it as "
        "Authorization: Bearer KEY.",
        markup=False,
        soft_wrap=True,
    )
    out.print(token, markup=False, soft_wrap=True)


@keys.command("list")
def list_keys(data: Data = DATA, json_file: JsonFile = None) -> None:
    """List all keys, oldest first, without what would open anything."""
    from service.domain.timestamps import to_rfc3339

    with open_store(data) as store, open_directory(data) as directory:
        stored: list[ApiKey] = asyncio.run(store.keys())
        ids = {key.namespace: directory.namespace_id(key.namespace) for key in stored}
    now = time.time_ns() // 1000
    rows = [
        {
            "id": key.key_id,
            "name": key.name,
            "namespace": key.namespace,
            "scopes": sorted(key.scopes),
            "rate": None if key.rate is None else str(key.rate),
            "created": to_rfc3339(key.created),
            "expires": None if key.expires is None else to_rfc3339(key.expires),
            "revoked": None if key.revoked is None else to_rfc3339(key.revoked),
            "state": _key_state(key, now, ids[key.namespace]),
        }
        for key in stored
    ]
    write_json(json_file, {"keys": rows})
    if not rows:
        out.print("There is no key: the service answers without one.")
        return
    table = Table("id", "name", "namespace", "scopes", "rate", "created", "expires", "state")
    for row in rows:
        table.add_row(
            *(str(row[column]) for column in ("id", "name", "namespace")),
            " ".join(row["scopes"] or ()),
            str(row["rate"] or ""),
            *(str(row[column] or "")[:19] for column in ("created", "expires")),
            str(row["state"]),
        )
    out.print(table)


@keys.command("revoke", no_args_is_help=True)
def revoke_key(
    key: Annotated[str, typer.Argument(help="Id of a key, or the name of exactly one.")],
    data: Data = DATA,
) -> None:
    """Revoke a key, effective with the next request. Its record stays in the list."""
    with open_store(data) as store:
        stored: list[ApiKey] = asyncio.run(store.keys())
        matching = [row for row in stored if not row.revoked and key in (row.key_id, row.name)]
        if not matching:
            raise NotFound(f"there is no key {key!r} that is not revoked; see heed keys list")
        if len(matching) > 1:
            ids = ", ".join(row.key_id for row in matching)
            raise Invalid("", f"{len(matching)} keys are named {key!r}; revoke one by id: {ids}")
        asyncio.run(store.revoke_key(matching[0].key_id))
    out.print(f"Key {matching[0].key_id} of {matching[0].name} is revoked.", markup=False)


def _key_state(key: ApiKey, now: int, namespace_id: str | None) -> str:
    if key.revoked is not None:
        return "revoked"
    if key.namespace_id != namespace_id:
        return "namespace removed"
    return "expired" if key.is_expired(now) else "active"


forgotten = typer.Typer(
    help="Prove that users were forgotten, and forget them again after restoring a backup.",
    no_args_is_help=True,
)


@forgotten.command("list")
@in_namespace
def list_forgotten(data: Data = DATA, json_file: JsonFile = None) -> None:
    """List the ledger: when users were forgotten, with how many events, and their digests."""
    from service.domain.timestamps import to_rfc3339

    with open_store(data) as store:
        entries = asyncio.run(_entries(store))
    table = Table("forgotten", "events", "digest (SHA-256 of salt and user id)")
    for entry in entries:
        table.add_row(to_rfc3339(entry.forgotten), f"{entry.events:,}", entry.digest.hex())
    out.print(table if entries else "Nobody was forgotten.")
    rows = [
        {
            "digest": entry.digest.hex(),
            "salt": entry.salt.hex(),
            "forgotten": entry.forgotten,
            "events": entry.events,
        }
        for entry in entries
    ]
    write_json(json_file, rows)


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


def read_ledger(ledger: Path) -> list[Any]:
    """Read the entries of a ledger. Raises `Invalid` if the path leads to none."""
    from service.runtime.data_layout import STORE_FILE
    from service.stores.sqlite.store import SQLiteStore
    from service.stores.values import ForgottenUser

    if ledger.is_dir():
        if not (ledger / STORE_FILE).is_file():
            raise Invalid("", f"LEDGER: {ledger} has no {STORE_FILE}")

        async def read() -> list[Any]:
            store = SQLiteStore(ledger / STORE_FILE)
            try:
                return await _entries(store)
            finally:
                await store.close()

        return asyncio.run(read())
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
