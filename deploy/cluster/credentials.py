"""Passwords of the cluster's database, created once in the volume that its containers share.

Runs in Heed's image, as its user. A file that exists is left as it is, so that an operator may
bring passwords of their own. The group of the files is Heed's, of which PostgreSQL's containers
are members; `pgpass` is for the clients of libpq, which refuses a file that others can read.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

FOLDER = Path("/keys")
ROLES = ("superuser", "replication", "heed", "patroni")  # the last one guards Patroni's own API


def keep(path: Path, text: str, mode: int) -> None:
    """Write a file as a whole, unless it exists."""
    if path.exists():
        return
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask
        file.write(text)
        os.fsync(file.fileno())
    draft.rename(path)


def main(folder: Path = FOLDER) -> None:
    """Create what is missing."""
    for role in ROLES:
        keep(folder / role, f"{secrets.token_urlsafe(32)}\n", 0o640)
    password = (folder / "heed").read_text().strip()
    keep(folder / "pgpass", f"*:*:*:heed:{password}\n", 0o600)


if __name__ == "__main__":
    main()
