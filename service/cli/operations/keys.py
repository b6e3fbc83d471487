"""`heed keys`: create, list and revoke the API keys of an installation."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from service.cli.console import (
    DATA,
    Data,
    JsonFile,
    err,
    open_directory,
    open_store,
    out,
    write_json,
)
from service.domain.errors import Invalid, NotFound
from service.domain.names import NAME_RULE, is_name

if TYPE_CHECKING:
    from service.domain.keys import ApiKey

keys = typer.Typer(
    help="API keys: create, list and revoke. As soon as there is one, the service answers no "
    "request without a key. Changes are effective at once, also in a running service.",
    no_args_is_help=True,
)


@keys.command()
def create(
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
        known = frozenset(each for each in SCOPES if each in scope)
        if unknown := sorted(set(scope) - known):
            allowed = ", ".join(SCOPES)
            raise Invalid("/scope", f"must be one of {allowed}; it is {unknown[0]!r}")
        key, token = issue_key(
            name,
            known,
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
    scopes = ", ".join(sorted(key.scopes))
    err.print(
        f"Key {key.key_id} of {name} for the namespace {namespace} may {scopes}. "
        "It is shown this once; send it as Authorization: Bearer KEY.",
        markup=False,
        soft_wrap=True,
    )
    out.print(token, markup=False, soft_wrap=True)


@keys.command("list")
def list_keys(data: Data = DATA, json_file: JsonFile = None) -> None:
    """List all keys, oldest first, without what would open anything."""
    from service.domain.timestamps import to_rfc3339

    with open_store(data) as store, open_directory(data) as directory:
        found: list[ApiKey] = asyncio.run(store.keys())
        ids = {key.namespace: directory.namespace_id(key.namespace) for key in found}
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
            "state": _state(key, now, ids[key.namespace]),
        }
        for key in found
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


@keys.command(no_args_is_help=True)
def revoke(
    key: Annotated[str, typer.Argument(help="Id of a key, or the name of exactly one.")],
    data: Data = DATA,
) -> None:
    """Revoke a key, effective with the next request. Its record stays in the list."""
    with open_store(data) as store:
        found: list[ApiKey] = [each for each in asyncio.run(store.keys()) if not each.revoked]
        matching = [each for each in found if key in (each.key_id, each.name)]
        if not matching:
            raise NotFound(f"there is no key {key!r} that is not revoked; see heed keys list")
        if len(matching) > 1:
            ids = ", ".join(each.key_id for each in matching)
            raise Invalid("", f"{len(matching)} keys are named {key!r}; revoke one by id: {ids}")
        asyncio.run(store.revoke_key(matching[0].key_id))
    out.print(f"Key {matching[0].key_id} of {matching[0].name} is revoked.", markup=False)


def _state(key: ApiKey, now: int, namespace_id: str | None) -> str:
    if key.revoked is not None:
        return "revoked"
    if key.namespace_id != namespace_id:
        return "namespace removed"
    return "expired" if key.is_expired(now) else "active"
