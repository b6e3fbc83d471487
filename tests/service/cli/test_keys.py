"""`heed keys`: tokens are shown once, and records tell what a key may."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.command_line import Heed

TOKEN = re.compile(r"heed_([0-9a-f]{12})_[\w-]{43}\n")


def test_a_created_key_is_printed_once_and_stored_nowhere(heed: Heed, tmp_path: Path) -> None:
    """Stdout is only the token; no file has its secret, and the list tells all but that."""
    assert heed("namespaces", "create", "acme").code == 0
    said = heed(
        *("keys", "create", "--name", "shop", "--scope", "write", "--scope", "read"),
        *("--namespace", "acme", "--rate", "600/min", "--expires", "30d"),
    )
    found = TOKEN.fullmatch(said.out)
    assert found is not None, said
    secret = said.out.strip()[-43:]
    held = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert held
    assert not [path for path in held if secret.encode() in path.read_bytes()]
    listed = heed("keys", "list", "--json", tmp_path / "keys.json")
    assert secret not in listed.out + said.err
    (row,) = json.loads((tmp_path / "keys.json").read_text())["keys"]
    expected = {"id": found[1], "name": "shop", "namespace": "acme", "scopes": ["read", "write"]}
    expected |= {"rate": "600/min", "state": "active", "revoked": None}
    assert expected.items() <= row.items()


def test_a_key_is_revoked_by_id_or_by_a_name_that_is_its_own(heed: Heed, tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        found = TOKEN.fullmatch(heed("keys", "create", "--name", "shop", "--scope", "read").out)
        assert found is not None
        ids.append(found[1])
    ambiguous = heed("keys", "revoke", "shop")
    assert ambiguous.code == 1
    assert all(key_id in ambiguous.err for key_id in ids)
    assert heed("keys", "revoke", ids[0]).code == 0
    assert heed("keys", "revoke", "shop").code == 0
    again = heed("keys", "revoke", ids[1])
    assert (again.code, "no key" in again.err) == (1, True)
    heed("keys", "list", "--json", tmp_path / "keys.json")
    rows = json.loads((tmp_path / "keys.json").read_text())["keys"]
    assert [row["state"] for row in rows] == ["revoked", "revoked"]


def test_wrong_options_of_a_key_are_named(heed: Heed) -> None:
    for option, wrong, allowed in (
        ("--scope", "root", "read, write, train, metrics, admin"),
        ("--name", "My shop", "1 to 64 of a-z"),
        ("--namespace", "..", "1 to 64 of a-z"),
        ("--expires", "soon", "30d"),
        ("--rate", "fast", "100/s"),
    ):
        options = {"--name": "shop", "--scope": "read", option: wrong}
        said = heed("keys", "create", *(part for pair in options.items() for part in pair))
        assert said.code == 1
        assert option in said.err
        assert allowed in " ".join(said.err.split())
    assert "no key" in heed("keys", "list").out
