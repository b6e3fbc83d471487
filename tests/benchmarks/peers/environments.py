"""The environments that peers are installed in, apart from Heed's, and what is in them."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from service.errors import Unavailable

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
