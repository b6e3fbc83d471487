"""Python environments of the peers, apart from Heed's, and the versions in them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from service.domain.errors import Unavailable

ROOT = Path(__file__).parents[3]
_PACKAGES = {
    "peers": ("litserve", "implicit", "chromadb", "qdrant-edge-py"),
    "rectools": ("rectools",),
}
_SAY = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Pythons:
    """Their interpreters; `make bench-peers` names them."""

    peers: Path
    rectools: Path


def versions(pythons: Pythons) -> dict[str, str]:
    """The version of every package that is measured.

    Raises:
        Unavailable: when an interpreter does not run, or a package is not installed.
    """
    found: dict[str, str] = {}
    for name, packages in _PACKAGES.items():
        python = getattr(pythons, name)
        try:
            said = subprocess.run(
                [python, "-I", "-c", _SAY, *packages], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise Unavailable(
                f"{python} does not run ({error}): `make bench-peers` installs the peers"
            ) from error
        found |= json.loads(said.stdout)
        missing = [package for package in packages if package not in found]
        if missing:
            raise Unavailable(
                f"{python} has no {', '.join(missing)}: run `make bench-peers` with a network"
            )
    return found


def ran(
    python: Path,
    module: str,
    arguments: list[str],
    what: str,
    console: Console,
    threads: int = 1,
) -> str:
    """Run a module of this folder and return its stdout; its stderr is progress.

    Raises:
        Unavailable: when it fails, with its last words.
    """
    count = {f"{name}_NUM_THREADS": f"{threads}" for name in ("OMP", "MKL", "OPENBLAS")}
    command = [str(python), "-m", f"{__package__}.{module}", *arguments]
    said: list[str] = []
    with (
        console.status(what) as status,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **count},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process,
    ):
        try:
            for line in process.stderr or ():
                said.append(line)
                status.update(f"{what}: {line.strip()[:80]}")
            answer = process.stdout.read() if process.stdout else ""
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        words = "".join(said).strip()[-500:]
        raise Unavailable(f"{what} ended with {process.returncode}: {words}")
    return answer
