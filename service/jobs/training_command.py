"""Command line of a training that a running service starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service.domain.errors import Invalid
from service.domain.names import DEFAULT_NAMESPACE

MAX_EPOCHS = 1000  # no log needs a tenth of them
MAX_SEED = 2**63 - 1

# name -> least and largest value, or the allowed values
OPTIONS: Mapping[str, tuple[int, int] | tuple[str, ...]] = {
    "epochs": (1, MAX_EPOCHS),
    "preset": ("quick", "best"),
    "seed": (0, MAX_SEED),
}


def training_command(data: Path, encoder: str, options: Mapping[str, Any]) -> Sequence[str]:
    """Return the command that trains on an absolute directory and publishes without activating.

    Raises:
        Invalid: at `/options/NAME`, for an unknown option or a value that is not allowed.
    """
    argv = [sys.executable, "-m", "service.cli", "train", "--as-job", "--json-progress"]
    # The directory is a namespace's own already, whatever HEED_NAMESPACE is inherited.
    argv += ["--no-activate", "--data", str(data), "--namespace", DEFAULT_NAMESPACE]
    argv += ["--encoder", encoder]
    for name, value in options.items():
        allowed = OPTIONS.get(name)
        if allowed is None:
            names = ", ".join(sorted(OPTIONS))
            raise Invalid(f"/options/{name}", f"is not an option of training; those are {names}")
        if isinstance(allowed[0], int):
            least, most = allowed
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise Invalid(f"/options/{name}", f"must be a whole number of at least {least}")
            if value > most:
                raise Invalid(f"/options/{name}", f"must be a whole number of at most {most}")
        elif value not in allowed:
            raise Invalid(f"/options/{name}", f"must be one of {', '.join(map(str, allowed))}")
        argv += [f"--{name}", str(value)]
    return argv
