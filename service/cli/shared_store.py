"""The store of an installation of several machines, for commands that need no other store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from service.cli.console import open_store


@contextmanager
def open_shared_store(data: Path) -> Iterator[Any]:
    """Open the store that machines share; None where the store is a file, which stays closed.

    Models and trainings of one machine are files too: a damaged store does not stand in the way of
    whoever looks after them.
    """
    from service.domain.settings import Settings
    from service.stores.opening import is_shared

    if is_shared(Settings.read().store):
        with open_store(data) as store:
            yield store
    else:
        yield None
