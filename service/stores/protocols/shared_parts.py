"""Parts of a store that several machines share, beside the records."""

from __future__ import annotations

from typing import Protocol

from service.stores.protocols.shared_files import SharedFiles
from service.stores.protocols.shared_jobs import SharedJobs


class SharedParts(Protocol):
    """What the machines that serve one namespace share beside its records."""

    def files(self, kind: str) -> SharedFiles:
        """Return the sets of files of a kind: a word of lower-case letters."""
        ...

    @property
    def jobs(self) -> SharedJobs:
        """Return the records of trainings, of which one at a time runs."""
        ...
