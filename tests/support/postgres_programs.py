"""Programs of PostgreSQL: where they are, and how tests run them, which root may not."""

from __future__ import annotations

import os
import pwd
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

SUPERUSER = "postgres"
# Without variables like PGDATA and PGPORT of whoever runs the tests.
ENVIRONMENT = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}


def program(name: str) -> str:
    """Return the path of a program of PostgreSQL's, of the newest version where Debian has many.

    Raises:
        FileNotFoundError: there is none; the message says what to install.
    """
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    newest = sorted(versions, key=lambda each: [int(n) for n in each.parts[-2].split(".")])[::-1]
    places = [os.environ.get("PATH", ""), *map(str, newest)]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise FileNotFoundError(
            f"{name} is neither on PATH nor in /usr/lib/postgresql/*/bin: run `make postgres`, "
            "install PostgreSQL's server (Debian's package postgresql), or name a server that "
            "runs in HEED_TEST_POSTGRES=postgresql://…"
        )
    return found


def server_user() -> str | None:
    """Name the user that servers run as: PostgreSQL refuses root; None is whoever runs this."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return SUPERUSER if SUPERUSER in names else "nobody"


def owned_folder() -> Path:
    """Make a folder that belongs to `server_user`, to whom those of pytest's are closed."""
    folder = Path(tempfile.mkdtemp(prefix="heed-postgres-"))
    user = server_user()
    if user is not None:
        shutil.chown(folder, user)
    return folder


def run_as_server(command: Sequence[str], folder: Path) -> None:
    """Run a program of PostgreSQL's as `server_user` until it ends.

    Raises:
        RuntimeError: it failed; the message is its output.
    """
    user = server_user()
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=ENVIRONMENT,
        user=user,
        group=None if user is None else pwd.getpwnam(user).pw_gid,
        extra_groups=None if user is None else [],
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ended.stdout}")


def free_port() -> int:
    """Find a port of the loopback interface that a server can take, and take again later.

    Ports from 32768 on may be given to connections while the server is down.
    """
    while True:
        port = random.randrange(15_000, 32_768)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def multi_host_url(ports: Sequence[int], database: str, **options: object) -> str:
    """Return the URL of servers of this machine, of which libpq takes the first that will do."""
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    query = f"?{urlencode(options)}" if options else ""
    return f"postgresql://{SUPERUSER}@{hosts}/{database}{query}"
