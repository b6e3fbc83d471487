"""Command line of a training that a running service starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service.domain.errors import Invalid
from service.domain.names import DEFAULT_NAMESPACE

# name -> minimum, or the allowed values
OPTIONS: Mapping[str, int | tuple[str, ...]] = {
    "epochs": 1,
    "preset": ("quick", "best"),
    "seed": 0,
}


def training_command(data: Path, encoder: str, options: Mapping[str, Any]) -> Sequence[str]:
    """Return the command that trains on an absolute directory and publishes without activating.

    Raises:
        Invalid: at `/options/NAME`, for an unknown option or a value that is not allowed.
    """
    argv = [sys.executable, "-m", "service.cli", "train", "--json-progress", "--no-activate"]
    # The directory is a namespace's own already, whatever HEED_NAMESPACE is inherited.
    argv += ["--data", str(data), "--namespace", DEFAULT_NAMESPACE, "--encoder", encoder]
    for name, value in options.items():
        allowed = OPTIONS.get(name)
        if allowed is None:
            names = ", ".join(sorted(OPTIONS))
            raise Invalid(f"/options/{name}", f"is not an option of training; those are {names}")
        if isinstance(allowed, int):
            if isinstance(value, bool) or not isinstance(value, int) or value < allowed:
                raise Invalid(f"/options/{name}", f"must be a whole number of at least {allowed}")
        elif value not in allowed:
            raise Invalid(f"/options/{name}", f"must be one of {', '.join(allowed)}")
        argv += [f"--{name}", str(value)]
    return argv
